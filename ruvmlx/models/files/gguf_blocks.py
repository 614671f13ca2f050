"""This module converts GGUF blocks to float32 weights or to MLX's affine layout, with operations on whole
arrays.

In the affine layout, a weight is w = scale * q + bias with an unsigned code q. The codes of consecutive
weights are packed into uint32 words from the low bits upwards. The conversion is exact for GGUF types with
groups (weights with the same scale) of 32 or more weights: the codes of most types only change their places
in memory, and the codes of IQ4_NL, IQ4_XS and MXFP4 become the integers for which they stand. MLX has no
groups of 16 weights, as Q2_K, Q3_K and Q6_K have. The module joins two groups of 16 weights into one group of
32 and rounds the weights to 8 bits. For Q3_K and Q6_K, the distance between two neighbouring 8-bit levels is
then at most about a quarter of the distance between neighbouring levels in the coarser of the two old groups.
"""

from collections.abc import Callable

import numpy as np

from ...errors import CorruptFile
from .gguf import GGUFTensor
from .gguf_codes import Codes, halves
from .gguf_types import TensorType

# A tensor is unpacked in pieces of this number of blocks of 32 weights. A piece fits into the cache of a
# processor core, which makes the conversion twice as fast.
BLOCKS = 1 << 12
PLAIN_DTYPES = {"F32": "<f4", "F16": "<f2"}
# MLX's affine layout of n rows: codes in uint32 words [n, words], scales [n, groups] and biases [n, groups].
AffineArrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def unpack(
    raw: np.ndarray, tensor: GGUFTensor, pause: Callable[[], None] = lambda: None
) -> dict[str, np.ndarray]:
    """Convert the stored bytes uint8 [nbytes] of a tensor to arrays in the tensor's shape. Return {"weight"}
    for a tensor of floats, or {"weight", "scales", "biases"} in MLX's affine layout for a quantised tensor.

    pause: a function that is called after each piece of a quantised tensor, and can raise an exception to
        stop the conversion
    """
    kind = tensor.type
    if kind.block == 1:
        parts = {"weight": plain_array(raw, tensor)}
        check_finite(parts["weight"], tensor.name)
        return parts
    blocks = raw.reshape(-1, kind.nbytes)
    packed, factors = np.empty((len(blocks), kind.block * kind.affine_bits // 32), np.uint32), []
    for some in _pieces(len(blocks), kind):
        with np.errstate(invalid="ignore"):  # check_finite raises an error for NaN and infinity
            packed[some], *both = _affine(blocks[some], kind)
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


def dequantise_blocks(raw: np.ndarray, kind: TensorType, name: str) -> np.ndarray:
    """Convert the bytes uint8 [..., nbytes] of whole blocks to float32 weights. The weights have the same
    bits as in llama.cpp."""
    blocks = raw.reshape(-1, kind.nbytes)
    out = np.empty((len(blocks), kind.block), np.float32)
    for some in _pieces(len(blocks), kind):
        out[some] = _weights(_codes(blocks[some], kind), kind)
    check_finite(out, name)
    return out.reshape(*raw.shape[:-1], -1)


def _pieces(n: int, kind: TensorType) -> list[slice]:
    step = max(1, 32 * BLOCKS // kind.block)
    return [slice(at, at + step) for at in range(0, n, step)]


def _codes(blocks: np.ndarray, kind: TensorType) -> Codes:
    if kind.codes is None:
        raise TypeError(f"{kind.name} has no blocks")
    with np.errstate(invalid="ignore", over="ignore"):  # check_finite raises an error for NaN and infinity
        return kind.codes(blocks)


def _weights(codes: Codes, kind: TensorType) -> np.ndarray:
    """Return the weights scale * (q - zero) or scale * q - low as float32 [n, block]. n: the number of
    blocks."""
    groups = codes.scales.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        q = codes.q.astype(np.float32).reshape(-1, groups, kind.block // groups)
        if codes.lows is None:
            q -= np.float32(kind.zero)
        w = q * codes.scales[..., None]
        return (w if codes.lows is None else w - codes.lows[..., None]).reshape(-1, kind.block)


def _affine(blocks: np.ndarray, kind: TensorType) -> AffineArrays:
    """Convert the blocks of one piece of a tensor to MLX's affine layout."""
    if kind.name in _QUICK:
        return _QUICK[kind.name](blocks)
    codes = _codes(blocks, kind)
    if kind.group >= 32:
        return _pack_codes(codes, kind)
    return round_to_8_bits(_weights(codes, kind), _scales_for)


def _pack_codes(codes: Codes, kind: TensorType) -> AffineArrays:
    """Convert codes to MLX's affine layout without a change of their values. A group of 256 weights becomes
    two groups of 128 weights, because MLX has no larger groups."""
    scales = np.repeat(codes.scales, max(1, kind.group // 128), axis=1)
    with np.errstate(over="ignore"):
        biases = np.float32(-kind.zero) * scales if codes.lows is None else -codes.lows
    return pack_words(codes.q, kind.bits), *_narrow(scales, biases)


def pack_words(q: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes uint8 [n, m] into words uint32 [n, m * bits / 32]. The first code is in the lowest bits. n:
    the number of blocks; m: the codes of a block, a multiple of 32."""
    if bits == 8:
        return np.ascontiguousarray(q).view("<u4")
    if bits == 4:
        return (q[:, ::2] | q[:, 1::2] << 4).view("<u4")
    eights = q.reshape(len(q), -1, 8)
    wide = np.zeros(eights.shape[:2], "<u8")
    for k in range(8):
        wide |= eights[..., k].astype(np.uint64) << np.uint64(bits * k)
    used = wide.view(np.uint8).reshape(*wide.shape, 8)[..., :bits]
    return np.ascontiguousarray(used).reshape(len(q), -1).view("<u4")


def _narrow(scales: np.ndarray, biases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and biases in float16 if float16 holds all of them exactly, else unchanged in
    float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        short = scales.astype(np.float16), biases.astype(np.float16)
        same = (short[0] == scales).all() and (short[1] == biases).all()
    return short if same else (scales, biases)


def round_to_8_bits(w: np.ndarray, scales_for: Callable[[np.ndarray], np.ndarray]) -> AffineArrays:
    """Round weights to the nearest of 255 levels around 0. Each group of 32 weights has one scale.

    scales_for: a function of the largest magnitude of each group that returns the group's scale, at least
        magnitude / 127
    """
    groups = w.reshape(len(w), -1, 32)
    # the magnitudes as integers, because NumPy compares integers 3 times as fast
    magnitudes = groups.view(np.uint32) & np.uint32(0x7FFFFFFF)
    scales = scales_for(magnitudes.max(2).view(np.float32))
    step = np.where(scales == 0, 1, scales).astype(np.float32)[..., None]
    steps = groups / step
    np.rint(steps, out=steps)
    steps += 128
    biases = scales * scales.dtype.type(-128)
    return pack_words(steps.astype(np.uint8).reshape(len(w), -1), 8), scales, biases


def _scales_for(most: np.ndarray) -> np.ndarray:
    """Return, for the largest magnitude of the weights in each group, a scale with which 127 steps reach this
    magnitude. All scales are in float16 if each scale that is not 0 is over 2^-18 and below 256, so that the
    scale is precise and -128 times the scale fits into float16; else all are in float32."""
    scales = most / np.float32(127)
    used = scales[scales > 0]
    # the condition is also true for an infinite scale; `used` has no NaN, which check_finite refuses later
    if used.size and not (used.min() > 2.0**-18 and used.max() < 256):
        return scales
    short = scales.astype(np.float16)
    return np.where(short < scales, np.nextafter(short, np.float16(np.inf)), short)


def plain_array(raw: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    """Return a tensor that is not quantised as a view of the file."""
    if tensor.type.name == "BF16":
        import ml_dtypes

        return raw.view(ml_dtypes.bfloat16).reshape(tensor.shape)
    return raw.view(PLAIN_DTYPES[tensor.type.name]).reshape(tensor.shape)


# The functions below convert blocks of Q4_0, Q4_1 and Q8_0 and do not unpack the codes. The functions for
# these three types are 4 to 10 times as fast as the general conversion (`_pack_codes`).


def _nibbles(blocks: np.ndarray, at: int) -> np.ndarray:
    """Reorder the 4-bit codes of blocks from GGUF's order to MLX's order. Return uint32 [n, 4].

    In GGUF, byte j has code j and code j + 16. In MLX, byte j has the codes 2 j and 2 j + 1. The GGUF bytes j
    and j + 1, read as one 16-bit number, have from bit 15 to bit 0 the codes j + 17, j + 1, j + 16 and j.
    """
    pairs = np.ascontiguousarray(blocks[:, at : at + 16]).view("<u2")  # [n, 8]
    out = np.empty((len(blocks), 16), np.uint8)
    out[:, :8] = (pairs & 0x0F) | (pairs >> 4 & 0xF0)
    out[:, 8:] = (pairs >> 4 & 0x0F) | (pairs >> 8 & 0xF0)
    return out.view("<u4")


def _times(scales: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (scales, factor * scales), both exact. The two arrays are in float16 if float16 holds all values
    exactly, else in float32."""
    with np.errstate(over="ignore"):
        biases = scales * np.float16(factor)
    if np.isfinite(biases).all() or not np.isfinite(scales).all():
        return scales[:, None], biases[:, None]
    return scales.astype(np.float32)[:, None], scales.astype(np.float32)[:, None] * factor


def _q4_0(blocks: np.ndarray) -> AffineArrays:
    return _nibbles(blocks, 2), *_times(halves(blocks, 0), -8)


def _q4_1(blocks: np.ndarray) -> AffineArrays:
    return _nibbles(blocks, 4), halves(blocks, 0)[:, None], halves(blocks, 2)[:, None]


def _q8_0(blocks: np.ndarray) -> AffineArrays:
    # a signed 8-bit code plus 128, as uint8: the highest bit is inverted
    packed = (np.ascontiguousarray(blocks[:, 2:]) ^ 0x80).view("<u4")
    return packed, *_times(halves(blocks, 0), -128)


_QUICK: dict[str, Callable[[np.ndarray], AffineArrays]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def check_blocks(raw: np.ndarray, kind: TensorType, name: str) -> None:
    """Raise CorruptFile for NaN and infinity in the float16 numbers of blocks (`TensorType.halves`). The
    function does not check scales of other types (Q8_K, MXFP4). raw: uint8 [..., whole blocks]."""
    blocks = raw.reshape(-1, kind.nbytes)
    for at in kind.halves:
        check_finite(halves(blocks, at), name)


def check_finite(array: np.ndarray, name: str) -> None:
    """Raise CorruptFile for NaN and infinity. The function checks the bits of the numbers piece by piece, so
    it needs no large temporary array and works for any float type."""
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
