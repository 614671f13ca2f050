"""Writing safetensors files, one tensor after the other: a model larger than memory can be written."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import StoreError
from ..platform import files

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32"}
_ENTRY = 110  # bytes that one matrix adds to the header at most, its name left out


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays that are in memory."""
    write_stream(path, list(tensors), tensors.items(), metadata)


def write_stream(
    path: Path, names: Sequence[str], tensors: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]
) -> None:
    """Write (name, array) as they come; `names` are all of them. The file appears whole or not at all.

    Types and shapes are known only at the end, so room for the header is left in front and filled last.
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
    """`files.replacing`; StoreError if the file cannot be written. What was learned from ratings tells of the
    person who gave them, so only the user can read it."""
    try:
        with files.replacing(path) as file:
            yield file
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}.") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """An object, readable for people."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
