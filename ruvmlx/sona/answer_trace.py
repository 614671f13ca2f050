"""Keeps thoughts out of what a rating moves: only tokens of the answer reach the trace."""

import numpy as np

from ..models.thinking import ThoughtCounter
from .trace import Trace

_Drawn = tuple[np.ndarray, np.ndarray, int]


class AnswerTrace:
    """A recorder (engine/run.py) before a trace. Tokens that may become a tag wait until that is known."""

    def __init__(self, trace: Trace, counter: ThoughtCounter):
        self._trace, self._counter = trace, counter
        self._waiting: list[_Drawn] = []

    def add(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> None:
        """As Trace.add."""
        in_thought = self._counter.in_thought
        self._counter.add(token)
        if in_thought or self._counter.in_thought:
            self._waiting = []
            return
        self._waiting.append((hidden, logits, token))
        if self._counter.is_decided:
            for drawn in self._waiting:
                self._trace.add(*drawn)
            self._waiting = []

    @property
    def thought(self) -> int:
        """Sampled tokens of the thought; 0 where it never ended, because there is no answer to rate then."""
        return 0 if self._counter.in_thought else self._counter.tokens
