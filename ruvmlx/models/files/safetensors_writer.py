"""Writes safetensors files, one tensor after the other, so a model larger than memory can be written."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import StoreError
from ...platform import files

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32"}
_ENTRY = 110  # the maximum number of bytes that one matrix adds to the header, without its name


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays that are in memory."""
    write_stream(path, list(tensors), tensors.items(), metadata)


def write_stream(
    path: Path, names: Sequence[str], tensors: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]
) -> None:
    """Write (name, array) pairs as they come. names: all of them. The file appears complete or not at all.

    Types and shapes are known only at the end. So space for the header is left at the start and filled last.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    room = len(json.dumps(header)) + sum(len(json.dumps(name)) + _ENTRY for name in names)
    room += -room % 8
    at = 0
    with replacing(path) as file:
        file.seek(8 + room)
        for name, array in tensors:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            span = [at, at + array.nbytes]
            at = span[1]
            kind = _NAMES[array.dtype.name]
            header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": span}
        text = json.dumps(header, separators=(",", ":")).encode()
        file.seek(0)
        file.write(struct.pack("<Q", room) + text.ljust(room))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Like `files.replacing`, but raises StoreError if the file cannot be written. Only the user can read the
    file, because what was learned from ratings tells something about the person who gave them."""
    try:
        with files.replacing(path) as file:
            yield file
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}.") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object in a form that people can read."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
