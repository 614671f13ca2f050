"""Keeps thoughts away from ratings: only tokens of the answer reach the trace."""

import numpy as np

from ..kernels.replies import ReplyWork
from ..models.text.thinking import ThoughtCounter
from .trace import Trace

_Drawn = tuple[np.ndarray, np.ndarray, int]


class AnswerTrace:
    """A recorder (engine/run.py) before a trace. Tokens that may become a tag wait until it is known whether
    they are one."""

    def __init__(self, trace: Trace, counter: ThoughtCounter):
        self._trace, self._counter = trace, counter
        self._waiting: list[_Drawn] = []

    def add(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> None:
        """Like Trace.add."""
        for drawn in self._pop_answer_tokens(hidden, logits, token):
            self._trace.add(*drawn)

    def work(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> list[ReplyWork]:
        """Like Trace.work. Two tokens of one trace must not be added at the same time. So all except the last
        one are added here."""
        decided = self._pop_answer_tokens(hidden, logits, token)
        for drawn in decided[:-1]:
            self._trace.add(*drawn)
        return [work for drawn in decided[-1:] for work in self._trace.work(*drawn)]

    def _pop_answer_tokens(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> list[_Drawn]:
        """Return the waiting tokens and this one, if they are now known to be part of the answer; else
        none."""
        in_thought = self._counter.in_thought
        self._counter.add(token)
        if in_thought or self._counter.in_thought:
            self._waiting = []
            return []
        self._waiting.append((hidden, logits, token))
        if not self._counter.is_decided:
            return []
        decided, self._waiting = self._waiting, []
        return decided

    @property
    def thought(self) -> int:
        """The number of sampled tokens in the thought. 0 if the thought never ended, because then there is no
        answer to rate."""
        return 0 if self._counter.in_thought else self._counter.tokens
