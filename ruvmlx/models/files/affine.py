"""This module converts quantised weights in MLX's affine layout: w = scale * q + bias, with an integer code
q. Each group of consecutive weights in a row has one scale and one bias."""

import numpy as np

from ...errors import CorruptFile

ROWS = 1 << 10  # the number of rows that `as_eight_bits` converts at a time


def dequantise(packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, width: int) -> np.ndarray:
    """Return the weights w = scale * q + bias as float32 [out, width]. out: the rows; width: the inputs of a
    row.

    packed: the codes q in uint32 [out, width * bits / 32]. scales, biases: [out, width / group_size]. Code i
    of a row is in the bits i * bits to i * bits + bits - 1 of the row, the low bit first.
    """
    bits, rest = divmod(32 * packed.shape[1], width)
    if rest or width % scales.shape[1]:
        raise CorruptFile(
            f"{packed.shape[1]} packed words and {scales.shape[1]} scales do not fit {width} inputs"
        )
    q = codes(packed, bits).astype(np.float32)
    group = width // scales.shape[1]
    wide = [np.repeat(np.asarray(a, np.float32), group, axis=1) for a in (scales, biases)]
    return wide[0] * q + wide[1]


def codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack the codes of uint32 [out, in * bits / 32] into uint8 [out, in], one code per byte."""
    stream = np.unpackbits(packed.astype("<u4").view(np.uint8), axis=1, bitorder="little")
    digits = stream.reshape(len(packed), -1, bits)
    return np.packbits(digits, axis=2, bitorder="little")[..., 0]


def as_eight_bits(
    packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a matrix in MLX's affine layout, with the same weights, with codes of 8 bits in place of `bits`
    bits. If each old bias is -2^(bits - 1) * scale, each new bias is -128 * scale, so that kernels which
    compute the biases from the scales can use the result."""
    wide = np.empty((len(packed), packed.shape[1] * 8 // bits), np.uint32)
    middle = 1 << bits - 1
    symmetric = bool((biases == -middle * scales).all())
    # convert piece by piece, because the unpacked bits take 8 times the memory of the codes
    for at in range(0, len(packed), ROWS):
        q = codes(packed[at : at + ROWS], bits)
        wide[at : at + ROWS] = (q + np.uint8(128 - middle) if symmetric else q).view("<u4")
    if not symmetric:
        return wide, scales, biases
    scales = scales.astype(np.float32)
    return wide, scales, np.float32(-128) * scales
