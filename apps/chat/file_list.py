"""This module lists the user's files for the file picker. A message can include the text of a file by the
mention `@name`."""

import os
from collections.abc import Iterator
from pathlib import Path

from ruvmlx.text import count as count_of
from ruvmlx.text import size

from .mentions import MAX_FILE_BYTES
from .models import PickerEntry
from .pdf_text import MAX_PDF_BYTES
from .user_files import UserFiles

MOST_FILES = 5000
BYTES_A_TOKEN = 4  # approximate bytes per token of English text
_SKIPPED = {"__pycache__", "node_modules"}


def entries(files: UserFiles) -> list[PickerEntry]:
    """Return entries for the text files and PDFs in the user's folder and in the folders below this folder,
    with the size of each PDF and the approximate number of tokens of each text file. The list has at most
    MOST_FILES entries, and no hidden files. A file is a text file if its first 1,024 bytes have no zero."""
    assert files.folder is not None
    found = list[PickerEntry]()
    for path in _walk(files.folder):
        if len(found) >= MOST_FILES:
            break
        if (entry := _entry(path, path.relative_to(files.folder).as_posix())) is not None:
            found.append(entry)
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _entry(path: Path, name: str) -> PickerEntry | None:
    """Return the picker's entry for a file. Return None if the file has no text, cannot be read, or has a
    name that cannot stand in a message."""
    if not name.isprintable() or '"' in name:
        return None
    is_pdf = path.suffix.lower() == ".pdf"
    try:
        if not path.is_file():
            return None
        count = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(1024)
    except OSError:
        return None
    if not count or (b"\0" in begin and not is_pdf):
        return None
    if count > (MAX_PDF_BYTES if is_pdf else MAX_FILE_BYTES):
        return PickerEntry(name, size(count), problem="too long to put into a message")
    tokens = count_of(-(-count // BYTES_A_TOKEN), "token")
    return PickerEntry(name, size(count) if is_pdf else f"about {tokens}")


def mention(name: str) -> str:
    """Return the mention of a file for a message: "my notes.md" -> '@"my notes.md"'."""
    return f'@"{name}"' if " " in name else f"@{name}"
