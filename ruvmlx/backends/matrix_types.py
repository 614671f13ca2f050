"""This module computes, for each storage type (for example Q4_K), how many bits per weight the backends
"native" and "mlx" need in memory. The command `ruvmlx show NAME --details` prints the result."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..kernels.packing import SUPER_BLOCKS
from ..models.config.layout import matrices
from ..models.config.model import Model
from ..models.files.gguf_types import ROWS, TensorType
from ..models.files.small_floats import TYPES
from ..models.weights.stored import StoresBlocks

_Q6_K = next(row for row in ROWS if row.name == "Q6_K")


@dataclass(frozen=True)
class MatrixType:
    """The number and the sizes of all matrices of a model that have one storage type (for example Q4_K).

    matrices: the number of matrices of this type
    file_bits, native_bits, mlx_bits: the number of bits per weight, with the weights' scales and biases, in
        the file and in the memory of the backends "native" and "mlx"
    rounded: the names of the backends that change the values of the file's weights by rounding
    """

    type: str
    matrices: int
    file_bits: float
    native_bits: float
    mlx_bits: float
    rounded: tuple[str, ...]

    def __str__(self) -> str:
        memory = f"{self.native_bits:.4g} with native, {self.mlx_bits:.4g} with mlx"
        note = f", rounded with {' and '.join(self.rounded)}" if self.rounded else ""
        of = "matrix" if self.matrices == 1 else "matrices"
        return f"{self.matrices} {of} of {self.file_bits:.4g} bits a weight; in memory {memory}{note}"


def matrix_types(model: Model) -> list[MatrixType]:
    """Return one MatrixType for each storage type of the model's matrices, the most frequent type first. The
    list is empty for a folder of safetensors files without small floats (8 or 4 bits), and for a model that
    only mlx-lm's code runs."""
    weights = model.load_weights() if model.is_own else {}
    if not isinstance(weights, StoresBlocks):
        return []
    found = [weights.stored_tensor(module) for module, _ in matrices(model.config)]
    counts = Counter(tensor.type for tensor in found if tensor)
    wide = any(kind.wide for kind in counts)
    return [_matrix_type(kind, n, wide) for kind, n in counts.most_common()]


def bytes_in_memory(types: Mapping[str, int], backend: str) -> int:
    """Return the bytes that weights of these types take in memory on the backend "native" or "mlx". types:
    {storage type: number of weights}."""
    kinds = {row: types[row.name] for row in (*ROWS, *TYPES.values()) if row.name in types}
    wide = any(kind.wide for kind in kinds)
    bits = {kind: native_bits(kind) if backend == "native" else mlx_bits(kind, wide) for kind in kinds}
    return round(sum(n * bits[kind] / 8 for kind, n in kinds.items()))


def _matrix_type(kind: TensorType, count: int, wide: bool) -> MatrixType:
    backends = [
        name for name, rounds in (("native", _native_rounds(kind)), ("mlx", _mlx_rounds(kind))) if rounds
    ]
    return MatrixType(
        kind.name, count, _file_bits(kind), native_bits(kind), mlx_bits(kind, wide), tuple(backends)
    )


def _file_bits(kind: TensorType) -> float:
    return 8 * kind.nbytes / kind.block


def native_bits(kind: TensorType) -> float:
    """Return the number of bits per weight in the native backend. The backend stores Q4_K, Q5_K, Q6_K and
    types without blocks as in the file, and Q3_K in as many bits as Q6_K. The backend converts other types to
    4 or 8 bits with scales, and with biases only if the file has biases."""
    if kind.block == 1 or kind.name in SUPER_BLOCKS:
        return _file_bits(kind)
    if kind.name == "Q3_K":
        return _file_bits(_Q6_K)
    codes = 4 if kind.affine_bits == 4 else 8
    # the bits of one scale: MXFP4's scales are powers of two, so 16 bits hold them exactly
    scale = 32 if kind.wide and kind.name != "MXFP4" else 16
    lows = kind.zero == 0 and kind.affine
    return codes + (2 if lows else 1) * scale / kind.affine_group


def mlx_bits(kind: TensorType, wide: bool = False) -> float:
    """Return the number of bits per weight in the MLX backend on a GPU. wide: True if any matrix of the file
    needs float32 scales; in this case all matrices get float32 scales."""
    if kind.block == 1 or kind.mode:
        return _file_bits(kind)
    return kind.affine_bits + 2 * (32 if wide or kind.wide else 16) / kind.affine_group


def _native_rounds(kind: TensorType) -> bool:
    return kind.name == "Q2_K" or (kind in TYPES.values() and not kind.affine)


def _mlx_rounds(kind: TensorType) -> bool:
    return kind.block > 1 and not kind.mode and (kind.group < 32 or kind.uneven)
