"""Writes small GGUF files for tests: the reader's slow, trusting twin."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}
ALIGNMENT = 32


class Typed:
    """A value with its GGUF type id: Typed(4, 32) is a u32."""

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
    """Type id and value. str, bool, Typed, list[str], int32 or float32 arrays."""
    if isinstance(value, Typed):
        return struct.pack("<I", value.kind) + struct.pack(
            {4: "<I", 5: "<i", 6: "<f", 10: "<Q"}[value.kind], value.value
        )
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, {"i": 5, "f": 6}[value.dtype.kind], len(value)) + value.tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]], version: int = 3
) -> bytes:
    """tensors: name -> (type name, shape with rows first, stored bytes)."""
    sizes = {name: (kind, shape, len(data)) for name, (kind, shape, data) in tensors.items()}
    header = gguf_header(metadata, sizes, version)
    return header + b"".join(_padded(data) for _, _, data in tensors.values())


def gguf_header(
    metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], int]], version: int = 3
) -> bytes:
    """All that comes before the first tensor. tensors: name -> (type name, shape, number of bytes)."""
    out = [struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))]
    out += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for name, (kind, shape, size) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        out.append(_string(name) + dims + struct.pack("<IQ", TYPE_IDS[kind], offset))
        offset += size + -size % ALIGNMENT
    return _padded(b"".join(out))


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict, version: int = 3) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, version))
    return path


def encode_blocks(w: np.ndarray, kind: str) -> bytes:
    """Weights [out, in] or [n] -> stored bytes. Rounds to nearest; scales as llama.cpp's simplest choice."""
    if kind == "F32":
        return w.astype("<f4").tobytes()
    if kind == "F16":
        return w.astype("<f2").tobytes()
    if kind == "BF16":
        import ml_dtypes

        return w.astype(ml_dtypes.bfloat16).tobytes()
    return {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}[kind](w.reshape(-1, 32).astype(np.float32))


def _divide(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x / scale with 0 / 0 = 0. x: [n, 32], scale: [n]."""
    s = scale.astype(np.float32)[:, None]
    return np.where(s == 0, 0, x / np.where(s == 0, 1, s))


def _nibbles(q: np.ndarray) -> np.ndarray:
    return (q[:, :16] | q[:, 16:] << 4).astype(np.uint8)


def _blocks(*columns: np.ndarray) -> bytes:
    return np.hstack([np.ascontiguousarray(c).reshape(len(c), -1).view(np.uint8) for c in columns]).tobytes()


def _q4_0(x: np.ndarray) -> bytes:
    d = (np.abs(x).max(1) / 7).astype("<f2")
    return _blocks(d, _nibbles(np.clip(np.rint(_divide(x, d)) + 8, 0, 15).astype(np.uint8)))


def _q4_1(x: np.ndarray) -> bytes:
    d, m = ((x.max(1) - x.min(1)) / 15).astype("<f2"), x.min(1).astype("<f2")
    q = np.clip(np.rint(_divide(x - m.astype(np.float32)[:, None], d)), 0, 15).astype(np.uint8)
    return _blocks(d, m, _nibbles(q))


def _q8_0(x: np.ndarray) -> bytes:
    d = (np.abs(x).max(1) / 127).astype("<f2")
    return _blocks(d, np.clip(np.rint(_divide(x, d)), -127, 127).astype(np.int8))


def decode_blocks(raw: bytes, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Stored bytes -> float32, one weight at a time in plain Python: the oracle of the vectorised reader."""
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
    out = []
    for at in range(0, len(raw), sizes[kind]):
        out += _decode_block(raw[at : at + sizes[kind]], kind)
    return np.array(out, np.float32).reshape(shape)


def _decode_block(block: bytes, kind: str) -> list[float]:
    d = struct.unpack_from("<e", block)[0]
    if kind == "Q8_0":
        return [d * q for q in struct.unpack_from("<32b", block, 2)]
    m, qs = (struct.unpack_from("<e", block, 2)[0], block[4:]) if kind == "Q4_1" else (-8 * d, block[2:])
    return [d * (q & 15) + m for q in qs] + [d * (q >> 4) + m for q in qs]
