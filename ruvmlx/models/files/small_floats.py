"""This module reads matrices of small floats in safetensors files: MLX's formats mxfp4, nvfp4 and mxfp8, and
fp8 with separate scales.

    format   codes                                   scales
    mxfp4    e2m1, uint32 [out, in / 8], low first   uint8 [out, in / 32]: 2^(e - 127)
    nvfp4    the same                                uint8 [out, in / 16]: e4m3
    mxfp8    e4m3, uint32 [out, in / 4], low first   uint8 [out, in / 32]: 2^(e - 127)
    fp8      e4m3, one byte each [out, in]           floats: one for the matrix, or one for each of its blocks

A weight is code * scale. (OCP Microscaling Formats 1.0; FP8: Micikevicius et al. 2022)

Converted to MLX's affine layout, matrices of small floats have codes of 8 bits in groups of 32. The
conversion is exact for mxfp4, because twice the value of an mxfp4 code is an integer. For nvfp4, mxfp8 and
fp8, the conversion rounds the weights. On a GPU, MLX computes with its formats mxfp4, nvfp4 and mxfp8 without
a conversion.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...errors import CorruptFile
from .gguf_blocks import AffineArrays, check_finite, round_to_8_bits
from .gguf_codes import FP4_LEVELS
from .gguf_types import TensorType

# a matrix is converted in pieces of this number of weights, which fit into a processor core's cache, so that
# the conversion is three times as fast
PIECE = 1 << 17
_FP8 = TensorType("fp8", -1, 32, 32, bits=8, group=32, zero=128, uneven=True)
TYPES = {
    "mxfp4": TensorType("mxfp4", -2, 32, 17, bits=8, group=32, zero=128, mode="mxfp4"),
    "nvfp4": TensorType("nvfp4", -3, 16, 9, bits=8, group=16, zero=128, mode="nvfp4"),
    "mxfp8": replace(_FP8, name="mxfp8", id=-4, nbytes=33, mode="mxfp8"),
    "fp8": _FP8,
}
# {MLX's name of a format: (number of weights that share a scale, bits of a code)}
MODES = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}


class FloatFormat(NamedTuple):
    """The format in which a file stores one matrix of small floats.

    scales: the name of the tensor of scales
    block: (rows, columns) of the weights that share one scale
    """

    type: TensorType
    scales: str
    block: tuple[int, int]


@dataclass(frozen=True)
class FloatMatrix:
    """A matrix of small floats in the form in which the file stores it.

    codes: uint8 [out, bytes of a row]
    scales: uint8 or floats, one scale for each block of weights
    block: (rows, columns) of the weights that share one scale
    """

    name: str
    type: TensorType
    codes: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * (1 if self._bytes else 2)

    def dequantise(self, rows: slice = slice(None)) -> np.ndarray:
        """Return the weights of these rows as float32 [rows, in]; for MLX's formats, bit for bit as MLX
        dequantises them."""
        levels, width = _e4m3() if self._bytes else _pairs(), self.shape[1]
        w = np.take(levels, self.codes[rows], axis=0, mode="clip").reshape(-1, width)
        scales, columns = self._scales(rows), self.block[1]
        if width % columns:
            w *= np.repeat(scales, columns, axis=1)[:, :width]
        else:
            w.reshape(len(w), -1, columns)[...] *= scales[..., None]
        check_finite(w, self.name)
        return w

    def eight_bits(self, pause: Callable[[], None] = lambda: None) -> AffineArrays:
        """Return the matrix in MLX's affine layout with 8-bit codes. pause: a function that is called after
        each piece."""
        rows, width = self.shape
        words, factors = np.empty((rows, width // 4), np.uint32), []
        step = max(1, PIECE // width)
        for at in range(0, rows, step):
            words[at : at + step], *both = self._to_codes(slice(at, at + step))
            factors.append(both)
            pause()
        scales, biases = (np.concatenate(x) for x in zip(*factors, strict=True))
        check_finite(scales, self.name)
        check_finite(biases, self.name)
        return words, scales, biases

    def as_mlx_has_it(self) -> dict[str, np.ndarray]:
        """Return the codes and scales of a matrix of type mxfp4, nvfp4 or mxfp8 as MLX's operations read
        them."""
        words = np.ascontiguousarray(self.codes).view("<u4")
        return {"weight": words, "scales": np.ascontiguousarray(self.scales)}

    @property
    def _bytes(self) -> bool:
        """Return True if each byte holds one code, and False if a byte holds two codes."""
        return self.type.name in ("mxfp8", "fp8")

    def _scales(self, rows: slice) -> np.ndarray:
        """Return the scales of the matrix rows `rows` as float32 [rows, groups]."""
        held = self.scales[np.arange(len(self.codes))[rows] // self.block[0]]
        if held.dtype != np.uint8:
            return held.astype(np.float32)
        return (_e4m3() if self.type.name == "nvfp4" else _powers())[held]

    def _to_codes(self, rows: slice) -> AffineArrays:
        if self.type.name != "mxfp4":
            return round_to_8_bits(self.dequantise(rows), _scales_of_bfloat16)
        words = np.take(_doubled_fours(), self.codes[rows].view("<u2"), mode="clip")
        with np.errstate(over="ignore"):  # `eight_bits` raises an error for infinity
            scales = self._scales(rows) / 2
            return words, scales, scales * np.float32(-128)


def _scales_of_bfloat16(most: np.ndarray) -> np.ndarray:
    """Return, for the largest magnitude of the weights in each group, a float32 number that bfloat16 holds
    exactly and that is at least magnitude / 127, as the group's scale. The scale has this form because a GPU
    computes with models of small floats in bfloat16."""
    bits = (most / np.float32(127)).astype(np.float32).view(np.uint32)
    return (bits + np.uint32(0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)


# Code values ----------------------------------------------------------------------------------------


@cache
def _e4m3() -> np.ndarray:
    """Return the values of the 256 e4m3 codes as float32 [256]; two values are NaN."""
    import ml_dtypes

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@cache
def _powers() -> np.ndarray:
    """Return 2^(e - 127) for e from 0 to 255 as float32 [256]; the value of e = 255 is NaN."""
    powers = np.ldexp(np.float32(1), np.arange(-127, 129)).astype(np.float32)
    powers[255] = np.nan
    return powers


@cache
def _pairs() -> np.ndarray:
    """Return the values of the two e2m1 codes in each byte, the low code first: float32 [256, 2]."""
    both = np.arange(256)
    return (FP4_LEVELS[np.stack([both & 15, both >> 4], axis=1)] / 2).astype(np.float32)


@cache
def _doubled_fours() -> np.ndarray:
    """Return, for each 16-bit number of four e2m1 codes, a word of four bytes: twice each code's value plus
    128. The shape is uint32 [65536]."""
    fours = np.arange(1 << 16)[:, None] >> np.arange(0, 16, 4) & 15
    return (FP4_LEVELS[fours] + 128).astype(np.uint8).view("<u4")[:, 0]


# Matrix formats -------------------------------------------------------------------------------------


def mlx_format(
    module: str, shape: tuple[int, int], mode: str, where: str
) -> tuple[FloatFormat, dict[str, tuple]]:
    """Return the FloatFormat of a matrix in one of MLX's formats, and the shapes that the matrix's tensors
    must have.
    mode: MLX's name of the format."""
    (rows, cols), (group, bits) = shape, MODES[mode]
    if cols % 32:
        raise CorruptFile(f"{where}: rows of {module} have {cols} weights, not whole groups of 32.")
    found = FloatFormat(TYPES[mode], f"{module}.scales", (1, group))
    return found, {f"{module}.weight": (rows, cols * bits // 32), found.scales: (rows, cols // group)}


def fp8_format(
    module: str, shape: tuple[int, int], scales: tuple[int, ...], data: Mapping[str, Any], where: str
) -> tuple[FloatFormat, dict[str, tuple]]:
    """Return the FloatFormat of an fp8 matrix and the shapes that its tensors must have. scales: the shape of
    the tensor of scales in the file. data: config.json, which gives the size of the blocks that share a
    scale."""
    (rows, cols), block = shape, shape
    wanted: tuple[int, ...] = scales if scales == (1,) else ()
    if len(scales) == 2:
        block = _block(data, where)
        wanted = -(-rows // block[0]), -(-cols // block[1])
    if cols % 32:
        raise CorruptFile(f"{where}: rows of {module} have {cols} weights, not whole groups of 32.")
    found = FloatFormat(TYPES["fp8"], f"{module}.weight_scale_inv", block)
    return found, {f"{module}.weight": shape, found.scales: wanted}


def is_fp8(data: Mapping[str, Any]) -> bool:
    """Return True if config.json names the format fp8 with float scales."""
    table = data.get("quantization_config")
    return isinstance(table, dict) and table.get("quant_method") == "fp8" and not table.get("scale_fmt")


def has_small_floats(data: Mapping[str, Any]) -> bool:
    """Return True if config.json names one of the formats of this module, or any other format of MLX than
    affine."""
    tables = [data.get("quantization"), data.get("quantization_config")]
    tables += [value for table in tables if isinstance(table, dict) for value in table.values()]
    return is_fp8(data) or any(isinstance(t, dict) and t.get("mode", "affine") != "affine" for t in tables)


def _block(data: Mapping[str, Any], where: str) -> tuple[int, int]:
    size = data["quantization_config"].get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise CorruptFile(f"{where}: weight_block_size is {str(size)[:40]!r}; two numbers were expected.")
    return size[0], size[1]
