"""Matrices in the form in which a file stores them, for backends that read its blocks.

`Weights` gives every matrix in MLX's affine layout. Sometimes that rounds (groups of 16), or a backend has
kernels for the file's own blocks. Then `stored_matrix` gives the blocks.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from ..config.model import Weights
from ..files.gguf import GGUFTensor
from ..files.gguf_blocks import AffineArrays, dequantise_blocks, unpack
from ..files.gguf_types import TensorType
from ..files.small_floats import FloatMatrix


@dataclass(frozen=True)
class StoredMatrix:
    """raw: uint8 [out, bytes of a row]; rows in the order of `Weights`; no NaN or infinity."""

    name: str
    type: TensorType
    raw: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.raw), self.raw.shape[1] // self.type.nbytes * self.type.block

    def dequantise(self, rows: slice = slice(None)) -> np.ndarray:
        """Return float32 [rows, in], with the same bits as in llama.cpp."""
        return dequantise_blocks(self.raw[rows], self.type, self.name)

    def eight_bits(self) -> AffineArrays:
        """Return the matrix in MLX's affine layout, always with 8 bits."""
        parts = unpack(
            self.raw.reshape(-1), GGUFTensor(self.name, self.shape, self.type.widen_to_8_bits(), 0)
        )
        return parts["weight"], parts["scales"], parts["biases"]


@runtime_checkable
class StoresBlocks(Protocol):
    """Weights that can return a matrix's stored blocks."""

    def blocks_of(self, module: str) -> StoredMatrix | FloatMatrix | None:
        """Return None for plain numbers and for MLX's affine layout. Raises KeyError for modules that do not
        exist."""

    def stored_tensor(self, module: str) -> GGUFTensor | None:
        """Return type and shape from the header alone. None for MLX's affine layout, and for plain numbers of
        a folder."""


def stored_matrix(weights: Weights, module: str) -> StoredMatrix | FloatMatrix | None:
    return weights.blocks_of(module) if isinstance(weights, StoresBlocks) else None


def stored_tensor(weights: Weights, module: str) -> GGUFTensor | None:
    """Return the tensor of a matrix in blocks; None for plain numbers, for other files, and for unknown
    names."""
    if not isinstance(weights, StoresBlocks) or f"{module}.scales" not in weights:
        return None
    return weights.stored_tensor(module)


def rounded_matrix(weights: Weights, module: str) -> StoredMatrix | FloatMatrix | None:
    """Return the matrix as its file stores it, if the affine layout in `weights` is not exact; else None."""
    tensor = stored_tensor(weights, module)
    return None if tensor is None or tensor.type.affine else stored_matrix(weights, module)
