"""This module adds up the gradients of several texts, and applies the sum as one step of the optimiser.

    gradients = GradientAccumulator()
    gradients.accumulate(loss, grads)              # for each text; `pending` is the number of texts
    gradients.apply(training, lr=5e-4, clip=1.0)   # one AdamW step (adamw.py); then `pending` is 0
    gradients.apply_with_ewc(training, 5e-4, 1.0, anchors.penalty(...))
    gradients.reset()                              # discards the sums without a step

The background loop (sona/background.py) makes its optimiser steps in this way. The instant loop
(sona/instant.py) needs no accumulator: it keeps sums of evidence in the adapter, and computes the weights
from these sums at each rating.
"""

from collections.abc import Mapping

import numpy as np

from ..kernels.micro import NotFinite
from ..lora.base_lora import Pair, Place
from ..pausing import Pause
from .adamw import Pairs, Training

Penalty = tuple[float, Mapping[Place, Pair]]  # (value of the penalty, gradient of the penalty)


class GradientAccumulator:
    """The sums of losses and gradients since the last step. pending: the number of texts in the sums. loss:
    the sum of their losses."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard the sums."""
        self.pending, self.loss, self.pairs = 0, 0.0, Pairs()

    def accumulate(self, loss: float, grads: Mapping[Place, Pair]) -> None:
        """Add a text's loss and gradients, both already weighted. The accumulator may overwrite the
        arrays."""
        self.loss, self.pending = self.loss + loss, self.pending + 1
        for place, pair in grads.items():
            if place in self.pairs:
                for total, more in zip(self.pairs[place], pair, strict=True):
                    total += more
            else:
                self.pairs[place] = pair

    def apply(self, training: Training, lr: float, clip: float, pause: Pause = lambda: None) -> float:
        """Make one step, and return the loss. Raises NotFinite, and changes nothing, if a sum is not finite.

        If `pause` raises an exception, nothing is changed, and the sums stay.
        """
        return self.apply_with_ewc(training, lr, clip, (0.0, {}), pause)

    def apply_with_ewc(
        self, training: Training, lr: float, clip: float, penalty: Penalty, pause: Pause = lambda: None
    ) -> float:
        """Make one step as `apply` does, with a penalty on changes to weights that earlier tasks depend on
        (sona/optional/ewc.py)."""
        (value, slope), grads = penalty, dict(self.pairs)
        for place, pair in slope.items():
            known = grads.get(place)
            grads[place] = (known[0] + pair[0], known[1] + pair[1]) if known else pair
        loss = self.loss + value
        if not np.isfinite(loss) or not all(np.isfinite(g).all() for pair in grads.values() for g in pair):
            raise NotFinite("the loss or a gradient is not finite")
        pause()
        training.update(grads, lr, clip, pause)
        self.reset()
        return loss
