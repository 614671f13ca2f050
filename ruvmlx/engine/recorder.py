"""This module describes recorders. A recorder receives the tokens of a reply; for example, the learning loop
records a trace of the reply, from which ratings learn."""

from typing import Protocol, runtime_checkable

import numpy as np

from ..kernels.replies import ReplyWork


class Recorder(Protocol):
    def add(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> None:
        """Receive one token, with the hidden state [D] and the logits [V] (adapter applied) from which the
        token was drawn. For each token, the run calls either `add` or `WorkRecorder.work`: at once if the
        reply comes in decode steps, later if it comes from the backend's own token stream."""


@runtime_checkable
class WorkRecorder(Protocol):
    def work(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> list[ReplyWork]:
        """Return the kernel call that does the work of Recorder.add. The caller runs this call together with
        the calls of other recorders. The list has at most one call, because two calls for one recorder must
        not run at the same time."""
