"""This module extracts the integer codes and the scales from GGUF blocks. The module has one function for
each quantisation type. gguf_types.py has the table of the types.

Blocks are uint8 [n, bytes of a block]. A weight follows from its code q by one of two formulas:

    weight = scale * (q - zero)      or, if the type stores `lows`,      weight = scale * q - low

Each group of consecutive weights has one scale (and one low, the number that is subtracted). The product of a
block's float16 scale and the integer scale of a group is exact in float32. The float32 weight has the same
rounding as in llama.cpp. ggml-common.h of https://github.com/ggml-org/ggml defines the bit layouts.

The docstring of each type's function gives the layout of a block: the fields in order, separated by | or
commas. d and dmin are scales, m is a minimum, qs are the low bits of the codes, and qh or hmask are the high
bits of the codes.
"""

from typing import NamedTuple

import numpy as np

# The values that the sixteen 4-bit codes of IQ4_NL and IQ4_XS stand for; the distances between them are not
# equal.
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)
# twice the values of the sixteen e2m1 floats, which are integers
FP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)


class Codes(NamedTuple):
    """The codes and scales of n blocks. q: uint8 [n, weights of a block]. scales, lows: float32 [n, groups of
    a block]."""

    q: np.ndarray
    scales: np.ndarray
    lows: np.ndarray | None = None


def halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 number at byte `at` of every block: [n]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0]


def _scale(blocks: np.ndarray, at: int) -> np.ndarray:
    return halves(blocks, at).astype(np.float32)[:, None]


def _two_halves(nibbles: np.ndarray) -> np.ndarray:
    """Split bytes [n, ..., m] into four-bit numbers [n, ..., 2 m]: all low halves, then all high halves."""
    return np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)


def _bits(blocks: np.ndarray) -> np.ndarray:
    """Split bytes [n, m] into bits [n, 8 m], the lowest bit of each byte first."""
    return np.unpackbits(np.ascontiguousarray(blocks), axis=1, bitorder="little")


def _fields(data: np.ndarray, bits: int) -> np.ndarray:
    """Split bytes [n, ..., m] into numbers of `bits` bits [n, ..., 8 / bits, m]. The number in the lowest
    bits of each byte comes first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return data[..., None, :] >> shifts & np.uint8((1 << bits) - 1)


# Blocks of 32 ---------------------------------------------------------------------------------------


def q4_0(blocks: np.ndarray) -> Codes:
    """Read Q4_0 blocks. A block is: f16 scale d | qs[16], the 4-bit codes."""
    return Codes(_two_halves(blocks[:, 2:]), _scale(blocks, 0))


def q4_1(blocks: np.ndarray) -> Codes:
    """Read Q4_1 blocks. A block is: f16 scale d, f16 minimum m | qs[16], the 4-bit codes."""
    return Codes(_two_halves(blocks[:, 4:]), _scale(blocks, 0), -_scale(blocks, 2))


def q5_0(blocks: np.ndarray) -> Codes:
    """Read Q5_0 blocks. A block is: f16 scale d | qh[4], the fifth bits of the codes | qs[16], the low 4
    bits."""
    return Codes(_two_halves(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, _scale(blocks, 0))


def q5_1(blocks: np.ndarray) -> Codes:
    """Read Q5_1 blocks. A block is: f16 scale d, f16 minimum m | qh[4], the fifth bits of q | qs[16], the low
    4 bits."""
    q = _two_halves(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return Codes(q, _scale(blocks, 0), -_scale(blocks, 2))


def q8_0(blocks: np.ndarray) -> Codes:
    """Read Q8_0 blocks. A block is: f16 scale d | i8 qs[32], the codes."""
    return Codes(blocks[:, 2:] ^ 0x80, _scale(blocks, 0))


def iq4_nl(blocks: np.ndarray) -> Codes:
    """Read IQ4_NL blocks. A block is: f16 scale d | qs[16], 4-bit indices into IQ4_LEVELS."""
    return Codes(_levels(_two_halves(blocks[:, 2:]), IQ4_LEVELS, 128), _scale(blocks, 0))


def mxfp4(blocks: np.ndarray) -> Codes:
    """Read MXFP4 blocks. A block is: u8 e, where 2^(e - 127) is the scale | qs[16], 4-bit floats (e2m1)."""
    return Codes(_levels(_two_halves(blocks[:, 1:]), FP4_LEVELS, 16), _half_power(blocks[:, :1]))


def _levels(numbers: np.ndarray, levels: np.ndarray, zero: int) -> np.ndarray:
    return (levels + zero).astype(np.uint8)[numbers]


def _half_power(e: np.ndarray) -> np.ndarray:
    """Return 2^(e - 128) as float32. The result is half of the scale 2^(e - 127), because FP4_LEVELS has
    twice the values of the floats. If e is 255, the result is NaN."""
    wide = e.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(0x00200000) << wide, (wide - 1) << 23).astype(np.uint32)
    return np.where(e == 255, np.float32(np.nan), bits.view(np.float32))


# Blocks of 256 --------------------------------------------------------------------------------------


def q2_k(blocks: np.ndarray) -> Codes:
    """Read Q2_K blocks. A block is: u8 scales[16], each with a 4-bit scale and a 4-bit low | qs[64], the
    2-bit codes | f16 d, f16 dmin, the factors of the scales and lows."""
    q = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 256)
    s, m = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return Codes(q, _scale(blocks, 80) * s, _scale(blocks, 82) * m)


def q3_k(blocks: np.ndarray) -> Codes:
    """Read Q3_K blocks. A block is: hmask[32], the third bits of the codes | qs[64], the low 2 bits |
    scales[12], 6-bit scales | f16 d, the factor of the scales."""
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256)
    high = _fields(blocks[:, :32], 1).reshape(-1, 256)
    return Codes(low | high << 2, _scale(blocks, 108) * q3_k_scales(blocks))


def q3_k_scales(blocks: np.ndarray) -> np.ndarray:
    """Return the scales of Q3_K blocks: int8 [n, 16]. The four low bits of the scales are in the bytes 96 to
    103, and their two high bits are in the bytes 104 to 107. The stored value is the scale plus 32."""
    low = _two_halves(blocks[:, 96:104])
    high = _fields(blocks[:, 104:108], 2).reshape(-1, 16)
    return (low | high << 4).astype(np.int8) - np.int8(32)


def q4_k(blocks: np.ndarray) -> Codes:
    """Read Q4_K blocks. A block is: f16 d, f16 dmin | scales[12], 6-bit scales and lows | qs[128], the 4-bit
    codes. Of each 64 codes, the first 32 are in the low halves of 32 bytes, and the last 32 are in the high
    halves."""
    q = _two_halves(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    s, m = _six_bits(blocks[:, 4:16])
    return Codes(q, _scale(blocks, 0) * s, _scale(blocks, 2) * m)


def q5_k(blocks: np.ndarray) -> Codes:
    """Read Q5_K blocks. A block is: f16 d, f16 dmin | scales[12], 6-bit scales and lows | qh[32], the fifth
    bits of the codes | qs[128], the low 4 bits as in Q4_K."""
    q = _two_halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256)
    s, m = _six_bits(blocks[:, 4:16])
    high = _fields(blocks[:, 16:48], 1).reshape(-1, 256)
    return Codes(q | high << 4, _scale(blocks, 0) * s, _scale(blocks, 2) * m)


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and eight lows of six bits from 12 bytes.

    The low six bits of the bytes 0 to 3 are the first four scales, and the low six bits of the bytes 4 to 7
    are the first four lows. The high two bits of the bytes 0 to 7 are the high bits of the last four scales
    and of the last four lows. The bytes 8 to 11 hold the low four bits of the last four scales and lows.
    """
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    return scales, np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)


def q6_k(blocks: np.ndarray) -> Codes:
    """Read Q6_K blocks. A block is: ql[128], the low 4 bits of the codes (of 128 weights, the first 64 are in
    the low halves of 64 bytes) | qh[64], the two high bits of the codes | i8 scales[16] | f16 d, the factor
    of the scales."""
    low = _two_halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    return Codes(low | high << 4, _scale(blocks, 208) * blocks[:, 192:208].view(np.int8))


def q8_k(blocks: np.ndarray) -> Codes:
    """Read Q8_K blocks. A block is: f32 scale d | i8 qs[256], the codes | sums of the codes, which the
    function does not need."""
    return Codes(blocks[:, 4:260] ^ 0x80, np.ascontiguousarray(blocks[:, :4]).view("<f4"))


def iq4_xs(blocks: np.ndarray) -> Codes:
    """Read IQ4_XS blocks. A block is: f16 d, the factor of the scales | u16, the two high bits of eight
    scales | scales[4], the four low bits of the scales | qs[128], 4-bit indices into IQ4_LEVELS."""
    q = _levels(_two_halves(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256), IQ4_LEVELS, 128)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    high = np.stack([blocks[:, 2:4] >> s & 3 for s in (0, 2, 4, 6)], axis=-1).reshape(-1, 8)
    return Codes(q, _scale(blocks, 0) * ((low | high << 4).astype(np.int8) - np.int8(32)))


# Q3_K to Q6_K ---------------------------------------------------------------------------------------


def q3_k_as_q6_k(blocks: np.ndarray) -> np.ndarray:
    """Convert the bytes of Q3_K blocks [n, 110] to Q6_K blocks [n, 210] with the same weights. The Q6_K code
    of a weight is its Q3_K code q plus 28, because the code of the weight 0 is 4 in Q3_K and 32 in Q6_K: q -
    4 = (q + 28) - 32."""
    q = q3_k(blocks).q + np.uint8(28)
    low = (q & 15).reshape(-1, 2, 2, 64)
    high = (q >> 4).reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    out = np.empty((len(blocks), 210), np.uint8)
    out[:, :128] = (low[:, :, 0] | low[:, :, 1] << 4).reshape(-1, 128)
    out[:, 128:192] = np.bitwise_or.reduce(high, axis=2).reshape(-1, 64)
    out[:, 192:208] = q3_k_scales(blocks).view(np.uint8)
    out[:, 208:] = blocks[:, 108:]
    return out
