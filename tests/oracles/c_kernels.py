"""Kernels of the C library that the product reaches only from C: called here one by one.

`impl` names an implementation; None is the fastest one of this machine (ruvmlx/kernels/library.py).
"""

import ctypes as C

import numpy as np

from ruvmlx.kernels import layers, library
from ruvmlx.kernels.layers import Array, Half
from ruvmlx.kernels.micro import _done, _in, _inout, _shape

_U16 = np.dtype(np.uint16)


def dot(x: Array, y: Array, impl: str | None = None) -> float:
    """Sum of x * y over all elements."""
    _shape("y", y, x.shape)
    out = C.c_double()
    _done("dot", library.functions(impl).dot(_in(x), _in(y), x.size, C.addressof(out)))
    return out.value


def to_half(x: Array, impl: str | None = None) -> Half:
    """float32 -> the bits of float16, to nearest, ties to even."""
    y = np.empty(x.shape, np.uint16)
    _done("to_half", layers.functions(impl).to_half(_in(x), x.size, _inout(y, _U16)))
    return y


def from_half(x: Half, impl: str | None = None) -> Array:
    """The bits of float16 -> float32, exactly."""
    y = np.empty(x.shape, np.float32)
    _done("from_half", layers.functions(impl).from_half(_in(x, _U16), x.size, _inout(y)))
    return y
