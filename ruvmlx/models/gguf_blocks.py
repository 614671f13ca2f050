"""GGUF blocks -> MLX affine layout, in whole-array operations.

A block holds 32 consecutive weights of a row, w[0..31]:

    Q4_0  f16 d        | u8 qs[16]   w[j] = d * (qs[j] & 15) - 8 d,  w[j + 16] = d * (qs[j] >> 4) - 8 d
    Q4_1  f16 d, f16 m | u8 qs[16]   w[j] = d * (qs[j] & 15) + m,    w[j + 16] = d * (qs[j] >> 4) + m
    Q8_0  f16 d        | i8 qs[32]   w[j] = d * qs[j]

MLX keeps w = scale * q + bias with unsigned q, consecutive weights packed from the low bits of a
uint32 upwards. Nothing is rounded: the 4-bit nibbles only change places, 8-bit ones are offset by 128.
"""

from collections.abc import Callable

import numpy as np

from ..errors import CorruptFile
from .gguf import GGUFTensor

BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # of a weight: a block of 32 is as many uint32
BLOCKS = 1 << 17  # that are unpacked at a time
PLAIN_DTYPES = {"F32": "<f4", "F16": "<f2"}


def unpack(
    raw: np.ndarray, tensor: GGUFTensor, pause: Callable[[], None] = lambda: None
) -> dict[str, np.ndarray]:
    """Stored bytes uint8 [nbytes] -> {"weight"} or {"weight", "scales", "biases"}, shaped like the tensor.

    `pause` is called after every few million numbers of a packed tensor and may raise to leave.
    """
    if tensor.type.block == 1:
        parts = {"weight": _plain(raw, tensor)}
        check_finite(parts["weight"], tensor.name)
        return parts
    blocks = raw.reshape(-1, tensor.type.nbytes)
    unpacked = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}[tensor.type.name]
    packed, factors = np.empty((len(blocks), BITS[tensor.type.name]), np.uint32), []
    for start in range(0, len(blocks), BLOCKS):
        some = slice(start, start + BLOCKS)
        packed[some], *both = unpacked(blocks[some])
        factors.append(both)
        pause()
    scales, biases = (np.concatenate(x) for x in zip(*factors, strict=True))
    check_finite(scales, tensor.name)
    check_finite(biases, tensor.name)
    rows = tensor.shape[:-1]
    return {
        "weight": packed.reshape(*rows, -1),
        "scales": scales.reshape(*rows, -1),
        "biases": biases.reshape(*rows, -1),
    }


def _plain(raw: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    """A view of the file, not a copy."""
    if tensor.type.name == "BF16":
        import ml_dtypes

        return raw.view(ml_dtypes.bfloat16).reshape(tensor.shape)
    return raw.view(PLAIN_DTYPES[tensor.type.name]).reshape(tensor.shape)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at byte `at` of every block: [n]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0]


def _nibbles(blocks: np.ndarray, at: int) -> np.ndarray:
    """16 bytes of split halves -> 16 bytes of consecutive pairs: uint8 [n, 16] as uint32 [n, 4].

    Read as u16, two neighbours of a half lie 8 bits apart:   ---- hhhh ---- HHHH
                                                              b1   a1   b0   a0     (a: w[j], b: w[j + 16])
    """
    pairs = np.ascontiguousarray(blocks[:, at : at + 16]).view("<u2")  # [n, 8]
    out = np.empty((len(blocks), 16), np.uint8)
    out[:, :8] = (pairs & 0x0F) | (pairs >> 4 & 0xF0)
    out[:, 8:] = (pairs >> 4 & 0x0F) | (pairs >> 8 & 0xF0)
    return out.view("<u4")


def _times(scales: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """scales and factor * scales, exactly: in float16 where it fits, else both in float32."""
    with np.errstate(over="ignore"):
        biases = scales * np.float16(factor)
    if np.isfinite(biases).all() or not np.isfinite(scales).all():
        return scales, biases
    return scales.astype(np.float32), scales.astype(np.float32) * factor


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _nibbles(blocks, 2), *_times(_halves(blocks, 0), -8)


def _q4_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _nibbles(blocks, 4), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    packed = (np.ascontiguousarray(blocks[:, 2:]) ^ 0x80).view("<u4")  # i8 + 128 as u8
    return packed, *_times(_halves(blocks, 0), -128)


def check_finite(array: np.ndarray, name: str) -> None:
    """Refuse NaN and infinity. Works on the bits, in pieces: no large temporary, any float type."""
    kind = array.dtype.name
    bits: np.ndarray = array.reshape(-1).view(np.uint16 if array.itemsize == 2 else np.uint32)
    magnitude, first_bad = {
        "float32": (0x7FFFFFFF, 0x7F800000),
        "float16": (0x7FFF, 0x7C00),
        "bfloat16": (0x7FFF, 0x7F80),
    }[kind]
    for start in range(0, bits.size, 1 << 18):
        if np.bitwise_and(bits[start : start + (1 << 18)], magnitude).max() >= first_bad:
            raise CorruptFile(f"tensor {name!r} holds NaN or infinity. Fetch the model again.")
