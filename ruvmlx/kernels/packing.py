"""This module packs weights into the form that the C matrix kernels read (neon/include/rvm_matrix.h).

w = PackedMatrix.plan(weight, scales, biases)      # plans the stored form and the number of bytes
w = PackedMatrix.plan_blocks("Q4_K", raw, cols)    # GGUF's super-blocks
w.pack(memory)                                     # uint8 [w.nbytes] at a multiple of 64 bytes
"""

import ctypes as C
import functools
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ruvmlx.kernels.library import OK, _load

ALIGNMENT = 64
Q4, Q8, F16, BF16, F32 = range(5)
# {GGUF type with blocks of 256 columns: its number in C}. Packing changes only the order of the codes of
# these types, not their values.
SUPER_BLOCKS = {"Q4_K": 5, "Q5_K": 6, "Q6_K": 7}
_KINDS = {"float16": F16, "bfloat16": BF16, "float32": F32}
_P, _N, _I, _U = C.c_void_p, C.c_size_t, C.c_int, C.c_uint32
_ROWS_AT_ONCE = 1024


class _Spec(C.Structure):
    _fields_ = [
        ("kind", _U),
        ("scale_kind", _U),
        ("affine", _U),
        ("group", _U),
        ("rows", C.c_uint64),
        ("cols", C.c_uint64),
    ]


@functools.cache
def _lib() -> C.CDLL:
    lib = _load()
    lib.rvm_matrix_plan.restype, lib.rvm_matrix_plan.argtypes = _I, [_I, _N, _N, _N, _P, _P, _I, _P]
    lib.rvm_matrix_bytes.restype, lib.rvm_matrix_bytes.argtypes = _N, [_P]
    lib.rvm_matrix_pack.restype = _I
    lib.rvm_matrix_pack.argtypes = [_P, _P, _P, _P, _I, _N, _N, _P]
    return lib


@dataclass
class PackedMatrix:
    """A plan to pack one matrix [out, in]. The object holds references to the source arrays, so Python does
    not free their memory."""

    spec: Any
    weight: np.ndarray
    scales: np.ndarray | None
    biases: np.ndarray | None
    nbytes: int

    @classmethod
    def plan(
        cls,
        weight: np.ndarray,
        scales: np.ndarray | None = None,
        biases: np.ndarray | None = None,
        cols: int = 0,
    ) -> "PackedMatrix":
        """Plan the packing of a matrix.

        weight: [out, in] of a float type; or, with scales, biases and cols, codes in uint32 [out, in * bits /
            32]
        """
        weight = np.ascontiguousarray(weight)
        if scales is None or biases is None:
            kind, cols, group, scale_kind = _KINDS[weight.dtype.name], weight.shape[1], 0, F32
        else:
            scales, biases = np.ascontiguousarray(scales), np.ascontiguousarray(biases)
            if weight.dtype != np.uint32 or scales.shape != biases.shape:
                raise ValueError(f"codes {weight.dtype}, scales {scales.shape}, biases {biases.shape}")
            if scales.dtype != biases.dtype:  # the C code reads both with one type
                scales, biases = scales.astype(np.float32), biases.astype(np.float32)
            kind = Q4 if 8 * weight.shape[1] == cols else Q8
            group, scale_kind = cols // scales.shape[1], _KINDS[scales.dtype.name]
        return cls._plan_matrix(kind, cols, group, scale_kind, weight, scales, biases)

    @classmethod
    def plan_blocks(cls, kind: str, raw: np.ndarray, cols: int) -> "PackedMatrix":
        """Plan the packing of GGUF blocks. kind: a type in SUPER_BLOCKS. raw: uint8 [out, bytes of a row];
        the caller has checked that all numbers are finite."""
        bytes_of = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
        if raw.dtype != np.uint8 or raw.shape[1] * 256 != cols * bytes_of:
            raise ValueError(f"rows of {raw.shape[1]} bytes are not {cols} weights of {kind}")
        return cls._plan_matrix(SUPER_BLOCKS[kind], cols, 256, F16, np.ascontiguousarray(raw), None, None)

    @classmethod
    def _plan_matrix(
        cls,
        kind: int,
        cols: int,
        group: int,
        scale_kind: int,
        weight: np.ndarray,
        scales: np.ndarray | None,
        biases: np.ndarray | None,
    ) -> "PackedMatrix":
        spec, rows = _Spec(), len(weight)
        address = [None if a is None else a.ctypes.data for a in (scales, biases)]
        rc = _lib().rvm_matrix_plan(kind, rows, cols, group, *address, scale_kind, C.byref(spec))
        nbytes = _lib().rvm_matrix_bytes(C.byref(spec)) if rc == OK else 0
        if not nbytes:
            raise ValueError(f"cannot pack a matrix [{rows}, {cols}] of kind {kind} in groups of {group}")
        return cls(spec, weight, scales, biases, nbytes)

    def pack(self, memory: np.ndarray, threads: Executor | None = None) -> None:
        """Write the packed weights into `memory`, uint8 [nbytes], whose address must be a multiple of 64. The
        threads share the rows; None: the calling thread packs all rows."""
        if memory.nbytes < self.nbytes or memory.ctypes.data % ALIGNMENT:
            raise ValueError(f"packed matrices need {self.nbytes} bytes at a multiple of {ALIGNMENT}")
        rows = len(self.weight)
        starts = range(0, rows, _ROWS_AT_ONCE)
        parts = [(a, min(a + _ROWS_AT_ONCE, rows)) for a in starts]
        packed = functools.partial(self._pack_rows, memory)
        for rc in threads.map(packed, parts) if threads else map(packed, parts):
            if rc != OK:
                raise ValueError("a matrix could not be packed")

    def _pack_rows(self, memory: np.ndarray, part: tuple[int, int]) -> int:
        begin, end = part
        parts = [None if a is None else a[begin:end].ctypes.data for a in (self.scales, self.biases)]
        scale_kind = F32 if self.scales is None else _KINDS[self.scales.dtype.name]
        return _lib().rvm_matrix_pack(
            C.byref(self.spec),
            self.weight[begin:end].ctypes.data,
            *parts,
            scale_kind,
            begin,
            end,
            memory.ctypes.data,
        )
