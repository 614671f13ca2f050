"""This module computes how strongly the background loop (background.py) pushes a rated reply."""

from collections.abc import Callable

import numpy as np

from . import objective
from .replay import RatedExample


def coefficient(example: RatedExample, frozen: float, nll: float, now: float) -> float:
    """Return the factor with which training raises the reply's mean log-probability. A factor below 0 makes
    the reply less likely. frozen, now: mean log-probability in the frozen and current model, nats/token."""
    w = objective.dro_weight(example.rating, example.reward, example.value, now - frozen)
    if w < 0:  # TOPR's taper (trace.py) lowers the weight of a disliked reply that became unlikely
        drawn = frozen if example.drawn is None else example.drawn
        w *= float(np.exp(min(0.0, now - drawn)))
    return w + (nll if example.reward > 0 else 0.0)


class KeptWeight:
    """A function that returns `weigh(value) * share` and keeps its last result in `last`."""

    def __init__(self, weigh: Callable[[float], float], share: float):
        self._weigh, self._share, self.last = weigh, share, 0.0

    def __call__(self, value: float) -> float:
        self.last = self._weigh(value) * self._share
        return self.last
