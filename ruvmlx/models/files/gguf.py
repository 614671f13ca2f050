"""This module reads GGUF v2/v3 headers and does not trust any byte of the file. The format is:

    "GGUF" | version u32 | n_tensors u64 | n_kv u64
    n_kv      x  key string | type u32 | value
    n_tensors x  name string | n_dims u32 | dims u64[n_dims] (fastest first) | type u32 | offset u64
    padding to `general.alignment` | tensor data

A string is a length n (u64), then n bytes of UTF-8. All numbers are little-endian.
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)

Before it allocates memory, the reader compares every length with the number of bytes that are left in the
file. Because of this comparison and the limits MAX_..., the memory and time that a hostile header can cost
grow at most in proportion to the file's size. For an inconsistent header, the reader raises `CorruptFile`
with one line of text; for a big-endian file or an unknown tensor type of ggml's, UnsupportedModel.

The module cannot handle one case: if another program shortens the file while this process has the file
mapped, the process ends (SIGBUS).
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CorruptFile, ModelNotFound, RuvmlxError, UnsupportedModel
from ...platform.files import open_ordinary
from .error_text import one_line
from .gguf_types import FILE_TYPES, SUPPORTED, TENSOR_TYPES, TensorType, name_of

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
# the maximum number of strings in all arrays together; the largest vocabularies have 800,000 with their
# merges
MAX_STRINGS = 1 << 21
MAX_NAME = 1 << 12
MAX_ALIGNMENT = 1 << 16
STRING, ARRAY = 8, 9

# {type id of a GGUF metadata value: format for Python's module struct}
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True)
class GGUFTensor:
    """The name, the type and the place of one tensor in a GGUF file. shape: the dimensions in NumPy's order,
    rows first. offset: the number of bytes from the start of the file to the tensor."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    part: int = 0  # the index of the part file that has the tensor

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements // self.type.block * self.type.nbytes


@dataclass
class GGUFFile:
    """A GGUF file with a checked header: every tensor is inside the file's memory-mapped bytes, and no two
    tensors overlap."""

    path: Path
    data: mmap.mmap
    version: int
    metadata: Mapping[str, Any]  # {key: scalar, str, list[str], or a NumPy array that is a view of the file}
    tensors: Mapping[str, GGUFTensor] = field(default_factory=dict)
    # the memory maps of the second part file of a split model and the later ones
    others: tuple[mmap.mmap, ...] = ()

    @property
    def tensor_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def types(self) -> dict[str, int]:
        """Return {tensor type: number of weights of this type in the file}."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.type.name] = counts.get(tensor.type.name, 0) + tensor.elements
        return counts

    @property
    def file_type(self) -> str:
        """Return llama.cpp's name of the file's quantisation, for example "Q4_K_M"; "": it is not known."""
        value = self.metadata.get("general.file_type")
        return FILE_TYPES.get(value, "") if isinstance(value, int) else ""

    def raw(self, tensor: GGUFTensor) -> np.ndarray:
        """Return the tensor's stored bytes as uint8 [nbytes], a read-only view of the file."""
        data = (self.data, *self.others)[tensor.part]
        return np.frombuffer(data, np.uint8, tensor.nbytes, tensor.offset)


def read_gguf(path: Path | str) -> GGUFFile:
    """Map a GGUF file into memory, read its header and check the header."""
    path = Path(path)
    data = _map(path)
    cursor = _Cursor(path.name, data)
    n_tensors, n_kv, version = _read_preamble(cursor)
    metadata = _read_metadata(cursor, n_kv)
    infos = [_read_tensor_info(cursor) for _ in range(n_tensors)]
    start = _align(cursor.at, _alignment(cursor, metadata))
    tensors = _place(cursor, infos, start, _alignment(cursor, metadata))
    return GGUFFile(path, data, version, metadata, tensors)


def _map(path: Path) -> mmap.mmap:
    try:
        with open_ordinary(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFound(f"no such file: {path}. Check the path.") from None
    except ValueError:
        raise CorruptFile(f"{path.name}: the file is empty. Fetch it again.") from None
    except OSError as error:
        raise RuvmlxError(f"{path.name} cannot be read: {error.strerror}.") from None


class _Cursor:
    """A reader that moves forward through the file and raises CorruptFile at a read past the end."""

    def __init__(self, name: str, data: mmap.mmap):
        self.name, self.data, self.at, self.size = name, data, 0, len(data)
        self.strings_left = MAX_STRINGS

    def bad(self, what: str) -> CorruptFile:
        return CorruptFile(f"{self.name} is not a sound GGUF file: {one_line(what, 200)}. Fetch it again.")

    def bytes_left(self) -> int:
        return self.size - self.at

    def take(self, n: int, what: str) -> int:
        """Move the cursor n bytes forward. Return the offset before the move. Raises CorruptFile if fewer
        than n bytes are left. what: the name of the bytes for the error message."""
        if n > self.bytes_left():
            raise self.bad(f"{what} needs {n} bytes at offset {self.at}, {self.bytes_left()} are left")
        at, self.at = self.at, self.at + n
        return at

    def number(self, fmt: str, what: str) -> Any:
        return struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt), what))[0]

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.number("<Q", f"the length of {what}")
        if limit is not None and length > limit:
            raise self.bad(f"{what} is {length} bytes long, at most {limit} are allowed")
        at = self.take(length, what)
        try:
            return self.data[at : at + length].decode()
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not UTF-8") from None


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Return the number of tensors, the number of metadata keys, and the version. Raises CorruptFile for an
    unknown magic or version, and if the file is too short to have this number of tensors and keys."""
    magic = cursor.data[cursor.take(4, "the magic") : 4]
    if magic != b"GGUF":
        raise cursor.bad(f"it begins with {magic!r}, not b'GGUF'")
    version = cursor.number("<I", "the version")
    if version in (0x02000000, 0x03000000):
        raise UnsupportedModel(f"{cursor.name} is a big-endian GGUF file; only little-endian ones are read.")
    if version not in (2, 3):
        raise cursor.bad(f"version {version}; 2 and 3 are known")
    n_tensors = cursor.number("<Q", "the tensor count")
    n_kv = cursor.number("<Q", "the key count")
    _check_count(cursor, "tensors", n_tensors, MAX_TENSORS, 8 + 4 + 8 + 4 + 8)
    _check_count(cursor, "metadata keys", n_kv, MAX_KEYS, 8 + 4 + 1)
    return n_tensors, n_kv, version


def _check_count(cursor: _Cursor, what: str, count: int, limit: int, each: int) -> None:
    if count > limit or count * each > cursor.bytes_left():
        raise cursor.bad(f"{count} {what} cannot fit in the {cursor.bytes_left()} bytes left (limit {limit})")


def _read_metadata(cursor: _Cursor, n_kv: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(n_kv):
        key = cursor.string("a metadata key", MAX_NAME)
        if key in metadata:
            raise cursor.bad(f"metadata key {key!r} occurs twice")
        metadata[key] = _read_value(cursor, key, cursor.number("<I", f"the type of {key}"))
    return metadata


def _read_value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == STRING:
        return cursor.string(f"the value of {key}")
    if kind == ARRAY:
        return _read_array(cursor, key)
    if kind not in SCALARS:
        raise cursor.bad(f"{key} has unknown value type {kind}")
    value = cursor.number(SCALARS[kind], f"the value of {key}")
    return bool(value) if kind == 7 else value


def _read_array(cursor: _Cursor, key: str) -> list[str] | np.ndarray:
    kind = cursor.number("<I", f"the element type of {key}")
    count = cursor.number("<Q", f"the length of {key}")
    if kind == STRING:
        return _read_strings(cursor, key, count)
    if kind == ARRAY:
        raise cursor.bad(f"{key} is an array of arrays")
    if kind not in SCALARS:
        raise cursor.bad(f"{key} is an array of unknown type {kind}")
    dtype = np.dtype(SCALARS[kind])
    at = cursor.take(count * dtype.itemsize, f"array {key} of {count} elements")
    return np.frombuffer(cursor.data, dtype, count, at)


def _read_strings(cursor: _Cursor, key: str, count: int) -> list[str]:
    """Read `count` strings in one fast loop, because a vocabulary with its merges has hundreds of thousands
    of strings."""
    _check_count(cursor, f"strings of {key}", count, cursor.strings_left, 8)
    cursor.strings_left -= count
    data, at, size = cursor.data, cursor.at, cursor.size
    out: list[str] = []
    append, length_at = out.append, struct.Struct("<Q").unpack_from
    try:
        for _ in range(count):
            end = at + 8 + length_at(data, at)[0]
            if end > size:
                raise cursor.bad(f"string {len(out)} of {key} reaches past the end of the file")
            append(data[at + 8 : end].decode())
            at = end
    except struct.error:
        raise cursor.bad(f"the file ends inside {key}, at string {len(out)} of {count}") from None
    except UnicodeDecodeError:
        raise cursor.bad(f"string {len(out)} of {key} is not UTF-8") from None
    cursor.at = at
    return out


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return a tensor's name, shape (rows first), type id, and offset from the start of the data section."""
    name = cursor.string("a tensor name", MAX_NAME)
    n_dims = cursor.number("<I", f"the rank of {name}")
    if not 1 <= n_dims <= 4:
        raise cursor.bad(f"tensor {name!r} has {n_dims} dimensions; 1 to 4 are allowed")
    dims = tuple(cursor.number("<Q", f"a dimension of {name}") for _ in range(n_dims))
    if 0 in dims or prod(dims) >= 1 << 62:
        raise cursor.bad(f"tensor {name!r} has impossible dimensions {list(dims)}")
    kind = cursor.number("<I", f"the type of {name}")
    return name, dims[::-1], kind, cursor.number("<Q", f"the offset of {name}")


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    sound = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not sound or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.bad(
            f"general.alignment is {alignment!r}; a power of two from 8 to {MAX_ALIGNMENT} was expected"
        )
    return alignment


def _align(at: int, alignment: int) -> int:
    return (at + alignment - 1) // alignment * alignment


def _place(cursor: _Cursor, infos: list, start: int, alignment: int) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise cursor.bad(f"tensor {name!r} occurs twice")
        tensor = GGUFTensor(name, shape, _tensor_type(cursor, name, kind), start + offset)
        _check_place(cursor, tensor, offset, alignment)
        tensors[name] = tensor
    _check_overlap(cursor, tensors)
    return tensors


def _tensor_type(cursor: _Cursor, name: str, kind: int) -> TensorType:
    if kind in TENSOR_TYPES:
        return TENSOR_TYPES[kind]
    if other := name_of(kind):
        raise UnsupportedModel(
            f"{cursor.name}: tensor {one_line(name)!r} is stored as {other}; "
            f"supported are {SUPPORTED}. Get the model in one of these types."
        )
    raise cursor.bad(f"tensor {name!r} has unknown type {kind}")


def _check_place(cursor: _Cursor, tensor: GGUFTensor, offset: int, alignment: int) -> None:
    name = tensor.name
    if tensor.shape[-1] % tensor.type.block:
        raise cursor.bad(
            f"rows of {name!r} have {tensor.shape[-1]} weights, not a multiple of {tensor.type.block}"
        )
    if offset % alignment:
        raise cursor.bad(f"tensor {name!r} begins at {offset}, not a multiple of {alignment}")
    if tensor.offset + tensor.nbytes > cursor.size:
        end = tensor.offset + tensor.nbytes
        raise cursor.bad(f"tensor {name!r} ends at byte {end}, the file at {cursor.size}")


def _check_overlap(cursor: _Cursor, tensors: Mapping[str, GGUFTensor]) -> None:
    by_offset = sorted(tensors.values(), key=lambda t: t.offset)
    for one, other in pairwise(by_offset):
        if one.offset + one.nbytes > other.offset:
            raise cursor.bad(f"tensors {one.name!r} and {other.name!r} overlap")
