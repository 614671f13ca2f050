"""This module changes one value in the user's settings file. All other lines of the file stay unchanged, also
comments; a comment on the changed line itself is lost."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import StoreError, UsageError
from ..platform import files
from .sources import read_file, user_file
from .table import parse, setting_text, spec_of


def remove(name: str) -> Path | None:
    """Remove one value from the user's settings file, so that the file no longer sets it. Return the path of
    the file, or None if the file does not have the value."""
    spec_of(name)
    if name not in read_file(user_file()):
        return None
    with _locked_file() as path:
        values = {other: value for other, value in read_file(path).items() if other != name}
        _write(path, [text for text in _statements(path) if not _sets(text, name)], values)
    return path


def save(name: str, value: str) -> Path:
    """Set one value in the user's settings file and return the path of the file."""
    line = f"{name} = {_toml(setting_text(parse(name, value, 'the command line')))}\n"
    with _locked_file() as path:
        # this call raises UsageError if the file is unreadable; an unreadable file must not be overwritten
        values = read_file(path) | tomllib.loads(line)
        _write(path, _replace_statement(list(_statements(path)), name, line), values)
    return path


@contextmanager
def _locked_file() -> Iterator[Path]:
    """Yield the path of the user's settings file. No other process changes the file before the end of the
    `with` block. Raises StoreError if the block cannot write the file."""
    path = user_file()
    try:
        files.make_folder(path.parent)
        with files.lock_folder(path.parent):
            yield path
    except OSError as e:
        raise StoreError(
            f"cannot write {path}: {e.strerror}. Set RUVMLX_HOME to a folder you can write, on a local disk."
        ) from e


def _write(path: Path, texts: Sequence[str], values: Mapping[str, Any]) -> None:
    """Write the texts to the settings file. values: the values that the written file must have. Raise
    UsageError, and write nothing, if the texts would have other values. Raise OSError."""
    text = "".join(texts)
    if _values(text) != values:
        raise UsageError(f"cannot change {path} line by line. Change it in an editor.")
    with files.replacing(path.resolve()) as f:  # a symbolic link stays a link
        f.write(text.encode())


def _statements(path: Path) -> Iterator[str]:
    """Yield the statements of a TOML file with their line ends. A statement can have several lines. It ends
    at the first line end at which the TOML parser accepts the statement."""
    text = ""
    for line in path.read_text(encoding="utf-8-sig").splitlines(keepends=True) if path.exists() else []:
        text += line
        if _values(text) is not None:
            yield text
            text = ""
    yield text


def _values(text: str) -> dict[str, Any] | None:
    """Return the values of a TOML text, or None if the text is no TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _sets(statement: str, name: str) -> bool:
    return name in (_values(statement) or {})


def _replace_statement(statements: list[str], name: str, line: str) -> list[str]:
    """Return the statements with `line` in place of the statement that sets this setting. If no statement
    sets it, add `line` at the end."""
    at = [i for i, old in enumerate(statements) if _sets(old, name)]
    if at:
        return [*statements[: at[0]], line, *statements[at[0] + 1 :]]
    ended = [old if old.endswith("\n") or not old else old + "\n" for old in statements]
    return [*ended, line]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        escaped = "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped)
        return f'"{escaped}"'
    return repr(value)
