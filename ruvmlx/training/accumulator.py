"""This module adds up the gradients of several texts, and applies the sum as one step of the optimiser.

    gradients = GradientAccumulator()
    gradients.accumulate(loss, grads)              # add a text; `pending` is the number of texts
    gradients.apply(training, lr=5e-4, clip=1.0)   # make one AdamW step (adamw.py); then `pending` is 0
    gradients.apply_with_ewc(training, 5e-4, 1.0, anchors.penalty(...))
    gradients.reset()                              # discard the sums without a step

The background loop, which trains a base LoRA (sona/background.py), makes its optimiser steps with this
accumulator. The instant loop, which updates a small LoRA at each rating, has sums of evidence in the
adapter, and an accumulator of its own with the same functions (sona/evidence.py).
"""

from collections.abc import Mapping

import numpy as np

from ..kernels.micro import NotFinite
from ..lora.base_lora import Pair, Place
from ..pausing import Pause
from .adamw import Pairs, Training

Penalty = tuple[float, Mapping[Place, Pair]]  # (value of the penalty, gradient of the penalty)


class GradientAccumulator:
    """The sums of the texts' losses and gradients since the last optimiser step.

    pending: the number of texts in the sums
    loss: the sum of the texts' losses
    pairs: the sums of the texts' gradients with respect to lora_a and lora_b
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all sums to zero without an optimiser step."""
        self.pending, self.loss, self.pairs = 0, 0.0, Pairs()

    def accumulate(self, loss: float, grads: Mapping[Place, Pair]) -> None:
        """Add a text's loss and gradients to the sums. The caller has already multiplied the loss and the
        gradients by the text's weight. The accumulator can overwrite the arrays in `grads` later."""
        self.loss, self.pending = self.loss + loss, self.pending + 1
        for place, pair in grads.items():
            if place in self.pairs:
                for total, more in zip(self.pairs[place], pair, strict=True):
                    total += more
            else:
                self.pairs[place] = pair

    def apply(self, training: Training, lr: float, clip: float, pause: Pause = lambda: None) -> float:
        """Make one optimiser step with the sums, and return the loss. Raises NotFinite, and changes nothing,
        if a sum is not finite.

        lr: the learning rate; clip: the maximum norm of the gradients
        pause: a function that can raise an exception to stop; in this case, weights and sums stay unchanged
        """
        return self.apply_with_ewc(training, lr, clip, (0.0, {}), pause)

    def apply_with_ewc(
        self, training: Training, lr: float, clip: float, penalty: Penalty, pause: Pause = lambda: None
    ) -> float:
        """Add a penalty and its gradient to the sums, then make one optimiser step as `apply` does. The
        penalty grows with the changes of weights on which earlier tasks depend (sona/optional/ewc.py)."""
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
