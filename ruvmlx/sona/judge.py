"""Scores replies to one question by the stars that the user would probably give. Best of n uses these
scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .taste import TasteModel
from .user_taste import reply_features


@dataclass(frozen=True)
class CandidateReply:
    """A reply, complete or in progress. finish_reason: "" while it is in progress."""

    question: str
    text: str
    finish_reason: str


class Judge(Protocol):
    def score(self, replies: Sequence[CandidateReply]) -> np.ndarray:
        """[n]: the predicted stars of each reply."""


class TasteJudge:
    """Scores by the mean of the taste model, not by a lower bound. One reply will be shown, so the best
    choice has the highest expected stars. Where ratings say little, the mean is near neutral. A lower bound
    would prefer replies that are like earlier ones, liked or not."""

    def __init__(self, taste: TasteModel):
        self._taste = taste

    def score(self, replies: Sequence[CandidateReply]) -> np.ndarray:
        """Implements Judge.score."""
        features = [reply_features(r.question, r.text, r.finish_reason) for r in replies]
        return self._taste.predict(features)[0]
