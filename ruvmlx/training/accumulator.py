"""Adds up the gradients of several texts, and applies them as one step of the optimiser.

    gradients = GradientAccumulator()
    gradients.accumulate(loss, grads)              # any number of texts; `pending` counts them
    gradients.apply(training, lr=5e-4, clip=1.0)   # one AdamW step (adamw.py); nothing is pending then
    gradients.apply_with_ewc(training, 5e-4, 1.0, anchors.penalty(...))
    gradients.reset()                              # or forget them

The background loop (sona/background.py) takes its steps so. The instant loop keeps sums of evidence in the
adapter instead, and computes the weights from all of it at each rating (sona/instant.py).
"""

from collections.abc import Mapping

import numpy as np

from ..kernels.micro import NotFinite
from ..lora.base_lora import Pair, Place
from ..pausing import Pause
from .adamw import Pairs, Training

Penalty = tuple[float, Mapping[Place, Pair]]  # its value, and its gradient


class GradientAccumulator:
    """Sums of losses and gradients. pending: texts since the last step. loss: the sum of their losses."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what is pending."""
        self.pending, self.loss, self.pairs = 0, 0.0, Pairs()

    def accumulate(self, loss: float, grads: Mapping[Place, Pair]) -> None:
        """Add a text's loss and gradients, both already weighted. The sum may write into the arrays."""
        self.loss, self.pending = self.loss + loss, self.pending + 1
        for place, pair in grads.items():
            if place in self.pairs:
                for total, more in zip(self.pairs[place], pair, strict=True):
                    total += more
            else:
                self.pairs[place] = pair

    def apply(self, training: Training, lr: float, clip: float, pause: Pause = lambda: None) -> float:
        """Make one step, and return the loss. NotFinite, and nothing is changed, if a sum is not finite.

        If `pause` raises, nothing is changed, and the same texts are pending.
        """
        return self.apply_with_ewc(training, lr, clip, (0.0, {}), pause)

    def apply_with_ewc(
        self, training: Training, lr: float, clip: float, penalty: Penalty, pause: Pause = lambda: None
    ) -> float:
        """As `apply`, with a penalty on leaving what earlier tasks depend on (sona/optional/ewc.py)."""
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
