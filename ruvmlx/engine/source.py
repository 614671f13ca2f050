"""This module holds the two sources of a run's tokens: single decode steps of a backend, and the backend's
own token stream."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from ..backends.base import Backend, HeadAdapter, KVCache, Step, Streaming, TokenStream, adapted_logits
from ..kernels.replies import ReplyWork
from ..sampling import Sampler, TokenRule
from .drafts import DraftedSteps
from .types import Sampling

Drawn = tuple[np.ndarray, np.ndarray]  # the hidden state [D] and the logits [V] from which a token was drawn


class Source(Protocol):
    """A source of tokens. Call `prefill` for the prompt, `read` for each token, then `close`. After `close`
    the cache holds all tokens except the last one."""

    at_once: bool  # True if `drawn_from` can be called after each `read` without an extra cost

    @property
    def prefilled_at(self) -> float:
        """Return time.perf_counter() at the end of prefill. The value is valid after the first token was
        read."""

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None]) -> None: ...

    def resume(self, token: int) -> None:
        """Continue after `token`, which another source of the same run drew. Call `resume` instead of
        `prefill`."""

    def read(self) -> int: ...

    def drawn_from(self) -> Iterator[Drawn]:
        """Yield the hidden state and the logits of each token read since the last call. The caller must read
        the iterator to its end."""

    def close(self) -> None: ...


class StepSource:
    """A source that runs one decode step for each token. The engine draws the token from the logits."""

    at_once = True

    def __init__(
        self,
        backend: Backend,
        cache: KVCache,
        adapter: HeadAdapter | None,
        sampling: Sampling,
        rule: TokenRule | None = None,
        drafts: DraftedSteps | None = None,
        draws: int = 0,
    ):
        """drafts: guesses and checks the next tokens while this source decodes alone; None: no guesses.
        draws: the number of the reply's tokens that another source drew before"""
        self._backend, self._cache, self._adapter = backend, cache, adapter
        self._drafts = drafts
        self._sampler = Sampler(sampling, rule, draws)
        self._step: Step | None = None  # the output of the last decode step or of the prefill
        self._token: int | None = None  # the token that was drawn from `_step`
        # the token that `draw_work` drew from `_step`; the next `read` returns it
        self._ahead: int | None = None
        # the decode step from which the newest token was drawn, until `drawn_from` returns this step
        self._fresh: Step | None = None
        self.prefilled_at = time.perf_counter()

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None]) -> None:
        self._step = self._backend.prefill(tokens, self._cache, self._adapter, progress=progress)
        self.prefilled_at = time.perf_counter()

    def resume(self, token: int) -> None:
        self._token = token

    @property
    def has_step(self) -> bool:
        """Return True if the next token is drawn from a step that was computed already."""
        return self._token is None and self._step is not None

    def move(self, cache: KVCache) -> None:
        """Go on with another cache of the same tokens, on another side of the backend. The source drops steps
        that were computed ahead, and guesses no more tokens."""
        self._cache, self._drafts = cache, None

    @property
    def waits(self) -> bool:
        """Return True if the newest token must be decoded before the next token is drawn."""
        return self._token is not None and not (self._drafts and self._drafts.is_ahead)

    def read(self) -> int:
        if self._token is not None:
            self.take(self._decode(self._token))
        assert self._step is not None  # `prefill` comes first
        ahead, self._ahead = self._ahead, None
        self._token = self._sampler(self._step.logits) if ahead is None else ahead
        if self._drafts:
            self._drafts.add(self._token)
        self._fresh = self._step
        return self._token

    def _decode(self, token: int) -> Step:
        if self._drafts:
            return self._drafts.step(token, self._cache, self._adapter)
        return self._backend.decode(token, self._cache, self._adapter)

    def draw_work(self) -> ReplyWork | None:
        """Return the kernel call that draws the next token, or None if `read` must draw the token. The caller
        runs the call together with the calls of other replies. The next `read` returns the token."""
        if self._token is not None or self._step is None or self._ahead is not None:
            return None

        def keep_token(token: int) -> None:
            self._ahead = token

        return self._sampler.work(self._step.logits, keep_token)

    def fork(
        self,
        cache: KVCache,
        sampling: Sampling,
        rule: TokenRule | None = None,
        drafts: DraftedSteps | None = None,
    ) -> "StepSource":
        """Return a source that continues after the same prompt, with its own sampler.

        cache: a fork of this source's cache
        """
        other = StepSource(self._backend, cache, self._adapter, sampling, rule, drafts)
        other._step, other.prefilled_at = self._step, self.prefilled_at
        return other

    def take(self, step: Step) -> None:
        """Accept the step of the newest token, which the caller has decoded (scheduler.py)."""
        self._step, self._token = step, None

    def drawn_from(self) -> Iterator[Drawn]:
        if self._fresh is not None:
            yield self._fresh.hidden, self._fresh.logits
        self._fresh = None

    def close(self) -> None:
        """Do nothing: the cache never holds more than the tokens that were read."""


class StreamSource:
    """A source that reads a backend's token stream. The stream keeps hidden states; `drawn_from` computes
    logits from the hidden states."""

    at_once = False

    def __init__(self, backend: Backend, stream: TokenStream, adapter: HeadAdapter | None):
        self._backend, self._stream, self._adapter = backend, stream, adapter
        self.prefill, self.read, self.close = stream.prefill, stream.read, stream.close

    @property
    def prefilled_at(self) -> float:
        return self._stream.prefilled_at

    def resume(self, token: int) -> None:
        self._stream.prefill([token])

    def drawn_from(self) -> Iterator[Drawn]:
        for hidden, logits in adapted_logits(self._adapter, self._stream.take_hidden(), self._backend.head):
            yield from zip(hidden, logits, strict=True)


def source(
    backend: Backend,
    cache: KVCache,
    adapter: HeadAdapter | None,
    sampling: Sampling,
    limit: int,
    steps: bool = False,
    rule: TokenRule | None = None,
    drafts: DraftedSteps | None = None,
    draws: int = 0,
) -> StepSource | StreamSource:
    """Return the source for a reply of at most `limit` tokens.

    steps: True if the caller decodes the tokens, in a batch with other replies (scheduler.py)
    draws: the number of the reply's tokens that another source drew before
    """
    steps = steps or needs_steps(sampling, rule)
    if steps or not isinstance(backend, Streaming) or not backend.streams:
        return StepSource(backend, cache, adapter, sampling, rule, drafts, draws)
    return StreamSource(backend, backend.stream(cache, adapter, sampling, limit, draws), adapter)


def needs_steps(sampling: Sampling, rule: TokenRule | None) -> bool:
    """Return True if a reply needs single steps that all come from one source. A stream draws a token before
    the Python code has read the previous token. A stream therefore cannot apply penalties or a constraint."""
    return rule is not None or sampling.changes_logits
