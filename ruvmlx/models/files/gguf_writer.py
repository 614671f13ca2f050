"""This module makes the header of a GGUF file: the metadata, and the name, type, shape and offset of each
tensor."""

import struct
from typing import Any

import numpy as np

from .gguf_types import ROWS

TYPE_IDS = {row.name: row.id for row in ROWS}
ALIGNMENT = 32


class Typed:
    """A metadata value with its GGUF type id. For example, Typed(4, 32) is the u32 number 32."""

    def __init__(self, kind: int, value: Any):
        self.kind, self.value = kind, value


def u32(value: int) -> Typed:
    return Typed(4, value)


def f32(value: float) -> Typed:
    return Typed(6, value)


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Return the bytes of a value's type id and then of the value. value: a str, bool, Typed, list[str], or
    an array of uint8, int32 or float32."""
    if isinstance(value, Typed):
        return struct.pack("<I", value.kind) + struct.pack(
            {2: "<H", 4: "<I", 5: "<i", 6: "<f", 10: "<Q"}[value.kind], value.value
        )
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, np.ndarray):
        return (
            struct.pack("<IIQ", 9, {"u": 0, "i": 5, "f": 6}[value.dtype.kind], len(value)) + value.tobytes()
        )
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))


def pad_to_alignment(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def gguf_header(
    metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], int]], version: int = 3
) -> bytes:
    """Return all bytes of the file before the first tensor. tensors: {name: (type name, shape, number of
    bytes)}."""
    out = [struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))]
    out += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, (kind, shape, size) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        out.append(_string(name) + dims + struct.pack("<IQ", TYPE_IDS[kind], offset))
        offset += size + -size % ALIGNMENT
    return pad_to_alignment(b"".join(out))
