"""Matrices as a file stores them, for backends that read its blocks.

`Weights` offers every matrix in MLX's affine layout. Where that rounds (groups of 16), or where a backend has
kernels for a file's own blocks, `stored_matrix` gives those.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from .gguf import GGUFTensor
from .gguf_blocks import AffineArrays, dequantise_blocks, unpack
from .gguf_types import TensorType
from .model import Weights
from .small_floats import FloatMatrix


@dataclass(frozen=True)
class StoredMatrix:
    """raw: uint8 [out, bytes of a row], rows in the order that `Weights` has; no NaN or infinity in it."""

    name: str
    type: TensorType
    raw: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.raw), self.raw.shape[1] // self.type.nbytes * self.type.block

    def dequantise(self, rows: slice = slice(None)) -> np.ndarray:
        """float32 [rows, in], the same bits as llama.cpp's."""
        return dequantise_blocks(self.raw[rows], self.type, self.name)

    def eight_bits(self) -> AffineArrays:
        """In MLX's affine layout, always with 8 bits."""
        parts = unpack(
            self.raw.reshape(-1), GGUFTensor(self.name, self.shape, self.type.widen_to_8_bits(), 0)
        )
        return parts["weight"], parts["scales"], parts["biases"]


@runtime_checkable
class StoresBlocks(Protocol):
    """Weights that can hand out a matrix's stored blocks."""

    def stored(self, module: str) -> StoredMatrix | FloatMatrix | None:
        """None for plain numbers and MLX's affine layout. KeyError for modules that do not exist."""

    def stored_tensor(self, module: str) -> GGUFTensor | None:
        """Type and shape by the header alone; None for MLX's affine layout, and plain numbers of a folder."""


def stored_matrix(weights: Weights, module: str) -> StoredMatrix | FloatMatrix | None:
    return weights.stored(module) if isinstance(weights, StoresBlocks) else None


def stored_tensor(weights: Weights, module: str) -> GGUFTensor | None:
    """Of a matrix in blocks; None for plain numbers, for other files, and for names of no matrix."""
    if not isinstance(weights, StoresBlocks) or f"{module}.scales" not in weights:
        return None
    return weights.stored_tensor(module)


def rounded_matrix(weights: Weights, module: str) -> StoredMatrix | FloatMatrix | None:
    """The matrix as its file stores it, if the affine layout in `weights` is not exactly that."""
    tensor = stored_tensor(weights, module)
    return None if tensor is None or tensor.type.affine else stored_matrix(weights, module)
