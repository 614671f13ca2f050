"""Matrices as a file stores them, for backends that read its blocks.

`Weights` offers every matrix in MLX's affine layout. Where that rounds (groups of 16), or where a backend has
kernels for a file's own blocks, `stored_matrix` gives those.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from .gguf_blocks import dequantise_blocks
from .gguf_types import TensorType
from .model import Weights


@dataclass(frozen=True)
class StoredMatrix:
    """raw: uint8 [out, bytes of a row], rows in the order that `Weights` has; no NaN or infinity in it."""

    name: str
    type: TensorType
    raw: np.ndarray

    def dequantised(self, rows: slice = slice(None)) -> np.ndarray:
        """float32 [rows, in], the same bits as llama.cpp's."""
        return dequantise_blocks(self.raw[rows], self.type, self.name)


@runtime_checkable
class StoresBlocks(Protocol):
    """Weights that can hand out a matrix's stored blocks."""

    def stored(self, module: str) -> StoredMatrix | None:
        """None for matrices of plain numbers. KeyError for modules that do not exist."""

    def stored_type(self, module: str) -> TensorType | None:
        """The matrix's type, by the header alone; None where no file's types are known."""


def stored_matrix(weights: Weights, module: str) -> StoredMatrix | None:
    return weights.stored(module) if isinstance(weights, StoresBlocks) else None


def stored_type(weights: Weights, module: str) -> TensorType | None:
    return weights.stored_type(module) if isinstance(weights, StoresBlocks) else None
