"""This module writes configuration files of other programs in one step, and can restore their old content."""

import hashlib
import json
import os
from pathlib import Path

from ruvmlx.errors import NotFound, RuvmlxError, UsageError
from ruvmlx.platform.files import make_folder, remove, replacing


def text_of(path: Path) -> str | None:
    """Return the text of a file with the file's own line ends, or None if there is no file. Raise UsageError
    if the file is not UTF-8."""
    try:
        return path.read_bytes().decode() if path.exists() else None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8, or remove it."
        ) from None


def write_over(path: Path, text: str, record: Path) -> None:
    """Write a text to a file, and store the file's old content in the file `record`. If nobody has changed
    the file since the last call for this file, `record` keeps the content from before that call."""
    before = text_of(path)
    known = _read_record(record)
    if known is not None and known["path"] == str(path):
        before = known["before"] if known["after"] == _digest(before) else before
    facts = {"path": str(path), "before": before, "after": _digest(text)}
    _write(record, json.dumps(facts))
    _write(path, text)


def put_back(record: Path) -> Path:
    """Restore the old content of the file whose record this is, and return the file's path. Raise NotFound if
    there is no record, and RuvmlxError if the file has changed after the write."""
    known = _read_record(record)
    if known is None:
        raise NotFound("nothing was written with --write, so there is nothing to put back.")
    path, before = Path(str(known["path"])), known["before"]
    now = text_of(path)
    if now == before:  # an earlier call was killed before it removed the record
        remove(record)
        return path
    if _digest(now) != known["after"]:
        raise RuvmlxError(f"{path} has changed since --write; remove the lines of ruvmlx by hand.")
    if before is None:
        remove(path)
    else:
        _write(path, before)
    remove(record)
    return path


def _read_record(record: Path) -> dict[str, str | None] | None:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        return {name: found[name] for name in ("path", "before", "after")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    """Replace the content of the file `path`. A program that reads the file meanwhile gets the old content or
    the new content. If `path` is a symbolic link, the link stays."""
    path = path.resolve()
    make_folder(path.parent)
    # a new file can contain an API key, so only the user can read it
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    with replacing(path) as file:
        os.fchmod(file.fileno(), mode)
        file.write(text.encode())
