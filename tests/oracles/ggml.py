"""ggml's own conversions, from the library that llama-cpp-python carries."""

import ctypes as C
import functools
from pathlib import Path

import numpy as np
import pytest


class _Traits(C.Structure):
    """struct ggml_type_traits"""

    _fields_ = [
        ("name", C.c_char_p),
        ("block", C.c_int64),
        ("interleave", C.c_int64),
        ("nbytes", C.c_size_t),
        ("is_quantised", C.c_bool),
        ("to_float", C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_int64)),
        ("from_float", C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_int64)),
    ]


@functools.cache
def _lib():
    package = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, the oracle")
    found = sorted((Path(package.__file__).parent / "lib").glob("*ggml-base*"))
    lib = C.CDLL(str(found[0]))
    lib.ggml_get_type_traits.restype = C.POINTER(_Traits)
    lib.ggml_quantize_chunk.restype = C.c_size_t
    lib.ggml_quantize_chunk.argtypes = [C.c_int, C.c_void_p, C.c_void_p, *[C.c_int64] * 3, C.c_void_p]
    return lib


def traits(kind):
    """name, weights of a block, bytes of a block; kind: a row of gguf_types."""
    t = _lib().ggml_get_type_traits(kind.id).contents
    return t.name.decode(), t.block, t.nbytes


def dequantise(raw, kind):
    """uint8 [n * nbytes] -> float32 [n * block]."""
    raw = np.ascontiguousarray(raw).reshape(-1)
    out = np.empty(len(raw) // kind.nbytes * kind.block, np.float32)
    to_float = _lib().ggml_get_type_traits(kind.id).contents.to_float
    if not to_float:  # of types that only lie between two others
        to_float = getattr(_lib(), f"dequantize_row_{kind.name.lower().replace('_k', '_K')}")
    to_float(C.c_void_p(raw.ctypes.data), C.c_void_p(out.ctypes.data), C.c_int64(len(out)))
    return out


def quantise(w, kind):
    """float32 [rows, cols] -> uint8 [rows, bytes of a row]; importance 1 for all."""
    w = np.ascontiguousarray(w, np.float32)
    rows, cols = w.shape
    out = np.empty((rows, cols // kind.block * kind.nbytes), np.uint8)
    importance = np.ones(cols, np.float32)
    _lib().ggml_quantize_chunk(kind.id, w.ctypes.data, out.ctypes.data, 0, rows, cols, importance.ctypes.data)
    return out
