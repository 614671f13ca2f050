"""This module returns matrices in the quantised blocks of their file, for backends that compute with these
blocks.

`Weights` gives every matrix in MLX's affine layout. The conversion to the affine layout rounds the weights of
some types (with groups of 16). So `stored_matrix` returns the original blocks, for backends that have kernels
for these blocks.
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
    """A matrix of GGUF blocks, checked for NaN and infinity. raw: uint8 [out, bytes of a row]; the rows have
    the order of the rows in `Weights`."""

    name: str
    type: TensorType
    raw: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.raw), self.raw.shape[1] // self.type.nbytes * self.type.block

    def dequantise(self, rows: slice = slice(None)) -> np.ndarray:
        """Return the weights as float32 [rows, in], with the same bits as in llama.cpp."""
        return dequantise_blocks(self.raw[rows], self.type, self.name)

    def eight_bits(self) -> AffineArrays:
        """Return the matrix in MLX's affine layout, always with 8 bits."""
        parts = unpack(
            self.raw.reshape(-1), GGUFTensor(self.name, self.shape, self.type.widen_to_8_bits(), 0)
        )
        return parts["weight"], parts["scales"], parts["biases"]


@runtime_checkable
class StoresBlocks(Protocol):
    """Weights from which a caller can read a matrix in its stored blocks."""

    def blocks_of(self, module: str) -> StoredMatrix | FloatMatrix | None:
        """Return a matrix in its stored blocks, or None for plain numbers and for MLX's affine layout. Raises
        KeyError if the module does not exist."""

    def stored_tensor(self, module: str) -> GGUFTensor | None:
        """Return the GGUF type and the shape of a matrix, from the header alone. Return None if the
        matrix has no GGUF type: in MLX's affine layout, or as floats in a safetensors folder."""


def stored_matrix(weights: Weights, module: str) -> StoredMatrix | FloatMatrix | None:
    return weights.blocks_of(module) if isinstance(weights, StoresBlocks) else None


def stored_tensor(weights: Weights, module: str) -> GGUFTensor | None:
    """Return the type and shape of a matrix of blocks, or None for plain numbers, for weights that cannot
    return blocks, and for unknown modules."""
    if not isinstance(weights, StoresBlocks) or f"{module}.scales" not in weights:
        return None
    return weights.stored_tensor(module)


def rounded_matrix(weights: Weights, module: str) -> StoredMatrix | FloatMatrix | None:
    """Return the matrix in its stored blocks if MLX's affine layout of this matrix is not exact; else
    None."""
    tensor = stored_tensor(weights, module)
    return None if tensor is None or tensor.type.affine else stored_matrix(weights, module)
