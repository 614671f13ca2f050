"""This module scores several replies to one question by the stars that the user would probably give. With
best of n, the runtime generates n replies and shows the reply with the best score."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .taste import TasteModel
from .user_taste import reply_features


@dataclass(frozen=True)
class CandidateReply:
    """One of the replies between which a judge chooses. The reply is complete or still in progress.
    finish_reason: why the reply ended; "" while the reply is in progress."""

    question: str
    text: str
    finish_reason: str


class Judge(Protocol):
    def score(self, replies: Sequence[CandidateReply]) -> np.ndarray:
        """Return the predicted stars of each reply: [n]."""


class TasteJudge:
    """A judge that scores a reply by the mean of the stars that the taste model predicts, not by a lower
    bound of these stars. The user sees only one reply, so the best choice is the reply with the highest
    expected stars. If the ratings say little about a reply, the reply's mean is near the neutral number of
    stars. The prediction for a reply that resembles no earlier reply is less certain, so its lower bound is
    lower. A judge by lower bounds could then prefer a reply that resembles earlier replies, even if the user
    did not like the earlier replies."""

    def __init__(self, taste: TasteModel):
        self._taste = taste

    def score(self, replies: Sequence[CandidateReply]) -> np.ndarray:
        """Return the predicted stars of each reply: [n]."""
        features = [reply_features(r.question, r.text, r.finish_reason) for r in replies]
        return self._taste.predict(features)[0]


class FailedJudge:
    """A judge that could not be made. error: the error of the attempt, which each call of `score` raises."""

    def __init__(self, error: Exception):
        self._error = error

    def score(self, replies: Sequence[CandidateReply]) -> np.ndarray:
        raise self._error
