"""Matrices of small floats in safetensors files: MLX's mxfp4, nvfp4 and mxfp8, and fp8 with separate scales.

    format   codes                                   scales
    mxfp4    e2m1, uint32 [out, in / 8], low first   uint8 [out, in / 32]: 2^(e - 127)
    nvfp4    the same                                uint8 [out, in / 16]: e4m3
    mxfp8    e4m3, uint32 [out, in / 4], low first   uint8 [out, in / 32]: 2^(e - 127)
    fp8      e4m3, one byte each [out, in]           floats: one for the matrix, or one for each of its blocks

A weight is code * scale. (OCP Microscaling Formats 1.0; FP8: Micikevicius et al. 2022)

In MLX's affine layout they have 8 bits in groups of 32. For mxfp4 this is exact, because twice a code is an
integer. The others are rounded. A GPU keeps MLX's three formats without conversion.
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

PIECE = 1 << 17  # weights converted at a time; three times as fast if they fit into a core's cache
_FP8 = TensorType("fp8", -1, 32, 32, bits=8, group=32, zero=128, uneven=True)
TYPES = {
    "mxfp4": TensorType("mxfp4", -2, 32, 17, bits=8, group=32, zero=128, mode="mxfp4"),
    "nvfp4": TensorType("nvfp4", -3, 16, 9, bits=8, group=16, zero=128, mode="nvfp4"),
    "mxfp8": replace(_FP8, name="mxfp8", id=-4, nbytes=33, mode="mxfp8"),
    "fp8": _FP8,
}
# MLX's values: weights that share a scale, bits of a code
MODES = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}


class FloatFormat(NamedTuple):
    """The stored format of one matrix.

    scales: the name of the tensor of scales
    block: (rows, columns) of the weights that share one scale
    """

    type: TensorType
    scales: str
    block: tuple[int, int]


@dataclass(frozen=True)
class FloatMatrix:
    """A stored matrix.

    codes: uint8 [out, bytes of a row]
    scales: uint8 or floats, one for each block of weights
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
        """Return float32 [rows, in], the same numbers as MLX's."""
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
        """Return the matrix in MLX's affine layout with 8 bits."""
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
        """Return codes and scales of a format in which MLX computes."""
        words = np.ascontiguousarray(self.codes).view("<u4")
        return {"weight": words, "scales": np.ascontiguousarray(self.scales)}

    @property
    def _bytes(self) -> bool:
        """Is each code a byte? Otherwise a byte holds two codes."""
        return self.type.name in ("mxfp8", "fp8")

    def _scales(self, rows: slice) -> np.ndarray:
        """float32 [rows, groups]"""
        held = self.scales[np.arange(len(self.codes))[rows] // self.block[0]]
        if held.dtype != np.uint8:
            return held.astype(np.float32)
        return (_e4m3() if self.type.name == "nvfp4" else _powers())[held]

    def _to_codes(self, rows: slice) -> AffineArrays:
        if self.type.name != "mxfp4":
            return round_to_8_bits(self.dequantise(rows), _scales_of_bfloat16)
        words = np.take(_doubled_fours(), self.codes[rows].view("<u2"), mode="clip")
        with np.errstate(over="ignore"):  # the caller refuses such numbers
            scales = self._scales(rows) / 2
            return words, scales, scales * np.float32(-128)


def _scales_of_bfloat16(most: np.ndarray) -> np.ndarray:
    """Return the smallest scales for 127 steps that bfloat16 can hold. A GPU computes with such a model in
    bfloat16."""
    bits = (most / np.float32(127)).astype(np.float32).view(np.uint32)
    return (bits + np.uint32(0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)


# What codes mean ------------------------------------------------------------------------------------


@cache
def _e4m3() -> np.ndarray:
    """float32 [256]; two of them are NaN."""
    import ml_dtypes

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@cache
def _powers() -> np.ndarray:
    """2^(e - 127) as float32 [256]; 255 is NaN."""
    powers = np.ldexp(np.float32(1), np.arange(-127, 129)).astype(np.float32)
    powers[255] = np.nan
    return powers


@cache
def _pairs() -> np.ndarray:
    """The two e2m1 codes of a byte, the low one first: float32 [256, 2]."""
    both = np.arange(256)
    return (FP4_LEVELS[np.stack([both & 15, both >> 4], axis=1)] / 2).astype(np.float32)


@cache
def _doubled_fours() -> np.ndarray:
    """Twice the four e2m1 codes of two bytes, plus 128, as the bytes of a word: uint32 [65536]."""
    fours = np.arange(1 << 16)[:, None] >> np.arange(0, 16, 4) & 15
    return (FP4_LEVELS[fours] + 128).astype(np.uint8).view("<u4")[:, 0]


# Which matrix has which format ----------------------------------------------------------------------


def mlx_format(
    module: str, shape: tuple[int, int], mode: str, where: str
) -> tuple[FloatFormat, dict[str, tuple]]:
    """Return the format of one of MLX's matrices, and the shapes of its tensors."""
    (rows, cols), (group, bits) = shape, MODES[mode]
    if cols % 32:
        raise CorruptFile(f"{where}: rows of {module} have {cols} weights, not whole groups of 32.")
    found = FloatFormat(TYPES[mode], f"{module}.scales", (1, group))
    return found, {f"{module}.weight": (rows, cols * bits // 32), found.scales: (rows, cols // group)}


def fp8_format(
    module: str, shape: tuple[int, int], scales: tuple[int, ...], data: Mapping[str, Any], where: str
) -> tuple[FloatFormat, dict[str, tuple]]:
    """Return the format of a matrix of bytes. scales: the shape of its scales; config.json gives the size of
    a block."""
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
    """Does config.json name fp8 with scales of floats?"""
    table = data.get("quantization_config")
    return isinstance(table, dict) and table.get("quant_method") == "fp8" and not table.get("scale_fmt")


def has_small_floats(data: Mapping[str, Any]) -> bool:
    """Does config.json name one of these formats, or an unknown one?"""
    tables = [data.get("quantization"), data.get("quantization_config")]
    tables += [value for table in tables if isinstance(table, dict) for value in table.values()]
    return is_fp8(data) or any(isinstance(t, dict) and t.get("mode", "affine") != "affine" for t in tables)


def _block(data: Mapping[str, Any], where: str) -> tuple[int, int]:
    size = data["quantization_config"].get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise CorruptFile(f"{where}: weight_block_size is {str(size)[:40]!r}; two numbers were expected.")
    return size[0], size[1]
