"""This module lets replies go on after one side of a backend with two sides has failed.

The tokens of a reply so far are read again on the side that still works. No token is drawn twice, and the
recorder receives each token once: the hidden states of tokens that it has not received come from the second
reading.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from ..backends.base import Backend, HeadAdapter, TwoSided, adapted_logits
from ..errors import SideFailed
from .session import Session
from .source import Drawn, Source, StepSource
from .types import GenerationRequest

T = TypeVar("T")


class RunCancelled(Exception):
    """A run raises this error to end a reading of a cancelled request."""


class SessionMover(Protocol):
    """The method of SessionManager that this module uses."""

    def move(self, session: Session, salt: str) -> None: ...


class RunParts(Protocol):
    """The attributes of an engine that this module uses."""

    @property
    def backend(self) -> Backend: ...

    @property
    def sessions(self) -> SessionMover: ...


class MovableRun(Protocol):
    """The part of the class Run (run.py) that this module uses."""

    request: GenerationRequest
    adapter: HeadAdapter | None
    prompt: list[int]
    drawn: list[int]
    ids: list[int]
    recorded: int
    session: Session
    source: Source

    @property
    def engine(self) -> RunParts: ...

    @property
    def unread(self) -> int: ...

    def record(self) -> None: ...

    def switch(self, steps: bool) -> None: ...

    def raise_if_cancelled(self) -> None: ...


def on_living_side(runs: Sequence[MovableRun], work: Callable[[], T]) -> T:
    """Return work(), which computes a step of these runs. If a side of the backend has failed, now or
    earlier, move the runs to the other side first."""
    try:
        if not any(map(is_lost, runs)):
            return work()
    except SideFailed:
        pass
    for run in runs:
        if is_lost(run):
            move(run)
    return work()


def is_lost(run: MovableRun) -> bool:
    """Return True if the side that made the run's KV cache has failed."""
    backend = run.engine.backend
    return isinstance(backend, TwoSided) and backend.is_lost(run.session.cache)


def move(run: MovableRun) -> None:
    """Read the tokens of a run again on the side that works. Then the run's source goes on there. Raises
    RunCancelled if the request is cancelled."""
    run.engine.sessions.move(run.session, run.request.cache_salt)
    backend, cache, source, prompt = run.engine.backend, run.session.cache, run.source, run.prompt
    # The last token of the prompt is read with the reply's tokens, because its hidden state gave the first.
    done = len(prompt) - max(run.unread, 1)
    if done:
        backend.prefill(prompt[:done], cache, progress=lambda count: run.raise_if_cancelled())
    states = np.empty((0, 0), np.float32)
    if run.ids:
        decoded = run.ids if isinstance(source, StepSource) and source.has_step else run.ids[:-1]
        states = backend.hidden_states([prompt[-1], *decoded], run.raise_if_cancelled, cache)
    if isinstance(source, StepSource):
        source.move(cache)
    else:
        missing = states[run.recorded : len(run.drawn)]
        run.source = RereadSource(backend, run.adapter, missing, source.prefilled_at)
        run.switch(steps=False)
    if not run.unread and not run.ids:
        run.source.prefill(prompt[-1:], lambda count: run.raise_if_cancelled())


class RereadSource:
    """The source of the tokens that the failed side drew and that the recorder has not received."""

    at_once = False

    def __init__(
        self, backend: Backend, adapter: HeadAdapter | None, hidden: np.ndarray, prefilled_at: float
    ):
        """hidden: [n, D], the hidden states from which the n tokens were drawn"""
        self._backend, self._adapter, self._hidden = backend, adapter, hidden
        self.prefilled_at = prefilled_at

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None]) -> None:
        """Do nothing: the tokens have been read."""

    def resume(self, token: int) -> None:
        """Do nothing: another source goes on."""

    def read(self) -> int:
        raise SideFailed("the tokens so far are known; another source draws the next token.")

    def drawn_from(self) -> Iterator[Drawn]:
        for hidden, logits in adapted_logits(self._adapter, self._hidden, self._backend.head):
            yield from zip(hidden, logits, strict=True)

    def close(self) -> None:
        """Do nothing: this source holds no cache."""
