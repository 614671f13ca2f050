"""This module returns matrices in the quantised form in which their file stores them, for backends that
compute with this form.

The mapping `Weights` gives every quantised matrix in MLX's affine layout. The conversion to the affine layout
rounds the weights of some types (GGUF types with groups of 16 weights, nvfp4, mxfp8 and fp8). `stored_matrix`
therefore returns the original form, for backends that have kernels for this form.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from ..config.model import Weights
from ..files.gguf import GGUFTensor
from ..files.gguf_blocks import AffineArrays, dequantise_blocks, unpack
from ..files.gguf_types import TensorType
from ..files.small_floats import FloatMatrix


class NamedWeights(Mapping[str, np.ndarray]):
    """Weights whose names are known before any of them is read. names: its keys are the names, in order."""

    names: Mapping[str, object]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of GGUF blocks, of which `check_blocks` has checked the float16 scales for NaN and infinity.
    raw: uint8 [out, bytes of a row]; the rows have the order of the rows in `Weights`."""

    name: str
    type: TensorType
    raw: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.raw), self.raw.shape[1] // self.type.nbytes * self.type.block

    def dequantise(self, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Return the weights as float32 [rows, in], with the same bits as in llama.cpp. rows: a range of
        rows, or their indexes."""
        return dequantise_blocks(self.raw[rows], self.type, self.name)

    def eight_bits(self) -> AffineArrays:
        """Return the matrix in MLX's affine layout with 8-bit codes, whatever the bits of its type are."""
        parts = unpack(
            self.raw.reshape(-1), GGUFTensor(self.name, self.shape, self.type.widen_to_8_bits(), 0)
        )
        return parts["weight"], parts["scales"], parts["biases"]


@runtime_checkable
class StoresBlocks(Protocol):
    """Weights from which a caller can read a matrix in its stored form (GGUF blocks or small floats)."""

    def blocks_of(self, module: str) -> StoredMatrix | FloatMatrix | None:
        """Return a matrix in its stored form; None if the matrix is not quantised or is stored in MLX's
        affine layout."""

    def stored_tensor(self, module: str) -> GGUFTensor | None:
        """Return the tensor type and the shape of a matrix, from the file's header alone. Return None for a
        matrix of a safetensors folder that has no small floats."""


def stored_matrix(weights: Weights, module: str) -> StoredMatrix | FloatMatrix | None:
    return weights.blocks_of(module) if isinstance(weights, StoresBlocks) else None


def stored_tensor(weights: Weights, module: str) -> GGUFTensor | None:
    """Return the type and shape of a matrix stored in GGUF blocks or small floats. Return None for a matrix
    that is not quantised, for MLX's affine layout, for weights that are no StoresBlocks, and for an unknown
    module."""
    if not isinstance(weights, StoresBlocks) or f"{module}.scales" not in weights:
        return None
    return weights.stored_tensor(module)


def rounded_matrix(weights: Weights, module: str) -> StoredMatrix | FloatMatrix | None:
    """Return the matrix in its stored form if its groups or the values of its codes do not fit into MLX's
    affine layout (`TensorType.affine` is False); else None. Except for Q8_K, the conversion of these matrices
    rounds the weights."""
    tensor = stored_tensor(weights, module)
    return None if tensor is None or tensor.type.affine else stored_matrix(weights, module)
