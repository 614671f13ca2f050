"""This module reads an old format of stored KV caches: one file `<chat>.kv` for each chat, with the chat's
whole cache. disk.py writes a newer format. This module reads an old file once, when its chat continues;
disk.py then removes the file. The layout has the byte offset, the size and the content of each field:

    0   8 bytes   "RUVMLXKV"
    8   u32       bytes of the header
    12  u32       CRC-32 of the header
    16  header    JSON: {"key", "tokens", "cache", "nbytes", "format": 1, "made_by": version of ruvmlx}
        pages     nbytes bytes, as the cache's `dump` returned them
        u32       CRC-32 of the pages
"""

import struct
import zlib
from pathlib import Path
from typing import Any

from ..platform.files import read_ordinary
from . import page_file
from .chain import MADE_BY, Key

SUFFIX = ".kv"
_MAGIC, _FORMAT = b"RUVMLXKV", 1
_PREFIX, _CRC = struct.Struct("<8sII"), struct.Struct("<I")


def load(path: Path, key: Key, cache: Any) -> list[int]:
    """Fill the empty `cache` from the file `path` and return the cache's tokens. Raises one of
    page_file.UNUSABLE if there is no file, or if the file is damaged, has another key or is of another
    version of ruvmlx. After an exception, do not use the cache, because it can be partly filled."""
    data = memoryview(read_ordinary(path, page_file.MAX_FILE_BYTES))
    if len(data) < _PREFIX.size + _CRC.size:
        raise ValueError("the file is too short")
    magic, length, crc = _PREFIX.unpack_from(data)
    text, body = data[_PREFIX.size :][:length], data[_PREFIX.size + length : -_CRC.size]
    if magic != _MAGIC or zlib.crc32(text) != crc or _CRC.unpack(data[-_CRC.size :])[0] != zlib.crc32(body):
        raise ValueError("the file is damaged")
    header = page_file.read_facts(text)
    if (header["format"], header["made_by"], header["key"]) != (_FORMAT, MADE_BY, key):
        raise ValueError("another version's or another model's")
    reader = BytesInOrder(body)
    cache.restore(header["cache"], reader.read)
    tokens: list[int] = header["tokens"]
    if reader.bytes_left or len(tokens) != cache.offset or not all(type(token) is int for token in tokens):
        raise ValueError("the file has another length")
    return tokens


class BytesInOrder:
    """A reader that returns bytes in order: each call continues after the bytes of the last call."""

    def __init__(self, data: memoryview):
        self._data, self._at = data, 0

    @property
    def bytes_left(self) -> int:
        return len(self._data) - self._at

    def read(self, n: int) -> bytes:
        if not 0 <= n <= self.bytes_left:
            raise ValueError(f"{n} bytes of {self.bytes_left}")
        self._at += n
        return bytes(self._data[self._at - n : self._at])
