"""Drawing a token in C (neon/src/draw.c). Its slow twin is `drawn` of ruvmlx/sampling.py."""

import ctypes as C

import numpy as np

from ruvmlx.kernels.library import BAD_ARGUMENT, NOT_FINITE, functions
from ruvmlx.kernels.micro import Array, NotFinite, _in


class _How(C.Structure):
    """struct rvm_drawing"""

    _fields_ = [
        ("temperature", C.c_double),
        ("top_p", C.c_double),
        ("min_p", C.c_double),
        ("u", C.c_double),
        ("top_k", C.c_size_t),
    ]


class TokenDrawing:
    """Draws the tokens of one reply. Keeps 16 bytes of scratch memory for each id of the vocabulary."""

    def __init__(
        self, temperature: float, top_p: float, min_p: float, top_k: int, impl: str | None = None
    ):
        self._how, self._token = _How(temperature, top_p, min_p, 0.0, top_k), C.c_int32()
        self._addresses = C.addressof(self._how), C.addressof(self._token)
        self._draw = functions(impl).draw
        self._scratch = np.empty(0, np.uint64)

    def __call__(self, logits: Array, u: float) -> int:
        """logits [V] -> token id. u: from 0 to below 1, the token's place in the sum of probabilities."""
        if 2 * logits.size > self._scratch.size:
            self._scratch = np.empty(2 * logits.size, np.uint64)
        self._how.u = u
        how, token = self._addresses
        rc = self._draw(_in(logits), logits.size, how, self._scratch.ctypes.data, token)
        if rc == NOT_FINITE:
            raise NotFinite("draw: the largest logit, or the sum of probabilities, is NaN or infinite")
        if rc == BAD_ARGUMENT:
            raise ValueError(f"draw: bad argument (no logits, an option out of its range, or u = {u})")
        return self._token.value
