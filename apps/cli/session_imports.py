"""This module imports the chats of files for `ruvmlx sessions import`, and tells the result."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruvmlx.errors import CorruptFile, RuvmlxError, UsageError, error_line
from ruvmlx.text import one_line

from .output import log
from .text_output import count as count_of


def import_each(
    store: Any, files: Sequence[Path], failures: list[RuvmlxError], count: Callable[[], None]
) -> Iterator[Any]:
    """Import each file and yield the result. If a file cannot be read or has no chat, append the error to
    `failures` and continue. `count` is called after each file."""
    from ruvmlx.chats.chat_file import import_once, read_bytes, read_limited

    for file in files:
        try:
            here = str(file) == "-" and sys.stdin
            data = read_limited(sys.stdin.buffer, "standard input") if here else read_bytes(file)
            yield import_once(store, data, one_line(str(file)))
        except (CorruptFile, UsageError) as e:
            failures.append(e)
        count()


@contextmanager
def watching_many(total: int) -> Iterator[Callable[[], None]]:
    """Yield a function that counts one more imported file, and shows the progress of several files."""
    from ruvmlx.progress import Count

    from ..progress import watching

    done = Count("Importing", total, unit="files")
    with watching() as watch:

        def count() -> None:
            done.add(1)
            if total > 1:
                watch.progress(done.now())

        yield count


def tell_imported(rows: Sequence[dict[str, Any]], failures: Sequence[RuvmlxError]) -> None:
    for error in failures:
        log(f"Not imported: {error_line(error)}")
    new = sum(row["is_new"] for row in rows)
    if len(rows) + len(failures) > 1:
        failed = f", {count_of(len(failures), 'file')} not" if failures else ""
        log(f"{count_of(new, 'chat')} imported, {len(rows) - new:,} there already{failed}.")
    elif rows and not new:
        log(f"Nothing was imported: chat {rows[0]['id']} begins with the same messages.")
