"""Writes small GGUF files for tests: the reader's slow, trusting twin."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.models.files.gguf_writer import ALIGNMENT, Typed, f32, gguf_header, pad_to_alignment, u32

from .noise_blocks import BY_NAME, noise_blocks

__all__ = ["ALIGNMENT", "Typed", "decode_blocks", "encode_blocks", "f32", "gguf_bytes", "u32", "write_gguf"]


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]], version: int = 3
) -> bytes:
    """tensors: name -> (type name, shape with rows first, stored bytes)."""
    sizes = {name: (kind, shape, len(data)) for name, (kind, shape, data) in tensors.items()}
    header = gguf_header(metadata, sizes, version)
    return header + b"".join(pad_to_alignment(data) for _, _, data in tensors.values())


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict, version: int = 3) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, version))
    return path


def encode_blocks(w: np.ndarray, kind: str) -> bytes:
    """Weights [out, in] or [n] -> stored bytes. Rounds to nearest; scales as llama.cpp's simplest choice.

    Types whose quantiser is not that simple get noise of the same spread.
    """
    if kind == "F32":
        return w.astype("<f4").tobytes()
    if kind == "F16":
        return w.astype("<f2").tobytes()
    if kind == "BF16":
        import ml_dtypes

        return w.astype(ml_dtypes.bfloat16).tobytes()
    if kind not in ("Q4_0", "Q4_1", "Q8_0"):
        n = w.size // BY_NAME[kind].block
        return noise_blocks(kind, n, float(w.std()), seed=w.shape[0]).tobytes()
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
