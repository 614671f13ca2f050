"""Where a run's tokens come from: steps of a backend that hands logits over, or a backend's own stream."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from ..backends.base import Backend, HeadAdapter, KVCache, Step, Streaming, TokenStream, adapted_logits
from ..sampling import Sampler
from .types import Sampling

Drawn = tuple[np.ndarray, np.ndarray]  # hidden [D], logits [V] that a token was drawn from


class Source(Protocol):
    """`prefill` the prompt, `read` the tokens, `close`: then the cache holds all of them but the last."""

    at_once: bool  # what a token was drawn from is at hand when it is read

    @property
    def prefilled_at(self) -> float:
        """time.perf_counter() when the prompt had been read; known once a token was."""

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None]) -> None: ...

    def read(self) -> int: ...

    def drawn_from(self) -> Iterator[Drawn]:
        """What the tokens since the last call were drawn from, to be read to its end."""

    def close(self) -> None: ...


class StepSource:
    """One step after the other, its token drawn from the logits by the engine."""

    at_once = True

    def __init__(self, backend: Backend, cache: KVCache, adapter: HeadAdapter | None, sampling: Sampling):
        self._backend, self._cache, self._adapter = backend, cache, adapter
        self._sampler = Sampler(sampling)
        self._step: Step | None = None  # what the model said last
        self._token: int | None = None  # drawn from it
        self._fresh: Step | None = None  # what the token was drawn from, until somebody asked
        self.prefilled_at = time.perf_counter()

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None]) -> None:
        self._step = self._backend.prefill(tokens, self._cache, self._adapter, progress=progress)
        self.prefilled_at = time.perf_counter()

    def read(self) -> int:
        if self._token is not None:
            self.take(self._backend.decode(self._token, self._cache, self._adapter))
        assert self._step is not None  # `prefill` comes first
        self._token, self._fresh = self._sampler(self._step.logits), self._step
        return self._token

    def take(self, step: Step) -> None:
        """The model's answer to the token that was read last, if somebody else fed it (batch.py)."""
        self._step, self._token = step, None

    def drawn_from(self) -> Iterator[Drawn]:
        if self._fresh is not None:
            yield self._fresh.hidden, self._fresh.logits
        self._fresh = None

    def close(self) -> None:
        """Nothing is ahead."""


class StreamSource:
    """A backend's stream. It keeps hidden states; logits are made from them again when they are wanted."""

    at_once = False

    def __init__(self, backend: Backend, stream: TokenStream, adapter: HeadAdapter | None):
        self._backend, self._stream, self._adapter = backend, stream, adapter
        self.prefill, self.read, self.close = stream.prefill, stream.read, stream.close

    @property
    def prefilled_at(self) -> float:
        return self._stream.prefilled_at

    def drawn_from(self) -> Iterator[Drawn]:
        for hidden, logits in adapted_logits(self._adapter, self._stream.hidden(), self._backend.head):
            yield from zip(hidden, logits, strict=True)


def source(
    backend: Backend,
    cache: KVCache,
    adapter: HeadAdapter | None,
    sampling: Sampling,
    limit: int,
    steps: bool = False,
) -> StepSource | StreamSource:
    """For one reply of at most `limit` tokens. steps: whoever asks wants to feed the tokens."""
    if steps or not isinstance(backend, Streaming) or not backend.streams:
        return StepSource(backend, cache, adapter, sampling)
    return StreamSource(backend, backend.stream(cache, adapter, sampling, limit), adapter)
