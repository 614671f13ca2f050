"""What receives the tokens of a reply while it is written, such as the trace of the learning loop."""

from typing import Protocol, runtime_checkable

import numpy as np

from ..kernels.replies import ReplyWork


class Recorder(Protocol):
    def add(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> None:
        """Receive one token, and the hidden state [D] and the logits [V] (adapter applied) that it was drawn
        from. Called once for each token: at once if the backend returns logits, else at `Run.record`."""


@runtime_checkable
class WorkRecorder(Protocol):
    def work(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> list[ReplyWork]:
        """Like Recorder.add, but returns the kernel call instead of running it. The caller runs it together
        with those of other recorders. The list has at most one call, because two calls for one recorder must
        not run at the same time."""
