"""This module computes learning signals. A signal is the reward of a reply, from a rating or from implicit
feedback.
    reward = quality * max(0, 2 - latency_ratio)

`quality` is the quality of the reply, 0 to 1, as the rating or the implicit feedback states it. latency_ratio
is 1 at the median speed of earlier replies and 2 at half of this speed. This reward includes speed, so only
statistics (`learn status --details`) and the router use this reward. The reward with speed does not train the
adapter, because no change of weights makes a reply faster. The DRO weight (objective.py), which depends on
the rating and not on the speed, trains the adapter.

Implicit feedback is an action of the user that hints at a rating, for example to copy a reply or to ask for
another reply. But the user can also do this for another reason. So implicit feedback is recorded only if the
setting `implicit_feedback` is on. The weight of implicit feedback is a small part of the weight of a rating.
In the reasoning bank, the rating of a reply replaces the reply's implicit feedback.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ..errors import UsageError
from ..ratings import RATINGS
from ..store import SignalRow
from . import objective

# Implicit feedback: {label: (reward from -1 to 1, weight)}. The weight of a rating is 1.
IMPLICIT = {
    "regenerated": (-1.0, 0.2),  # the user wanted another reply
    "edited": (-0.5, 0.1),  # the user put the question in other words
    "stopped": (-0.5, 0.1),
    "copied": (1.0, 0.2),
    "continued": (0.5, 0.05),  # the user went on with the conversation
}
LABELS = (*RATINGS, *IMPLICIT)
INDEX = {label: i for i, label in enumerate(LABELS)}
_STARS = slice(INDEX["1"], INDEX["5"] + 1)  # the places of the labels with stars in LABELS
WEIGHTS = np.array([1.0] * len(RATINGS) + [weight for _, weight in IMPLICIT.values()])
_SIZES = (0.5e9, 2e9, 5e9, 10e9)  # numbers of parameters: the limits between the size classes of models


@dataclass(frozen=True, slots=True)
class LearningSignal:
    """A learning signal about one reply."""

    reply_id: str
    query: np.ndarray | None  # the question's vector [E] float32, length 1
    kind: str  # "explicit" | "implicit"
    label: str  # a rating, or a key of IMPLICIT
    quality: float  # the quality of the reply by the label, 0 to 1
    # the reply's time per token, divided by the median time per token of earlier replies
    latency_ratio: float
    size_class: int  # the size class of the model: 0 (below 0.5e9 parameters) to 4
    context_tokens: int  # the number of tokens of prompt and reply together

    @property
    def reward(self) -> float:
        """The reward of the reply, 0 to 2. A perfect reply without any delay would have the reward 2."""
        return self.quality * max(0.0, 2.0 - self.latency_ratio)

    @property
    def weight(self) -> float:
        """The weight of the signal: 1 for a rating, less for implicit feedback."""
        return float(WEIGHTS[INDEX[self.label]])

    def row(self) -> SignalRow:
        return SignalRow(
            self.reply_id, self.kind, self.label, self.quality, self.reward,
            self.latency_ratio, self.size_class, self.context_tokens,
        )  # fmt: skip


def extract(
    reply_id: str,
    label: str,
    counts: np.ndarray,
    query: np.ndarray | None = None,
    latency_ratio: float = 1.0,
    size_class: int = 0,
    context_tokens: int = 0,
) -> LearningSignal:
    """Return the learning signal of a reply with this label (a rating, or implicit feedback). A star rating
    is ranked among the star ratings in `counts`.

    counts: [len(LABELS)], the number of entries of other replies with each label in the reasoning bank
    """
    quality = (reward_of(label, counts) + 1) / 2
    kind = "implicit" if label in IMPLICIT else "explicit"
    return LearningSignal(reply_id, query, kind, label, quality, latency_ratio, size_class, context_tokens)


def check_implicit(label: str) -> str:
    if label not in IMPLICIT:
        raise UsageError(f"an implicit signal is one of {', '.join(IMPLICIT)}; got {label!r}.")
    return label


def reward_of(label: str, counts: Sequence[int] | np.ndarray) -> float:
    """Return the reward r of one label, in [-1, 1]. For a rating, `objective.reward` computes r. For implicit
    feedback, r is in IMPLICIT. counts: [len(LABELS)], the number of entries with each label"""
    if label in IMPLICIT:
        return IMPLICIT[label][0]
    return objective.reward(label, counts[_STARS])


def rewards(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the reward r of every label: [len(LABELS)]. counts: the number of entries with each label."""
    return np.array([reward_of(label, counts) for label in LABELS])


def size_class(parameters: int) -> int:
    """Return the size class, 0 to 4, of a model with this number of parameters."""
    return sum(parameters >= limit for limit in _SIZES)


class Pace:
    """A record of the times per token of the newest `keep` replies, and of their median (the usual time per
    token)."""

    def __init__(self, keep: int = 65):
        self._ms: deque[float] = deque(maxlen=keep)

    def ratio(self, latency_ms: float, tokens: int) -> float:
        """Record a reply's time per token. Return this time divided by the median of the earlier replies'
        times per token. Return 1 for the first reply, and for a reply without tokens or time."""
        if tokens < 1 or not latency_ms > 0:
            return 1.0
        mine = latency_ms / tokens
        usual = median(self._ms) if self._ms else mine
        self._ms.append(mine)
        return mine / usual
