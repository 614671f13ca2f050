"""This module writes safetensors files, one tensor after the other. The module can therefore write a model
that is larger than the memory."""

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
_ENTRY = 110  # the maximum number of bytes that one tensor adds to the header, without the tensor's name


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file from arrays that are in memory."""
    write_stream(path, list(tensors), tensors.items(), metadata)


def write_stream(
    path: Path, names: Sequence[str], tensors: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]
) -> None:
    """Write the arrays of an iterator into a safetensors file. If an error occurs, the function leaves no new
    file at `path`. names: the names of all arrays. tensors: pairs of a name and an array.

    The function leaves space for the header at the start of the file and writes the header last, because it
    knows the types and shapes of all tensors only after the last array.
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
    """Open a temporary file that replaces `path` at the end of the `with` block, as
    `platform.files.replacing` does, but raise StoreError if the file cannot be written. The file gets
    permissions with which only the user can read it, because weights that were trained on ratings contain
    information about the person who gave the ratings."""
    try:
        with files.replacing(path) as file:
            yield file
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}.") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file with an indentation, so that people can read the file."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
