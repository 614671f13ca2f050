"""This module keeps the thoughts of reasoning models out of learning. A thought is the text that a reasoning
model writes before its answer. Only tokens of the answer reach the trace, which records a reply's gradient
for its rating."""

import numpy as np

from ..kernels.replies import ReplyWork
from ..models.text.thinking import ThoughtCounter
from .trace import Trace

_Drawn = tuple[np.ndarray, np.ndarray, int]


class AnswerTrace:
    """A recorder (engine/recorder.py) that passes only the tokens of the answer to a trace. If a token can be
    the beginning of the tag that opens a thought, the token waits until the next tokens show whether the
    whole tag follows."""

    def __init__(self, trace: Trace, counter: ThoughtCounter):
        self._trace, self._counter = trace, counter
        self._waiting: list[_Drawn] = []

    def add(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> None:
        """Record one token. `Trace.add` explains the arguments."""
        for drawn in self._pop_answer_tokens(hidden, logits, token):
            self._trace.add(*drawn)

    def work(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> list[ReplyWork]:
        """Return the kernel calls (ReplyWork) that record one token, as `Trace.work` does. The caller runs
        these calls in parallel, but a trace must not add two tokens in parallel. So this function itself adds
        all waiting tokens except the last token, and returns only the call for the last token."""
        decided = self._pop_answer_tokens(hidden, logits, token)
        for drawn in decided[:-1]:
            self._trace.add(*drawn)
        return [work for drawn in decided[-1:] for work in self._trace.work(*drawn)]

    def _pop_answer_tokens(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> list[_Drawn]:
        """Return the waiting tokens and this token if they are now known to be part of the answer; else an
        empty list."""
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
        """The number of sampled tokens that belong to the reply's thought. The number is 0 if the thought
        never ended, because a reply without an end of its thought has no answer to rate."""
        return 0 if self._counter.in_thought else self._counter.tokens
