"""The layers below the head, as a learner has them: which are moved, their gradients, what was measured."""

from dataclasses import dataclass

import numpy as np

from ...backends.base import Backend
from ...lora.base_lora import BaseLoRA
from ...lora.layer_lora import BodyLoRA, joined
from ...lora.targets import parse
from ...models.model import Model
from ...store import ReplyRow, Store
from .. import instant
from ..kl_probe import Neutral
from ..state import State
from ..trace import Gradient, Trace
from . import layer_update
from .layer_gradients import Pause, Reader


@dataclass(frozen=True)
class Seen:
    """The neutral text as it was read under a base with this body, whose curvature is what was found."""

    body: BodyLoRA
    neutral: Neutral


class Below:
    """What a learner needs to move more than the head. Where it does not, nothing is ever built or read."""

    def __init__(self, store: Store, model: Model, backend: Backend, targets: str):
        self.targets = parse(targets, model.config.n_layers)
        self.reader = Reader(store, model, backend)
        self.seen: Seen | None = None
        self._fresh: BodyLoRA | None = None
        self._unasked: tuple[BodyLoRA | None, np.ndarray | None] = (None, None)
        self._joined: tuple[BaseLoRA | None, BodyLoRA | None, BaseLoRA | None] = (None, None, None)

    # -- what the backend runs -----------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self.seen.neutral.nbytes if self.seen else 0

    def change(self, base: BaseLoRA | None, body: BodyLoRA | None) -> BaseLoRA | None:
        """Both as one; the same object for the same two, for caches belong to it."""
        if self._joined[0] is not base or self._joined[1] is not body:
            self._joined = base, body, joined(base, body)
        return self._joined[2]

    def tried(self, base: BaseLoRA | None, body: BodyLoRA | None) -> BaseLoRA | None:
        """The same for a moment: what is in use stays known."""
        known = self._joined[0] is base and self._joined[1] is body
        return self._joined[2] if known else joined(base, body)

    def on(self, base: BaseLoRA | None, lora: BaseLoRA | None) -> bool:
        """Is `lora` the base, or the newest change that was made with it?"""
        return lora is base or (self._joined[0] is base and self._joined[2] is lora)

    # -- before a rating -----------------------------------------------------------------------------

    def prepare(self, state: State) -> None:
        """What the next rating would have to compute first."""
        body = state.body
        if body is not None and self.targets.places and self._unasked[0] is not body:
            self._unasked = body, layer_update.unasked(body, self.targets)

    def wanted(self, state: State) -> bool:
        """Does a rating need anything of the layers?"""
        return bool(self.targets.places) or state.body is not None

    def read(
        self,
        base: BaseLoRA | None,
        state: State,
        drawn: BodyLoRA | None,
        reply: ReplyRow,
        trace: Trace,
        pause: Pause | None = None,
    ) -> bool:
        """Take what a rating needs of the reply, but what its trace has already; was anything taken?

        drawn: the body that was in force when the trace was taken.
        """
        taken = False
        if self.targets.places:
            body = self._body(state, pause)
            if trace.body is None or trace.body.frame != body.frame:
                trace.body, taken = self.reader.gradient(base, body, state.micro, reply, pause), True
                trace.carried = along(trace.body, body if drawn is state.body else drawn)
        if trace.base_logprob is None and drawn is not None and drawn.moves:
            trace.base_logprob, taken = self.reader.logprob(base, reply, pause), True
        return taken

    def beyond(self, trace: Trace, state: State) -> float:
        """What the state's body adds to the reply's mean log-probability per token beyond the one under which
        the trace was taken, to first order, nats."""
        if trace.body is None:
            return 0.0
        return along(trace.body, self._body(state) if self.targets.places else state.body) - trace.carried

    def _body(self, state: State, pause: Pause | None = None) -> BodyLoRA:
        """The state's body, with places that no rating has moved yet."""
        body = state.body
        missing = [p for p in self.targets.places if body is None or p not in body.places]
        if not missing:
            assert body is not None
            return body
        if self._fresh is None or list(self._fresh.places) != missing:
            self._fresh = self.reader.fresh(missing, pause)
        return body.extended(self._fresh) if body else self._fresh

    # -- a rating ------------------------------------------------------------------------------------

    def limit(self, ground: Neutral) -> layer_update.Limit:
        """ground: the neutral text under the base alone."""
        return layer_update.Limit.beside(ground, self.targets)

    def moved(self, state: State, trace: Trace, weight: float, ground: Neutral) -> BodyLoRA | None:
        """The body after a rating."""
        if trace.body is None or not weight or not self.targets.places:
            return state.body
        kept = instant.remembered(instant.turned(state.micro.trend, weight, trace.log_ratio))
        body = self._body(state)
        if self.seen is not None:
            body = body.changed(curvature=self.seen.body.curvature)
        known, beyond = self._unasked
        beyond = beyond if known is not None and known is state.body else None
        return layer_update.update(body, trace.body, weight, kept, self.targets, self.limit(ground), beyond)

    def without(self, state: State, origin: State, pushed: State, ground: Neutral) -> BodyLoRA | None:
        """The body less what the rating from `origin` to `pushed` did to it."""
        if state.body is None or pushed.body is None:
            return state.body
        return layer_update.without(state.body, origin.body, pushed.body, self.targets, self.limit(ground))

    # -- the guard -----------------------------------------------------------------------------------

    def knows(self, body: BodyLoRA | None) -> bool:
        """Was the neutral text read under this body last, or need it not be?"""
        return body is None or not body.moves or bool(self.seen and self.seen.body.lora_b is body.lora_b)

    def note(self, body: BodyLoRA, ground: Neutral, under: Neutral) -> tuple[BodyLoRA, float]:
        """Remember the neutral text as it is read under the body. -> the body with the curvature found, and
        how many times its limit it uses."""
        limit = self.limit(ground)
        known = layer_update.recalibrated(body, ground, under, limit)
        self.seen = Seen(known, under)
        return known, layer_update.estimated(known) / limit.kl

    def further(self, body: BodyLoRA | None) -> float:
        """How much further from the frozen model than the body that was seen last, by the estimate, nats."""
        return layer_update.estimated(body) - layer_update.estimated(self.seen.body if self.seen else None)


def along(gradient: Gradient, body: BodyLoRA | None) -> float:
    """What the body adds to the mean log-probability per token of the gradient's reply, to first order."""
    if body is None or gradient.frame != body.frame:
        return 0.0
    return float(np.dot(gradient.values, body.lora_b)) / gradient.tokens
