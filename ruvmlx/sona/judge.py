"""Judges replies to one question by what is known of the user's taste, for best of n."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class CandidateReply:
    """A reply, whole or so far. ended: the model ended it, so it was not cut and does not go on."""

    question: str
    text: str
    ended: bool


class Judge(Protocol):
    def score(self, replies: Sequence[CandidateReply]) -> np.ndarray:
        """[n]: the stars that the user would give, as far as is known."""
