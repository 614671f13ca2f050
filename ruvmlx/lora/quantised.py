"""This module keeps LoRA factors in memory and in files with 4 bits per weight, in MLX's affine layout.

    w ~ scale * q + bias     q: the 4-bit code, 0..15; each group of 32 weights has one scale and bias
    (float32)

Groups run along the columns of lora_a and the rows of lora_b, so a group has weights of only one of the
`rank` directions. The error of a weight is at most (max - min of its group) / 30, plus float rounding.

For example, two factors of rank 8 and width 768 need 49,152 bytes in float32, and 9,216 bytes as 4-bit codes
with scales and biases. If the factors are normally distributed, the product lora_a lora_b has a relative
error of about 10% (Frobenius norm, tests/lora/test_quantised.py).
"""

from dataclasses import dataclass, replace

import numpy as np

from ..errors import CorruptFile

_Pair = tuple[np.ndarray, np.ndarray]  # base_lora.Pair; base_lora imports this module
BITS, GROUP = 4, 32
_LEVELS = 2**BITS - 1
_PER_WORD = 32 // BITS
_SHIFTS = np.arange(_PER_WORD, dtype=np.uint32) * BITS


@dataclass(frozen=True)
class Packed:
    """A matrix [rows, n] as 4-bit codes. There are g = ceil(n / 32) groups in a row. Codes after the n-th
    code of a row are padding.

    weight: uint32 [rows, 4 g], eight 4-bit codes in each number, lowest bits first
    scales, biases: float32 [rows, g]
    """

    weight: np.ndarray
    scales: np.ndarray
    biases: np.ndarray
    n: int

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes + self.biases.nbytes

    def times(self, factor: float) -> "Packed":
        """Return the matrix multiplied by `factor`, with the same codes."""
        by = np.float32(factor)
        return replace(self, scales=self.scales * by, biases=self.biases * by)

    def to_words(self) -> np.ndarray:
        """Return the codes, scales and biases of each row side by side, uint32 [rows, 6 g], as the C kernels
        (neon/include/rvm_layers.h) and the store keep them."""
        return np.hstack([self.weight, self.scales.view(np.uint32), self.biases.view(np.uint32)])

    @classmethod
    def from_words(cls, words: np.ndarray, n: int) -> "Packed":
        """Decode the result of `to_words`. n: the number of columns. Raises ValueError if a row of n weights
        does not have this number of words."""
        groups = -(-n // GROUP)
        if words.dtype != np.uint32 or words.ndim != 2 or words.shape[1] != 6 * groups:
            raise ValueError(f"a packed matrix of {n} columns is {words.dtype} {words.shape}")
        parts = np.split(words, [4 * groups, 5 * groups], axis=1)
        weight, scales, biases = map(np.ascontiguousarray, parts)
        return cls(weight, scales.view(np.float32), biases.view(np.float32), n)


def pack(w: np.ndarray) -> Packed:
    """Convert a matrix float32 [rows, n] to 4-bit codes. Raises ValueError if the matrix holds NaN or
    infinity."""
    if not np.isfinite(w).all():
        raise ValueError("weights to be packed hold NaN or Inf")
    rows, n = w.shape
    groups = np.pad(w, ((0, 0), (0, -n % GROUP)), mode="edge").reshape(rows, -1, GROUP)
    low = groups.min(2, keepdims=True)
    scale = ((groups.max(2, keepdims=True).astype(np.float64) - low) / _LEVELS).astype(np.float32)
    q = np.divide(groups - low, scale, out=np.zeros_like(groups), where=scale > 0)
    q = np.clip(np.rint(q), 0, _LEVELS).astype(np.uint32).reshape(rows, -1, _PER_WORD)
    return Packed((q << _SHIFTS).sum(2, dtype=np.uint32), scale[..., 0], low[..., 0], n)


def unpack(packed: Packed) -> np.ndarray:
    """Convert 4-bit codes to a matrix float32 [rows, n]. Raises CorruptFile if the shapes of the arrays do
    not match."""
    rows, groups = packed.scales.shape
    sound = packed.weight.shape == (rows, groups * GROUP // _PER_WORD) and packed.biases.shape == (
        rows,
        groups,
    )
    if not sound or not GROUP * (groups - 1) < packed.n <= GROUP * groups:
        raise CorruptFile(
            f"a packed matrix of {packed.n} columns has parts {packed.weight.shape}, {packed.scales.shape} "
            f"and {packed.biases.shape}. Export the adapter again."
        )
    q = ((packed.weight[..., None] >> _SHIFTS) & _LEVELS).reshape(rows, groups, GROUP)
    w = packed.scales[..., None] * q.astype(np.float32) + packed.biases[..., None]
    return np.ascontiguousarray(w.reshape(rows, -1)[:, : packed.n])


def pack_pair(pair: _Pair) -> tuple[Packed, Packed]:
    """Convert a LoRA pair to 4-bit codes: lora_a [in, r], lora_b [r, out] -> packed matrices [r, in], [r,
    out]."""
    return pack(np.ascontiguousarray(pair[0].T)), pack(pair[1])


def unpack_pair(a: Packed, b: Packed) -> _Pair:
    return np.ascontiguousarray(unpack(a).T), unpack(b)
