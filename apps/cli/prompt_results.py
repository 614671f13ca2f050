"""This module writes the results of `generate --prompts`: a line for each prompt, in the order of the
prompts.

    {"id": "a", "reply_id": ..., "text": ..., "finish_reason": ...}
    {"id": "b", "line": 2, "error": "..."}

If something ends a run early, the next run continues after the last result in the file.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ruvmlx.errors import UsageError
from ruvmlx.platform.files import NO_LOCKS, flush_to_disk, sync_folder
from ruvmlx.text import one_line

from .prompt_lines import PromptLine
from .text_output import count

BEGINNING = b'{"id": '  # the first characters of each line of results


@dataclass
class Tally:
    """The counts of results of `generate --prompts`. kept: the number of results of earlier runs that the
    file already has. failed: the number of results that are errors, the kept results included."""

    kept: int = 0
    answered: int = 0
    failed: int = 0
    generation_tokens: int = 0

    def sentence(self, seconds: float) -> str:
        """Return the counts as words: "3 prompts answered in 2.1 s, 40 tokens/s; 5 were done before; 1
        failed: their lines have an error."."""
        speed = f", {self.generation_tokens / seconds:.0f} tokens/s" if self.answered and seconds else ""
        text = f"{count(self.answered, 'prompt')} answered in {seconds:.1f} s{speed}"
        text += f"; {self.kept:,} were done before" if self.kept else ""
        return text + (f"; {self.failed:,} failed: their lines have an error." if self.failed else ".")


@contextmanager
def result_file(path: Path) -> Iterator[BinaryIO]:
    """Open the file of results, and lock it against other processes of this command. Create the file if it
    does not exist. Raise UsageError if another process has locked the file, or if it cannot be written."""
    name = one_line(str(path))
    with ExitStack() as opened:
        try:
            file = opened.enter_context(open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process writes {name}; wait for it, or give another name.") from None
        except OSError as e:
            if e.errno in NO_LOCKS:
                raise UsageError(
                    f"the file system of {name} has no locks; give a file on another disk."
                ) from e
            raise UsageError(f"cannot write {name}: {e.strerror}.") from e
        yield file
        flush_to_disk(file.fileno())
        sync_folder(path.absolute().parent)  # the file can be new


def write_line(file: BinaryIO, facts: Mapping[str, Any]) -> None:
    """Append one result to the file of results. If the process is killed after this call, the file still has
    the result."""
    file.write(json.dumps(facts).encode() + b"\n")
    file.flush()


def skip_answered(file: BinaryIO, name: str, lines: Iterator[PromptLine], tally: Tally) -> None:
    """Set the file's position to the end of the earlier results, and skip the prompts that already have a
    result. Remove an incomplete last line of the file. If the lines of the file are not results of these
    prompts, raise UsageError and do not change the file."""
    end = 0
    while raw := file.readline():
        if not raw.endswith(b"\n"):
            if raw.startswith(BEGINNING) or BEGINNING.startswith(raw):
                break
            raise UsageError(f"{name} is no file of results; give another name.")
        found, line = _result(raw), next(lines, None)
        if found is None:
            raise UsageError(f"line {tally.kept + 1} of {name} is no result; give another name.")
        if line is None or found["id"] != line.id:
            wanted = "there are no more prompts" if line is None else f"the prompt there has id {line.id!r}"
            raise UsageError(
                f"{name} has results of other prompts: line {tally.kept + 1} is of id {found['id']!r}, and "
                f"{one_line(wanted)}. Give another name."
            )
        tally.kept += 1
        tally.failed += "error" in found
        end += len(raw)
    file.truncate(end)
    file.seek(end)


def _result(raw: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        found = json.loads(raw)
        if isinstance(found, dict) and "id" in found and ("text" in found or "error" in found):
            return found
    return None
