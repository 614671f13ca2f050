"""This module defines the protocol of the layer part: the optional part that lets ratings change layers below
the output head.

The learner calls only the functions of this protocol. `wiring.py` passes the implementation
(optional/layer_adapter.py) to the learner.
"""

from collections.abc import Callable
from typing import Protocol

from ..lora.base_lora import BaseLoRA
from ..lora.layer_lora import LayerLoRA
from ..lora.targets import Targets
from ..pausing import Pause
from ..store import ReplyRow
from .active_adapter import ActiveAdapter
from .kl_probe import KLProbe
from .state import LearnerState
from .trace import Trace, Weighed

# A KL guard is a function that runs between replies: it measures the KL of a layer LoRA, and scales the layer
# LoRA down if the KL exceeds its limit (optional/layer_kl_guard.py).
LayerKLGuard = Callable[[ActiveAdapter, Pause | None], None]


class LayerPart(Protocol):
    """The layer part computes gradients, updates and the estimated KL of a LayerLoRA. In the functions of
    this protocol, `base` is the base LoRA in use, or the KL probe under that base LoRA."""

    targets: Targets

    def prepare(self, state: LearnerState) -> None:
        """Compute the values that ratings read from a cache, so that the next rating need not wait for
        them."""

    def needs_gradient(self, state: LearnerState) -> bool:
        """Return True if a rating needs the layer gradient: the gradient of the reply's log-probability by
        the weights of the layer LoRA."""

    def read(
        self,
        base: BaseLoRA | None,
        state: LearnerState,
        drawn: LayerLoRA | None,
        reply: ReplyRow,
        trace: Trace,
        pause: Pause | None = None,
    ) -> bool:
        """Add the layer gradient, and the log-probability under the base LoRA alone, to the trace if a rating
        needs them and the trace has none. Return True if a value was added."""

    def logprob_shift(self, trace: Trace, state: LearnerState) -> float:
        """Return the change of the reply's mean log-probability (nats) from the layer LoRA with which its
        trace was recorded to the layer LoRA of `state`. The returned change is a first-order estimate."""

    def update(self, state: LearnerState, piece: Weighed, base: KLProbe) -> LayerLoRA | None:
        """Return the layer LoRA after one rating or preference. piece: the traces and weights of its
        replies."""

    def layers_without(
        self, state: LearnerState, before: LearnerState, after: LearnerState, base: KLProbe
    ) -> LayerLoRA | None:
        """Return the layer LoRA of `state` without the effect of the rating that led from `before` to
        `after`, if this effect can still be computed."""

    def added_kl(self, layer_lora: LayerLoRA | None) -> float:
        """Return the estimated KL that this layer LoRA adds to the last measured KL (nats per token)."""

    def release(self) -> None:
        """Free the graph that computes layer gradients."""
