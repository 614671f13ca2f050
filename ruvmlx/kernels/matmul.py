"""This module multiplies matrices with 4-bit, 8-bit and float weights. The tests compare the products with
`matmul_ref` in float64.

    w = Matrix(weight, scales, biases, cols)      # MLX's affine layout, or a float array [out, in]
    y = matmul(w, x)                              # x: float32 [T, in]  ->  [T, out]

For quantised weights, x is rounded to 16 or 8 bits for each value; neon/include/rvm_matrix.h has the formula.
With quantised weights, all implementations ("avx512vnni", "neon_i8mm", ..., "scalar") return the same bits,
and a row of x with NaN or infinities makes the same row of y NaN. Wrong shapes of x and y raise ValueError.
"""

import ctypes as C
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ruvmlx.kernels.library import BAD_ARGUMENT, OK, LibraryError, _load
from ruvmlx.kernels.packing import ALIGNMENT, PackedMatrix

Array = NDArray[np.float32]
BLOCK = 32  # the number of activations that share one scale; 256 for the super-blocks of GGUF
MAX_CODE = {8: 127, 16: 32385}  # {number of bits of an activation: the code of the largest activation}
_P, _N, _I = C.c_void_p, C.c_size_t, C.c_int

# The functions that the C struct rvm_matmul points to, in the order of its fields, with the types of each
# function's arguments.
SIGNATURES: dict[str, list[Any]] = {
    "acts": [_I, _P, _N, _N, _N, _N, _N, _P],
    "matmul": [_P, _I, _P, _N, _N, _N, _P, _N],
    "page_queries": [_I, _P, _N, _N, _P],
    "page_scores": [_I, _P, _P, _N, _N, _P, _P],
    "page_values": [_I, _P, _P, _N, _N, _P, _P, _N],
}


class _MatmulTable(C.Structure):
    _fields_ = [("name", C.c_char_p), *((name, _P) for name in SIGNATURES), ("peak", _P)]


@functools.cache
def _lib() -> C.CDLL:
    lib = _load()
    lib.rvm_matmul_impl.restype, lib.rvm_matmul_impl.argtypes = C.POINTER(_MatmulTable), [C.c_char_p]
    lib.rvm_matmul_impl_name.restype, lib.rvm_matmul_impl_name.argtypes = C.c_char_p, [_N]
    lib.rvm_matrix_row.restype, lib.rvm_matrix_row.argtypes = _I, [_P, _N, _P]
    lib.rvm_matrix_check.restype, lib.rvm_matrix_check.argtypes = _I, [_P, _N]
    lib.rvm_matrix_acts.restype, lib.rvm_matrix_acts.argtypes = _I, [_P, _I]
    lib.rvm_acts_bytes.restype, lib.rvm_acts_bytes.argtypes = _N, [_I, _N, _N]
    return lib


@functools.cache
def implementations() -> tuple[str, ...]:
    """Return the names of the implementations of matrix products that run on this machine, fastest first:
    ("avx512vnni", ..., "scalar")."""
    names: list[str] = []
    while name := _lib().rvm_matmul_impl_name(len(names)):
        names.append(name.decode())
    return tuple(names)


@functools.cache
def functions(impl: str | None = None) -> SimpleNamespace:
    """Return the functions of one implementation (None: the fastest). The functions release Python's global
    lock (GIL) while they run."""
    table = _lib().rvm_matmul_impl(impl.encode() if impl else None)
    if not table:
        raise LibraryError(f"no implementation {impl!r} here; there are {', '.join(implementations())}.")
    made = {
        name: C.CFUNCTYPE(_I, *types)(getattr(table.contents, name)) for name, types in SIGNATURES.items()
    }
    made["peak"] = C.CFUNCTYPE(C.c_uint64, C.c_uint64, _P)(table.contents.peak)
    return SimpleNamespace(**made)


def peak(rounds: int, impl: str | None = None) -> int:
    """Run the innermost loop of a matrix product `rounds` times without reading memory, to measure the peak
    speed. Returns the number of multiplications that the loop did."""
    return functions(impl).peak(rounds, C.byref(C.c_int32()))


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Return uint8 [nbytes] at an address that is a multiple of 64."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


class Matrix:
    """A matrix W [rows, cols] in the packed form that the C kernels read. weight, scales, biases: the
    parameters of PackedMatrix.plan. If `blocks` (a GGUF type) is given, weight has the blocks of a GGUF file,
    as for PackedMatrix.plan_blocks."""

    def __init__(
        self,
        weight: np.ndarray,
        scales: np.ndarray | None = None,
        biases: np.ndarray | None = None,
        cols: int = 0,
        blocks: str | None = None,
    ) -> None:
        packed = (
            PackedMatrix.plan_blocks(blocks, weight, cols)
            if blocks
            else PackedMatrix.plan(weight, scales, biases, cols)
        )
        self.memory = aligned_bytes(packed.nbytes)
        packed.pack(self.memory)
        spec: Any = packed.spec
        self.kind, self.affine, self.group = int(spec.kind), bool(spec.affine), int(spec.group)
        self.rows, self.cols, self.tiles = int(spec.rows), int(spec.cols), -(-int(spec.rows) // 16)

    def __getitem__(self, row: int) -> Array:
        """Return row `row` (an embedding, for example) as float32, dequantised if W is quantised."""
        out = np.empty(self.cols, np.float32)
        if row < 0 or _lib().rvm_matrix_row(self.memory.ctypes.data, row, out.ctypes.data) != OK:
            raise IndexError(f"row {row} of a matrix of {self.rows} rows")
        return out

    def acts_kind(self, bits: int) -> int:
        """Return the number by which the C library names the form in which a product with this matrix needs
        the activations. Float weights need float activations. For quantised weights, `bits` is the number of
        bits of an activation."""
        return _lib().rvm_matrix_acts(self.memory.ctypes.data, bits)


def activations(w: Matrix, x: Array, impl: str | None = None, bits: int = 16) -> NDArray[np.uint8]:
    """Return x [T, cols] in the form that a product with w needs. bits: 8 or 16, the bits of an activation if
    w is quantised."""
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != w.cols or not x.flags.c_contiguous:
        raise ValueError(f"x must be contiguous float32 [T, {w.cols}], got {x.dtype} {list(x.shape)}")
    tokens = len(x)
    kind = w.acts_kind(bits)
    to = aligned_bytes(_lib().rvm_acts_bytes(kind, tokens, w.cols))
    _done(functions(impl).acts(kind, x.ctypes.data, w.cols, tokens, w.cols, 0, tokens, to.ctypes.data))
    return to


def product(w: Matrix, acts: NDArray[np.uint8], y: Array, impl: str | None = None, bits: int = 16) -> Array:
    """Write W times the activations of T tokens into y [T, rows] and return y. bits: 8 or 16, the bits of an
    activation in `acts` if w is quantised."""
    if y.dtype != np.float32 or y.ndim != 2 or y.shape[1] != w.rows or not y.flags.c_contiguous:
        raise ValueError(f"y must be contiguous float32 [T, {w.rows}], got {y.dtype} {list(y.shape)}")
    kind = w.acts_kind(bits)
    if acts.nbytes != _lib().rvm_acts_bytes(kind, len(y), w.cols):
        raise ValueError(f"these are not the {bits}-bit activations of {len(y)} tokens for {w.cols} columns")
    run = functions(impl).matmul
    _done(run(w.memory.ctypes.data, kind, acts.ctypes.data, len(y), 0, w.tiles, y.ctypes.data, w.rows))
    return y


def matmul(w: Matrix, x: Array, impl: str | None = None, bits: int = 16) -> Array:
    """Return x @ W^T: [T, cols] -> [T, rows]. bits: 8 or 16, to which x is rounded if w is quantised."""
    return product(w, activations(w, x, impl, bits), np.empty((len(x), w.rows), np.float32), impl, bits)


def dequantise_ref(weight: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> np.ndarray:
    """Return the float64 weights of MLX's affine form: W[n][k] = scales[n][k // group] * q[n][k] +
    biases[n][k // group]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    q = (weight[..., None] >> shifts & np.uint32(2**bits - 1)).reshape(len(weight), -1)
    group = q.shape[1] // scales.shape[1]
    return q * scales.astype(np.float64).repeat(group, 1) + biases.astype(np.float64).repeat(group, 1)


def quantise_ref(x: Array, bits: int, block: int = BLOCK) -> np.ndarray:
    """Return x [T, cols] after the rounding that the kernels do: d * round(x / d), d = max |x| /
    MAX_CODE[bits] over `block` columns."""
    blocks, top = x.reshape(len(x), -1, block), np.float32(MAX_CODE[bits])
    most = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.where(most < 1e-30, 0, top / np.where(most < 1e-30, 1, most)).astype(np.float32)
    return (np.rint(blocks * inverse) * (most / top).astype(np.float64)).reshape(x.shape)


def matmul_ref(w: np.ndarray, x: Array, bits: int | None = None, block: int = BLOCK) -> np.ndarray:
    """Return x @ w^T in float64, with w dequantised. If `bits` is given, x is first rounded as in
    quantise_ref."""
    return (quantise_ref(x, bits, block) if bits else x.astype(np.float64)) @ w.astype(np.float64).T


def _done(rc: int) -> None:
    if rc == BAD_ARGUMENT:
        raise ValueError("matmul: bad shapes")
    if rc != OK:
        raise RuntimeError(f"matmul returned {rc}")
