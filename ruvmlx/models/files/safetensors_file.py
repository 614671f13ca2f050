"""This module reads safetensors files and checks the whole header before it returns tensors. The format is:

    header length u64 | header, JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}} | data

The offsets in the header are counted from the start of the data. (https://huggingface.co/docs/safetensors,
format)

ruvmlx does not use the safetensors library (0.8, for NumPy), because the library copies every tensor: a file
of 338 MiB took 0.6 s and 338 MiB of memory. In this module, tensors are views of the mapped file. With this
module, to open a file of 338 MiB takes 0.5 ms, and the system can free the memory of the tensors that are not
in use. The safetensors library also accepts a name that occurs twice, and the texts of its errors often name
neither the file nor the tensor.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ...errors import CorruptFile, RuvmlxError, UnsupportedModel
from ...platform.files import open_ordinary
from .error_text import one_line
from .json_files import parse_json

# the maximum number of bytes of a header; the safetensors library has the same limit
MAX_HEADER = 100_000_000
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}
# {type that mlx-lm reads: bytes of a number}. Of these types, ruvmlx's decoder reads only U8 and F8_E4M3
# (FLOAT_BYTES). Neither ruvmlx nor mlx-lm reads F4, whose numbers are smaller than a byte.
OTHER_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2}
OTHER_BYTES |= {"I32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8}
ALL_BYTES = ITEM_BYTES | OTHER_BYTES
# the allowed dtypes in files with small floats (small_floats.py)
FLOAT_BYTES = ITEM_BYTES | {"U8": 1, "F8_E4M3": 1}


@dataclass(frozen=True)
class Tensor:
    """The name, the type and the place of one tensor in a safetensors file. offset: the number of bytes from
    the start of the file to the tensor. file: the file's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: mmap.mmap
    file: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ALL_BYTES[self.dtype]

    def raw(self) -> np.ndarray:
        """Return the tensor's bytes as uint8 [nbytes], a read-only view of the file."""
        return np.frombuffer(self.data, np.uint8, self.nbytes, self.offset)

    def array(self) -> np.ndarray:
        """Return the tensor as a read-only view of the file. If the tensor's offset in the file is not
        aligned, return a copy."""
        view = self.raw().view(_dtype(self.dtype)).reshape(self.shape)
        return view if view.flags.aligned else view.copy()


def _dtype(name: str) -> Any:
    if name == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"F32": "<f4", "F16": "<f2", "U32": "<u4", "U8": "u1", "F8_E4M3": "u1"}[name])


def read_safetensors(path: Path, known: Mapping[str, int] = ITEM_BYTES) -> dict[str, Tensor]:
    """Map a file into memory and check that every tensor of its header is inside the file and that no two
    tensors overlap. Returns {name: tensor}. known: {allowed dtype: bytes of a number}."""
    data = _map(path)
    header, start = _header(path.name, data)
    tensors = {
        name: _tensor(path.name, name, entry, data, start, known)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_overlap(path.name, tensors)
    return tensors


def bad(where: str, what: str) -> CorruptFile:
    return CorruptFile(f"{where} is not a sound safetensors file: {what}. Fetch it again.")


def _map(path: Path) -> mmap.mmap:
    try:
        with open_ordinary(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise bad(path.name, "it is empty") from None
    except OSError as error:
        raise RuvmlxError(f"{path.name} cannot be read: {error.strerror}.") from None


def _header(where: str, data: mmap.mmap) -> tuple[dict[str, Any], int]:
    """Return the parsed header (a JSON object) and the offset in bytes at which the tensors' data begin."""
    if len(data) < 8:
        raise bad(where, f"it is {len(data)} bytes long")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(MAX_HEADER, len(data) - 8):
        raise bad(where, f"its header of {length} bytes does not fit in a file of {len(data)}")
    try:
        header = parse_json(data[8 : 8 + length], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise bad(where, f"its header cannot be read ({one_line(error)})") from None
    if not isinstance(header, dict):
        raise bad(where, "its header is not an object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _tensor(
    where: str, name: str, entry: Any, data: mmap.mmap, start: int, known: Mapping[str, int]
) -> Tensor:
    if not isinstance(entry, dict):
        raise bad(where, f"the entry of {name[:60]!r} is not an object")
    shape, span = entry.get("shape"), entry.get("data_offsets")
    dtype = _check_dtype(where, name, entry.get("dtype"), known)
    if not _whole(shape) or len(shape) > 8:
        raise bad(where, f"tensor {name[:60]!r} has shape {str(shape)[:60]}")
    if not _whole(span) or len(span) != 2:
        raise bad(where, f"tensor {name[:60]!r} has data_offsets {str(span)[:60]}")
    begin, end = span
    if not begin <= end <= len(data) - start:
        raise bad(
            where, f"tensor {name[:60]!r} lies at {begin} to {end}, the data end at {len(data) - start}"
        )
    if end - begin != prod(shape) * known[dtype]:
        raise bad(where, f"tensor {name[:60]!r} is {dtype} {shape} in {end - begin} bytes")
    return Tensor(name, dtype, tuple(shape), start + begin, data, where)


def _check_dtype(where: str, name: str, dtype: Any, known: Mapping[str, int]) -> str:
    if isinstance(dtype, str) and dtype in known:
        return dtype
    if isinstance(dtype, str) and (dtype in OTHER_BYTES or dtype == "F4"):
        raise UnsupportedModel(
            f"{where}: tensor {name[:60]!r} is stored as {dtype}; "
            "supported are F32, F16, BF16, and MLX's formats and fp8 where config.json names them."
        )
    raise bad(where, f"tensor {name[:60]!r} has dtype {str(dtype)[:30]!r}")


def _whole(values: Any) -> TypeGuard[list[int]]:
    """Return True for a list of integers from 0 to 2^62 - 1. A list with True or False gives False."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def _check_overlap(where: str, tensors: Mapping[str, Tensor]) -> None:
    by_offset = sorted((t for t in tensors.values() if t.nbytes), key=lambda t: t.offset)
    for one, other in pairwise(by_offset):
        if one.offset + one.nbytes > other.offset:
            raise bad(where, f"tensors {one.name[:60]!r} and {other.name[:60]!r} overlap")
