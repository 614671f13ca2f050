"""KV caches of chats on disk, so that a chat that is opened again needs no second prefill. Format: README.md.

A file that cannot be used is ignored or removed; nothing here is an error for the user. A file holds the
tokens of its chat, so it is as private as the store beside it and is deleted with the chat.
"""

import json
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from .. import __version__
from ..tiers import PAGE
from .cache import Dump

MAGIC, FORMAT = b"RUVMLXKV", 1
SUFFIX, UNFINISHED = ".kv", ".new"
ENOUGH = 0.3  # seconds at the end of a process; no further file is started after them
LONGEST = 1.0  # seconds after which an unfinished write is given up
STALE = 60.0  # seconds after which an unfinished file counts as abandoned
PREFIX = struct.Struct("<8sII")  # magic, bytes of the header, their CRC
_CRC = struct.Struct("<I")
_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}", re.ASCII)
_PIECE = 4 << 20  # bytes written between two checks of the time

Key = dict[str, Any]  # what keys and values depend on besides the tokens; plain JSON


class Restorable(Protocol):
    def restore(self, facts: dict[str, Any], read: Callable[[int], bytes]) -> None: ...


@dataclass(frozen=True)
class Header:
    """key: what keys and values depend on (`Key`); tokens: ids that the cache holds; cache: facts of its
    `Dump`; nbytes: size of the body that follows."""

    key: Key
    tokens: list[int]
    cache: dict[str, Any]
    nbytes: int
    format: int = FORMAT
    made_by: str = __version__


class CacheFolder:
    """One file for each chat, at most `budget` bytes in all; 0 keeps none. The least recently written files
    are evicted first."""

    def __init__(self, path: Path, budget: int):
        self.path, self.budget = path, budget

    @classmethod
    def beside(cls, store: Path, budget: int = 0) -> "CacheFolder":
        """The folder that belongs to a store."""
        return cls(store.parent / "kv", budget)

    # One chat -----------------------------------------------------------------------------------

    def save(self, session_id: str, key: Key, tokens: list[int], dump: Dump, until: float) -> bool:
        """Write a cache to disk. Returns False and leaves the old file if the cache is too small or too
        large, if the disk refuses it, or if writing takes longer than `until` (time.monotonic())."""
        if len(tokens) < PAGE or not _NAME.fullmatch(session_id):
            return False
        header = _packed(Header(key, tokens, dump.facts, dump.nbytes))
        size = len(header) + dump.nbytes + _CRC.size
        if size > self.budget:
            return False
        with suppress(OSError, _TooLate):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(size, session_id)
            with self._replacing(session_id) as file:
                file.write(header)
                file.write(_CRC.pack(_write(file, dump, until)))
            return True
        return False

    def load(self, session_id: str, key: Key, prompt: Sequence[int], cache: Restorable) -> list[int] | None:
        """Fill an empty cache and return the tokens that it holds. None if no file fits this prompt: drop the
        cache then. A damaged file is removed."""
        path = self._file(session_id)
        if not _NAME.fullmatch(session_id):
            return None
        try:
            with path.open("rb") as file:
                header = _read_header(file)
                if header.key != key or header.tokens[:PAGE] != list(prompt[:PAGE]):
                    return None
                body = _Body(file, header.nbytes)
                cache.restore(header.cache, body.read)
                body.check()
                return header.tokens
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            self.remove(session_id)
            return None

    def remove(self, session_id: str) -> None:
        with suppress(OSError):
            self._file(session_id).unlink(missing_ok=True)

    # All of them --------------------------------------------------------------------------------

    def tidy(self, known: Collection[str]) -> None:
        """Remove files of deleted chats, unfinished files, and what exceeds the budget."""
        for file in self._files():
            if file.stem not in known:
                _unlink(file)
        for file in self._listed(UNFINISHED):
            if time.time() - _age(file)[0] > STALE:
                _unlink(file)
        self._make_room(0)

    def contents(self) -> tuple[int, int]:
        """(chats, bytes)"""
        sizes = [size for _, size in map(_age, self._files())]
        return len(sizes), sum(sizes)

    # Inside -------------------------------------------------------------------------------------

    def _file(self, session_id: str) -> Path:
        return self.path / (session_id + SUFFIX)

    def _files(self) -> list[Path]:
        return self._listed(SUFFIX)

    def _listed(self, suffix: str) -> list[Path]:
        try:
            return [file for file in self.path.iterdir() if file.suffix == suffix]
        except OSError:
            return []

    def _make_room(self, size: int, session_id: str = "") -> None:
        """Remove the least recently written files until `size` more bytes fit the budget. The chat's own file
        is not counted: it will be replaced."""
        others = [file for file in self._files() if file.stem != session_id]
        ages = sorted((*_age(file), file) for file in others)
        held = size + sum(nbytes for _, nbytes, _ in ages)
        for _, nbytes, file in ages:
            if held <= self.budget:
                break
            _unlink(file)
            held -= nbytes

    @contextmanager
    def _replacing(self, session_id: str) -> Iterator[BinaryIO]:
        """Written beside, then renamed: a crash leaves the old file or none. It is not synchronised: what a
        power cut leaves of it has a wrong checksum, and the chat is read again."""
        fresh = self.path / f"{session_id}.{os.getpid()}{UNFINISHED}"
        try:
            handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(handle, "wb") as file:
                yield file
            os.replace(fresh, self._file(session_id))
        except BaseException:
            _unlink(fresh)
            raise


class _TooLate(Exception):
    """Writing took longer than `until`."""


def _packed(header: Header) -> bytes:
    text = json.dumps(vars(header), separators=(",", ":")).encode()
    return PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text


def _read_header(file: BinaryIO) -> Header:
    """ValueError unless the file has this version's format and the length that its header states."""
    magic, length, crc = PREFIX.unpack(_exactly(file, PREFIX.size))
    size = os.fstat(file.fileno()).st_size
    if magic != MAGIC or length > size:
        raise ValueError("no cache")
    text = _exactly(file, length)
    if zlib.crc32(text) != crc:
        raise ValueError("the header is damaged")
    header = Header(**json.loads(text))
    if (header.format, header.made_by) != (FORMAT, __version__):
        raise ValueError("another version's")
    if size != PREFIX.size + length + header.nbytes + _CRC.size:
        raise ValueError("the file has another length")
    return header


def _write(file: BinaryIO, dump: Dump, until: float) -> int:
    """Write the parts of the dump, then their CRC."""
    crc = 0
    for part in dump.parts:
        for at in range(0, part.nbytes, _PIECE):
            if time.monotonic() > until:
                raise _TooLate
            piece = part[at : at + _PIECE].data
            crc = zlib.crc32(piece, crc)
            file.write(piece)
    return crc


class _Body:
    """The part after the header: nbytes bytes and their CRC."""

    def __init__(self, file: BinaryIO, nbytes: int):
        self._file, self._left, self._crc = file, nbytes, 0

    def read(self, n: int) -> bytes:
        if not 0 <= n <= self._left:
            raise ValueError(f"{n} bytes of {self._left}")
        data = _exactly(self._file, n)
        self._left -= n
        self._crc = zlib.crc32(data, self._crc)
        return data

    def check(self) -> None:
        if self._left or _CRC.unpack(_exactly(self._file, _CRC.size))[0] != self._crc:
            raise ValueError("the pages are damaged")


def _exactly(file: BinaryIO, n: int) -> bytes:
    data = file.read(n)
    if len(data) != n:
        raise EOFError
    return data


def _age(file: Path) -> tuple[float, int]:
    """(time of the last write in seconds since 1970, bytes); zeros when the file is gone."""
    try:
        found = file.stat()
    except OSError:
        return 0.0, 0
    return found.st_mtime, found.st_size


def _unlink(file: Path) -> None:
    with suppress(OSError):
        file.unlink(missing_ok=True)
