"""This module draws a token in C (neon/src/draw.c). The simple version for tests is `draw_token` of
sampling.py."""

import ctypes as C
from collections.abc import Callable

import numpy as np

from ruvmlx.kernels.library import BAD_ARGUMENT, NOT_FINITE, functions
from ruvmlx.kernels.micro import Array, NotFinite, _in
from ruvmlx.kernels.replies import DRAW, Drawing, ReplyStruct, ReplyWork


class TokenDrawing:
    """This class draws the tokens of one reply. An object needs 16 bytes of scratch memory for each id of the
    vocabulary."""

    def __init__(self, temperature: float, top_p: float, min_p: float, top_k: int, impl: str | None = None):
        self._how, self._token = Drawing(temperature, top_p, min_p, 0.0, top_k), C.c_int32()
        self._addresses = C.addressof(self._how), C.addressof(self._token)
        self._draw = functions(impl).draw
        self._scratch = np.empty(0, np.uint64)

    def __call__(self, logits: Array, u: float) -> int:
        """Return a token id, drawn from logits [V]. u: a uniform random number, 0 <= u < 1. Raises NotFinite
        if the largest logit or the sum of the probabilities is not finite."""
        self._how.u = u
        how, token = self._addresses
        self._check(self._draw(_in(logits), logits.size, how, self._room(logits.size), token))
        return self._token.value

    def work(self, logits: Array, u: float, drawn: Callable[[int], None]) -> ReplyWork:
        """Return the kernel call that draws the token as a ReplyWork, which can run together with the calls
        of other replies. After the call, the function `drawn` receives the token."""
        self._how.u = u
        fields = ReplyStruct(what=DRAW, logits=_in(logits), vocab=logits.size, drawing=self._how)
        fields.scratch = self._room(logits.size)

        def done(after: ReplyStruct) -> None:
            self._check(after.status)
            drawn(after.token)

        return ReplyWork(fields, done, logits, self._scratch)

    def _room(self, vocab: int) -> int:
        if 2 * vocab > self._scratch.size:
            self._scratch = np.empty(2 * vocab, np.uint64)
        return self._scratch.ctypes.data

    def _check(self, rc: int) -> None:
        if rc == NOT_FINITE:
            raise NotFinite("draw: the largest logit, or the sum of probabilities, is NaN or infinite")
        if rc == BAD_ARGUMENT:
            raise ValueError(f"draw: bad argument (no logits, an option out of range, or u = {self._how.u})")
