"""This module reads and writes one file of the stored KV caches. README.md has the layout.

A file holds a page, a partly filled page, or a whole sequence of a cache without pages. The header repeats
the page's name, so `read` detects a file that was renamed. The file ends with a checksum of all other bytes.
"""

import json
import os
import struct
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..platform.files import is_running, open_ordinary, read_ordinary
from .chain import NAME
from .storage import Bytes

MAGIC, FORMAT = b"RUVMLXPG", 1
# the start of the header: magic, format, tier, name, bytes of the JSON text, bytes of the body
HEAD = struct.Struct(f"<8sHH{NAME}sIQ")
UNFINISHED = ".new"
WHOLE = 255  # the tier field of a file that holds a whole sequence of a cache without pages
MAX_FILE_BYTES = 4 << 30  # the maximum size in bytes of a file that is read
# The exceptions that can occur when a damaged file is read. The JSON values in the file's header can have any
# type.
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
_CRC = struct.Struct("<I")
# bytes between two checks of the time in `write`; maximum bytes of JSON text that `peek` reads
_PIECE = 4 << 20


class PageFile(NamedTuple):
    """The content of a page file.

    name: the page's name, computed as in chain.py
    tier: the page's tier (precision), or WHOLE for a whole sequence
    facts: values in JSON
    nbytes: the number of bytes of the body
    """

    name: bytes
    tier: int
    facts: dict[str, Any]
    nbytes: int


class TooLate(Exception):
    """This error means that `write` was not finished at its time limit `until`."""


def write(path: Path, file: PageFile, parts: Iterable[Bytes], until: float) -> None:
    """Write a new file beside `path`, wait until the disk has the bytes, then rename the new file to `path`.
    After a crash, `path` is therefore a whole file (the new or an older file) or missing. Raises OSError if
    the disk refuses the write, and TooLate if time.monotonic() passes `until`."""
    text = json.dumps(file.facts, separators=(",", ":")).encode()
    head = HEAD.pack(MAGIC, FORMAT, file.tier, file.name, len(text), file.nbytes) + text
    fresh = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(handle, "wb") as out:
            out.write(head)
            crc = zlib.crc32(head)
            for part in parts:
                for at in range(0, part.nbytes, _PIECE):
                    if time.monotonic() > until:
                        raise TooLate
                    piece = part[at : at + _PIECE].data
                    crc = zlib.crc32(piece, crc)
                    out.write(piece)
            out.write(_CRC.pack(crc))
            out.flush()
            os.fsync(handle)
        os.replace(fresh, path)
    except BaseException:
        unlink(fresh)
        raise


def read(path: Path, name: bytes, tier: int) -> tuple[dict[str, Any], memoryview]:
    """Return the facts (the JSON values in the header) and the body (the bytes of the page) of a page file.
    Raises OSError if the file cannot be read, and ValueError if the file is damaged or has another name or
    tier."""
    with open_ordinary(path) as file:
        head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        raise ValueError("the file is too short")
    magic, version, its_tier, its_name, text, nbytes = HEAD.unpack(head)
    if (magic, version, its_tier, its_name) != (MAGIC, FORMAT, tier, name):
        raise ValueError("the file is another one")
    length = HEAD.size + text + nbytes + _CRC.size
    data = memoryview(read_ordinary(path, min(length, MAX_FILE_BYTES)))
    if len(data) != length:
        raise ValueError("the file has another length")
    if _CRC.unpack(data[-_CRC.size :])[0] != zlib.crc32(data[: -_CRC.size]):
        raise ValueError("the file is damaged")
    return read_facts(data[HEAD.size :][:text]), data[HEAD.size + text : -_CRC.size]


def read_facts(text: bytes | memoryview) -> dict[str, Any]:
    """Parse the JSON object `text`. Raises ValueError if `text` is no JSON object."""
    try:
        facts = json.loads(bytes(text))
    except RecursionError:
        raise ValueError("the facts are nested too deeply") from None
    if not isinstance(facts, dict):
        raise ValueError("the facts are no object")
    return facts


def peek(path: Path) -> dict[str, Any]:
    """Return the facts (the JSON values in the header) of a page file. This function does not check the
    file's body and checksum; `read` checks the whole file. Returns {} if the facts are unreadable."""
    try:
        with open_ordinary(path) as file:
            text = HEAD.unpack(file.read(HEAD.size))[4]
            return read_facts(file.read(min(text, _PIECE)))
    except (OSError, ValueError, struct.error):
        return {}


def size(file: PageFile) -> int:
    """Return the approximate number of bytes that `write` writes for this file."""
    return HEAD.size + _CRC.size + file.nbytes + 8 * len(file.facts.get("tokens", ()))


def age(path: Path | str) -> tuple[float, int]:
    """Return (time of the file's last use in seconds since 1970, size in bytes), or (0, 0) if the system
    cannot tell them, for example because the file does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return 0.0, 0
    return found.st_mtime, found.st_size


def is_abandoned(name: str) -> bool:
    """Return True if the process that wrote the unfinished file `name` runs no more."""
    process = name.removesuffix(UNFINISHED).rpartition(".")[2]
    return process.isdecimal() and not is_running(int(process))


def unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
