"""This module is the optional layer part, which lets ratings change layers below the output head. The part
holds the target matrices, the gradients, the updates and the measured KL of the layer LoRA."""

from dataclasses import dataclass

import numpy as np

from ...backends.base import Backend
from ...lora.base_lora import BaseLoRA
from ...lora.layer_lora import LayerLoRA, combine_loras
from ...lora.targets import parse
from ...models.config.model import Model
from ...pausing import Pause
from ...store import ReplyRow, Store
from .. import instant
from ..kl_probe import KLProbe
from ..state import LearnerState
from ..trace import LayerGradient, Trace, Weighed
from . import layer_update
from .layer_gradients import LayerGradients


@dataclass(frozen=True)
class ProbedLayers:
    """A layer LoRA with its measured curvature (measured KL divided by LayerLoRA.energy). probe: the KL probe
    that was measured under the base LoRA and this layer LoRA."""

    layer_lora: LayerLoRA
    probe: KLProbe


class LayerAdapter:
    """The implementation of the protocols LayerPart and LayerInstaller. If ratings change only the output
    head, and the adapter has no layer LoRA, the functions of this object change nothing."""

    def __init__(self, store: Store, model: Model, backend: Backend, targets: str, rank: int = 1):
        """targets: the matrices that ratings change (lora/targets.py). rank: the rank of the change of each
        matrix below the head that begins to change, 1 or 2."""
        self.targets = parse(targets, model.shape)
        if self.targets.places:
            _ = model.config  # raises UnsupportedModel if ruvmlx itself has no decoder for the model
        self.gradients = LayerGradients(store, model, backend, rank)
        self.measured: ProbedLayers | None = None
        self._fresh: LayerLoRA | None = None
        self._unasked: tuple[LayerLoRA | None, np.ndarray | None] = (None, None)
        self._combined: tuple[BaseLoRA | None, LayerLoRA | None, BaseLoRA | None] = (None, None, None)

    def release(self) -> None:
        """Free the graph that computes gradients."""
        self.gradients.close()

    # -- the LoRA in the backend ---------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self.measured.probe.nbytes if self.measured else 0

    @property
    def probe(self) -> KLProbe | None:
        return self.measured.probe if self.measured else None

    def forget_probe(self) -> None:
        self.measured = None

    def combined_lora(self, base: BaseLoRA | None, layer_lora: LayerLoRA | None) -> BaseLoRA | None:
        if self._combined[0] is not base or self._combined[1] is not layer_lora:
            self._combined = base, layer_lora, combine_loras(base, layer_lora)
        return self._combined[2]

    def combined_once(self, base: BaseLoRA | None, layer_lora: LayerLoRA | None) -> BaseLoRA | None:
        known = self._combined[0] is base and self._combined[1] is layer_lora
        return self._combined[2] if known else combine_loras(base, layer_lora)

    def has_base(self, lora: BaseLoRA | None, base: BaseLoRA | None) -> bool:
        return lora is base or (self._combined[0] is base and self._combined[2] is lora)

    # -- before a rating -----------------------------------------------------------------------------

    def prepare(self, state: LearnerState) -> None:
        """Compute now, and keep, what the next rating needs (`residual_b`), so that the rating need not wait
        for it."""
        layer_lora = state.layer_lora
        if layer_lora is not None and self.targets.places and self._unasked[0] is not layer_lora:
            self._unasked = layer_lora, layer_update.residual_b(layer_lora, self.targets)

    def needs_gradient(self, state: LearnerState) -> bool:
        return bool(self.targets.places) or state.layer_lora is not None

    def read(
        self,
        base: BaseLoRA | None,
        state: LearnerState,
        drawn: LayerLoRA | None,
        reply: ReplyRow,
        trace: Trace,
        pause: Pause | None = None,
    ) -> bool:
        """Add the layer gradient, and the log-probability under the base LoRA alone, to the trace if the
        trace needs them and has none. Return True if a value was added.

        drawn: the layer LoRA that was in use when the trace was recorded
        """
        added = False
        if self.targets.places:
            layers = self.extend_layers(state, pause)
            if trace.layer_gradient is None or trace.layer_gradient.frame != layers.frame:
                gradient = self.gradients.gradient(base, layers, state.micro, reply, pause)
                trace.layer_gradient, added = gradient, True
                trace.carried = mean_logprob_change(gradient, layers if drawn is state.layer_lora else drawn)
        if trace.base_logprob is None and drawn is not None and drawn.moves:
            trace.base_logprob, added = self.gradients.logprob(base, reply, pause), True
        return added

    def logprob_shift(self, trace: Trace, state: LearnerState) -> float:
        if trace.layer_gradient is None:
            return 0.0
        layers = self.extend_layers(state) if self.targets.places else state.layer_lora
        return mean_logprob_change(trace.layer_gradient, layers) - trace.carried

    def extend_layers(self, state: LearnerState, pause: Pause | None = None) -> LayerLoRA:
        """Return the state's layer LoRA, extended by the target matrices that no rating has changed yet."""
        layers = state.layer_lora
        missing = [p for p in self.targets.places if layers is None or p not in layers.places]
        if not missing:
            assert layers is not None
            return layers
        if self._fresh is None or list(dict.fromkeys(self._fresh.places)) != missing:
            self._fresh = self.gradients.fresh(missing, pause)
        return layers.with_places_of(self._fresh) if layers else self._fresh

    # -- a rating ------------------------------------------------------------------------------------

    def limit(self, base: KLProbe) -> layer_update.LayerLimit:
        """Return the maximum KL, and the maximum rise of the prose's negative log-likelihood, that the layer
        LoRA can add. base: the KL probe under the base LoRA alone."""
        return layer_update.LayerLimit.above(base, self.targets)

    def update(self, state: LearnerState, piece: Weighed, base: KLProbe) -> LayerLoRA | None:
        given = [(trace, weight) for trace, weight in piece if trace.layer_gradient is not None and weight]
        if not given or not self.targets.places:
            return state.layer_lora
        trend = state.micro.trend
        for trace, weight in given:
            trend = instant.next_trend(trend, weight, trace.log_ratio)
        kept, (gradient, weight) = instant.retention_factor(trend), _gradient_of(given)
        layers = self.extend_layers(state)
        if self.measured is not None:
            layers = layers.replace_fields(curvature=self.measured.layer_lora.curvature)
        known, unasked = self._unasked
        unasked = unasked if known is not None and known is state.layer_lora else None
        return layer_update.update(layers, gradient, weight, kept, self.targets, self.limit(base), unasked)

    def layers_without(
        self, state: LearnerState, before: LearnerState, after: LearnerState, base: KLProbe
    ) -> LayerLoRA | None:
        layers, old, new = state.layer_lora, before.layer_lora, after.layer_lora
        if layers is None or new is None:
            return layers
        return layer_update.without_rating(layers, old, new, self.targets, self.limit(base))

    # -- the KL guard --------------------------------------------------------------------------------

    def knows(self, layer_lora: LayerLoRA) -> bool:
        """Return True if the KL under this layer LoRA is known: from the last measurement, or because the
        layer LoRA changes nothing."""
        known = self.measured is not None and self.measured.layer_lora.lora_b is layer_lora.lora_b
        return known or not layer_lora.moves

    def note(self, layer_lora: LayerLoRA, base: KLProbe, under: KLProbe) -> tuple[LayerLoRA, float]:
        """Keep a newly measured KL probe in memory. Return the layer LoRA with its measured curvature, and
        its KL by this curvature (`recalibrate`) divided by its KL limit.

        base: the KL probe under the base LoRA alone
        under: the KL probe under the base LoRA and the layer LoRA
        """
        limit = self.limit(base)
        known = layer_update.recalibrate(layer_lora, base, under, limit)
        self.measured = ProbedLayers(known, under)
        return known, layer_update.estimated_kl(known) / limit.kl

    def added_kl(self, layer_lora: LayerLoRA | None) -> float:
        measured = self.measured.layer_lora if self.measured else None
        return layer_update.estimated_kl(layer_lora) - layer_update.estimated_kl(measured)


def _gradient_of(given: Weighed) -> tuple[LayerGradient, float]:
    """Return the gradient and the weight of one piece of evidence. A piece of evidence is one rated reply, or
    two compared replies to one question. The sum cancels the part that the gradients of two replies share, as
    in evidence.py."""
    found = [(trace.layer_gradient, weight) for trace, weight in given if trace.layer_gradient is not None]
    if len(found) == 1:
        return found[0]
    values = np.sum([np.float32(weight) * gradient.values for gradient, weight in found], axis=0)
    tokens = sum(abs(weight) * gradient.tokens for gradient, weight in found)
    return LayerGradient(found[0][0].frame, values, tokens), 1.0


def mean_logprob_change(gradient: LayerGradient, layer_lora: LayerLoRA | None) -> float:
    """Return a first-order estimate of the change that the layer LoRA makes to the reply's mean
    log-probability (nats per token)."""
    if layer_lora is None or gradient.frame != layer_lora.frame:
        return 0.0
    return float(np.dot(gradient.values, layer_lora.lora_b)) / gradient.tokens
