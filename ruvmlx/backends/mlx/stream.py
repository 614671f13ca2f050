"""This module computes a reply's tokens on MLX, mostly one decode step ahead of the token that the caller
reads. The device therefore computes the next token while the host waits for a token and uses it.

    step k       feeds token k - 1, draws token k
    read() = k   submits step k + 1 (token k is not evaluated yet), then waits for token k

Sampling and the adapter of the output head are part of each step on the device. For each token, the host
reads only the token's id and one number that shows whether the logits were finite.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from ...models.config.model import ModelShape
from ...platform.mx import mx
from ...sampling import Sampling
from ..base import HeadAdapter, KVCache, check_tokens, finite, not_finite
from .sampler import MLXSampler

TIDY = 256  # the number of tokens between two calls of mx.clear_cache, as in mlx-lm


class HeadChange:
    """A copy of a HeadAdapter (the adapter of the output head) in the device's memory. A call returns logits
    [1, V] + scale * (hidden [1, D] @ lora_a) @ lora_b, computed in float32."""

    def __init__(self, adapter: HeadAdapter):
        self.lora_a = mx.array(adapter.lora_a * np.float32(adapter.scale))
        self.lora_b = mx.array(adapter.lora_b)
        # True if lora_b is zero, as in a new adapter; such an adapter changes no logit
        self.idle = not adapter.lora_b.any()
        mx.eval(self.lora_a, self.lora_b)

    def __call__(self, logits: mx.array, hidden: mx.array) -> mx.array:
        return logits if self.idle else mx.addmm(logits, hidden.astype(mx.float32) @ self.lora_a, self.lora_b)


class HeldChange:
    """This class keeps the device's copy of the last used HeadAdapter, until Python frees this adapter or
    another adapter is used."""

    def __init__(self) -> None:
        self._of: weakref.ref[HeadAdapter] | None = None
        self._change: HeadChange | None = None

    def of(self, adapter: HeadAdapter | None) -> HeadChange | None:
        """Return the device's copy of `adapter`. Adapter objects are immutable, so the copy stays right for
        the same object."""
        if adapter is None:
            return None
        if self._of is None or self._of() is not adapter:
            self._change, self._of = HeadChange(adapter), weakref.ref(adapter, self._forget)
        return self._change

    def _forget(self, gone: weakref.ref) -> None:
        if self._of is gone:
            self._of = self._change = None


class StreamCache(KVCache, Protocol):
    """The protocol of a cache with which a stream can run. room: the number of tokens that can be appended
    one by one and then removed by `retract`."""

    @property
    def room(self) -> int: ...

    def retract(self, n: int) -> None: ...


class StepRunner(Protocol):
    """The protocol of a backend with which a stream can run."""

    shape: ModelShape
    chunk: int
    device: mx.Device

    def adapt_threads(self) -> None: ...

    def running(self, caches: Sequence[KVCache], n: int) -> AbstractContextManager[Any]: ...

    def forward(self, tokens: mx.array, layers: Sequence[Any]) -> mx.array: ...

    def output_head(self, hidden: mx.array) -> mx.array: ...


class Drawn(NamedTuple):
    """The output of one decode step. MLX can still be computing the arrays."""

    token: mx.array  # [1]
    total: mx.array  # the sum of the logits: NaN or infinite if one of the logits is NaN or infinite
    hidden: mx.array  # [1, D]: the hidden state from which the token was drawn


class MLXTokenStream:
    """This class implements base.TokenStream for an MLX backend."""

    def __init__(
        self,
        backend: StepRunner,
        cache: StreamCache,
        change: HeadChange | None,
        sampling: Sampling,
        limit: int,
        draws: int = 0,
    ):
        self._backend, self._cache, self._change = backend, cache, change
        self._sampler = MLXSampler(sampling, draws=draws)
        self._left, self._count = limit, 0
        self._prompt: mx.array | None = None  # [1, D]: the hidden state after the last token of the prompt
        self._last: mx.array | None = None  # [1]: the last token that `read` returned
        # the output of the step that runs ahead of `read`; None: no such step
        self._ahead: Drawn | None = None
        self._states: list[mx.array] = []  # [1, D]: `hidden` of each token read since `take_hidden`
        self.prefilled_at = time.perf_counter()

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Read the prompt. While the device computes one chunk, Python builds the graph of the next chunk."""
        check_tokens(tokens, self._backend.shape.vocab_size)
        size = self._backend.chunk
        for start in range(0, len(tokens), size):
            part, before = tokens[start : start + size], self._prompt
            self._prompt = self._run(mx.array([list(part)], mx.uint32), lambda hidden: hidden[-1:])
            if before is not None:
                mx.eval(before)
                # free MLX's unused buffers of the last chunk, because a step with another number of tokens
                # cannot use them
                mx.clear_cache()
            if progress:
                progress(start + len(part))

    def read(self) -> int:
        drawn, self._ahead = self._ahead or self._submit_next(), None
        self._left -= 1
        if self._left and self._cache.room:
            self._ahead = self._feed_token(drawn.token)
        token = self._token(drawn)
        self._count += 1
        self._last = drawn.token
        self._states.append(drawn.hidden)
        if self._count % TIDY == 0:
            mx.clear_cache()
        return token

    def take_hidden(self) -> np.ndarray:
        if not self._states:
            return np.zeros((0, self._backend.shape.hidden_size), np.float32)
        with mx.stream(self._backend.device):
            states = mx.concatenate(self._states).astype(mx.float32)
            self._states = []
            return finite(np.array(states))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead = None
            self._cache.retract(1)

    def _submit_next(self) -> Drawn:
        """Submit the step of the next token, which no earlier `read` has submitted: the first token of the
        reply, or a token for which the cache had no `room`."""
        if self._last is not None:
            return self._feed_token(self._last)
        assert self._prompt is not None  # `prefill` comes first
        with mx.stream(self._backend.device):
            drawn = self._draw(self._prompt)
            mx.async_eval(drawn)
        return drawn

    def _feed_token(self, token: mx.array) -> Drawn:
        return self._run(token[None], self._draw)

    def _run(self, tokens: mx.array, then: Callable):
        """Append tokens [1, L] to the cache. Submit then(h) to MLX and return it, unevaluated; h: the hidden
        states [L, D] of these tokens."""
        backend, n = self._backend, tokens.shape[1]
        backend.adapt_threads()
        more = n > self._cache.room  # True: this step makes pages or changes their tiers
        with mx.stream(backend.device), backend.running([self._cache], n) as held:
            made = then(backend.forward(tokens, held.layers)[0])
            mx.async_eval(made, *(held.arrays() if more else ()))
        return made

    def _draw(self, hidden: mx.array) -> Drawn:
        """Return the next token, drawn from hidden [1, D]; MLX has not evaluated the token yet."""
        logits = self._backend.output_head(hidden).astype(mx.float32)
        if self._change is not None:
            logits = self._change(logits, hidden)
        return Drawn(self._sampler(logits), logits.sum(), hidden)

    def _token(self, drawn: Drawn) -> int:
        """Wait for a token and return its id. The host reads only the token and the sum of the logits from
        the device."""
        if not self._count:
            mx.eval(self._prompt)
            self.prefilled_at = time.perf_counter()
        token, total = _number(drawn.token), _number(drawn.total)
        if not math.isfinite(total):
            raise not_finite()
        return int(token)


def _number(array: mx.array) -> float:
    """Return the value of an array with one element. While tokens are drawn, only this function makes the
    host read from the device."""
    return cast(float, array.item())
