"""This module checks API keys, and stores the server's own keys in a file."""

import hashlib
import hmac
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path

from ruvmlx import settings
from ruvmlx.errors import StoreError, UsageError
from ruvmlx.platform.files import lock_folder, make_folder, read_ordinary, replacing

MAX_FILE_BYTES = 1 << 20  # the maximum size of the key file in bytes

_MIN_KEY_CHARACTERS = 16  # the minimum length of a key that a user chose


def key_file() -> Path:
    """Return the path of the key file. Each line of the file has one key: KEY, or KEY ADAPTER if only this
    key uses the adapter. Only the owner of the file must be able to read it."""
    return settings.home() / "api_keys"


def salt_digest(*parts: str) -> str:
    """Return a digest of the parts, for example of an API key and the name of a user. Different keys or users
    get different digests. The digest does not show the key."""
    lengths = [f"{len(part)}:{part}" for part in ("ruvmlx cache", *parts)]
    return hashlib.sha256("".join(lengths).encode()).hexdigest()[:32]


def matching(given: str, keys: Sequence[str]) -> str | None:
    """Return the given key if it is in `keys`, or else None. The time of a check does not depend on the
    number of right characters in the given key, so an attacker cannot guess a key piece by piece."""
    found = None
    for key in keys:
        if hmac.compare_digest(key.encode(), given.encode()):
            found = key
    return found


def check_key(key: str, advice: str = "without --api-key, one is made where it is needed.") -> str:
    """Return the key if it is valid. Raise UsageError if the key has a space or a character that is not
    printable ASCII, or if the key has fewer than _MIN_KEY_CHARACTERS characters. advice: what the error tells
    the user to do."""
    if len(key) < _MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"an API key needs {_MIN_KEY_CHARACTERS} or more printable ASCII characters without spaces; "
            f"{advice}"
        )
    return key


def saved_keys() -> list[str]:
    """Return the keys in the key file, or no keys if there is no file. Raise StoreError if the permissions
    give other users access to the file, or if the file cannot be read. Raise UsageError if a line is
    wrong."""
    return [key for key, _ in _read_keys()]


def saved_chat_keys() -> list[str]:
    """Return the keys in the key file that open the chat app: those without an adapter of their own."""
    return [key for key, adapter in _read_keys() if adapter is None]


def own_adapters() -> dict[str, str]:
    """Return a mapping from a key to the adapter that only this key uses."""
    return {key: adapter for key, adapter in _read_keys() if adapter is not None}


def _read_keys() -> list[tuple[str, str | None]]:
    """Return each key of the key file with its adapter, or with None if the key has no separate adapter."""
    path = key_file()
    try:
        if path.stat().st_mode & 0o077:
            command = f"chmod 600 {shlex.quote(str(path))}"
            raise StoreError(f"others can read {path}; run `{command}`, or delete it for a new key.")
        lines = read_ordinary(path, MAX_FILE_BYTES).decode("ascii").splitlines()
        return [_parse_key(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read {path}: {error}. Mend or remove it.") from error


def _parse_key(line: str, number: int) -> tuple[str, str | None]:
    """Split a line of the key file, KEY or KEY ADAPTER, into the key and the adapter. number: the line's
    number, for the error about a key."""
    key, *rest = line.split()
    if len(rest) > 1:
        raise UsageError(f"a line of {key_file()} has {1 + len(rest)} words; expected KEY or KEY ADAPTER.")
    if rest and settings.parse("adapter", rest[0], str(key_file())) == "none":
        raise UsageError(f"{key_file()}: none is not the name of an adapter; name one, or leave it out.")
    return check_key(key, f"mend or remove line {number} of {key_file()}."), rest[0] if rest else None


def new_key() -> str:
    """Make a key and add it to the key file. If there is no key file, make one that only the owner can
    read."""
    path, key = key_file(), "rvm-" + secrets.token_urlsafe(32)
    try:
        make_folder(path.parent)
        with lock_folder(path.parent):  # another process can make a key now
            lines = path.read_bytes().splitlines() if path.exists() else []
            with replacing(path.resolve()) as file:
                file.write(b"".join(line + b"\n" for line in [*lines, key.encode()]))
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}. Set RUVMLX_HOME to a folder you can write, on a local "
            "disk."
        ) from error
    return key
