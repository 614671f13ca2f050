"""This module changes one value in the user's settings file. All other lines of the file stay unchanged, also
comments; a comment on the changed line itself is lost."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..platform import files
from .sources import read_file, user_file
from .table import parse, setting_text, spec_of


def remove(name: str) -> Path | None:
    """Remove one value from the user's settings file, so that the file no longer sets it. Return the path of
    the file, or None if the file does not have the value."""
    spec_of(name)
    path = user_file()
    if name not in read_file(path):
        return None
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    _write(path, [line for line in lines if not _sets(line, name)])
    return path


def save(name: str, value: str) -> Path:
    """Set one value in the user's settings file and return the path of the file."""
    line = f"{name} = {_toml(setting_text(parse(name, value, 'the command line')))}\n"
    # this call raises UsageError if the file is unreadable; an unreadable file must not be overwritten
    read_file(user_file())
    path = user_file()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    _write(path, _replace_line(lines, name, line))
    return path


def _write(path: Path, lines: Sequence[str]) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.replacing(path) as f:
            f.write("".join(lines).encode())
    except OSError as e:
        raise StoreError(
            f"cannot write {path}: {e.strerror}. Set RUVMLX_HOME to a folder you can write."
        ) from e


def _sets(line: str, name: str) -> bool:
    return re.match(rf"\s*{name}\s*=", line) is not None


def _replace_line(lines: list[str], name: str, line: str) -> list[str]:
    """Return the lines with `line` in place of the line that sets this setting. If no line sets it, add
    `line` at the end."""
    at = [i for i, old in enumerate(lines) if _sets(old, name)]
    if at:
        return [*lines[: at[0]], line, *lines[at[0] + 1 :]]
    ended = [old if old.endswith("\n") else old + "\n" for old in lines]
    return [*ended, line]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        escaped = "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped)
        return f'"{escaped}"'
    return repr(value)
