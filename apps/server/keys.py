"""API keys: which are valid, and the file that keeps them."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from ruvmlx import settings
from ruvmlx.errors import StoreError, UsageError
from ruvmlx.platform.files import read_ordinary

MAX_FILE_BYTES = 1 << 20  # bytes of the file

_MIN_KEY_CHARACTERS = 16  # characters of a key that somebody chose


def key_file() -> Path:
    """A line for each key: KEY, or KEY ADAPTER if the key has an adapter of its own. Readable by its owner
    alone."""
    return settings.home() / "api_keys"


def salt_digest(*parts: str) -> str:
    """A digest that tells keys and users apart and cannot be turned back into them."""
    lengths = [f"{len(part)}:{part}" for part in ("ruvmlx cache", *parts)]
    return hashlib.sha256("".join(lengths).encode()).hexdigest()[:32]


def matching(given: str, keys: Sequence[str]) -> str | None:
    """The key that was given, if it is one of these. Takes as long for a wrong key as for a right one."""
    found = None
    for key in keys:
        if hmac.compare_digest(key.encode(), given.encode()):
            found = key
    return found


def check_key(key: str) -> str:
    """The key; UsageError if it cannot be sent in a header, or can be guessed."""
    if len(key) < _MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"an API key needs {_MIN_KEY_CHARACTERS} or more printable ASCII characters without spaces; "
            "without --api-key, one is made where it is needed."
        )
    return key


def saved_keys() -> list[str]:
    """The keys in the file; none if there is no file. StoreError if others may read it."""
    return [key for key, _ in _read_keys()]


def own_adapters() -> dict[str, str]:
    """The adapters that belong to one key alone, by key."""
    return {key: adapter for key, adapter in _read_keys() if adapter is not None}


def _read_keys() -> list[tuple[str, str | None]]:
    """Each key of the file with its adapter, if it has one."""
    path = key_file()
    try:
        if path.stat().st_mode & 0o077:
            raise StoreError(f"others can read {path}; run `chmod 600 {path}`, or delete it for a new key.")
        lines = read_ordinary(path, MAX_FILE_BYTES).decode("ascii").splitlines()
        return [_parse_key(line) for line in lines if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read {path}: {error}. Mend or remove it.") from error


def _parse_key(line: str) -> tuple[str, str | None]:
    """KEY or KEY ADAPTER"""
    key, *rest = line.split()
    if len(rest) > 1:
        raise UsageError(f"a line of {key_file()} has {1 + len(rest)} words; expected KEY or KEY ADAPTER.")
    if rest and settings.parse("adapter", rest[0], str(key_file())) == "none":
        raise UsageError(f"{key_file()}: none is not the name of an adapter; name one, or leave it out.")
    return check_key(key), rest[0] if rest else None


def new_key() -> str:
    """Make a key and save it, readable by its owner alone."""
    path, key = key_file(), "rvm-" + secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="ascii") as f:
            f.write(key + "\n")
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}. Set RUVMLX_HOME to a folder you can write."
        ) from error
    return key
