"""The guard of the layers below the head that measures: between two replies, what is too much is taken back.

A rating is held to its caps by an estimate (body.py). Here the neutral text is read under the change itself.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from ...lora.layer_lora import BodyLoRA, packed
from ...store import HeadMoved
from .. import instant
from .layer_adapter import Below
from .layer_gradients import Pause

if TYPE_CHECKING:
    from ..learner import Learner

LOOKS = 3  # at the neutral text, while a body is too much for it
SLACK = 1.05  # of the body's share of a cap, before it is scaled back


def restrain(learner: "Learner", below: Below, pause: Pause | None = None) -> None:
    """Read the neutral text under a body that has changed. While it is further from the frozen model than it
    may be, it is scaled back, more and more: a version that no rating made. pause: as `Learner.settle`'s."""
    for refusals in range(LOOKS):
        body = learner.body
        if body is None or below.knows(body):
            return
        learner.stand()
        lora = learner.backend.lora
        assert lora is not None
        try:
            under = learner.ground(lora, pause).neutral
        finally:
            learner.stand()
        known, beyond = below.note(body, learner.standing.neutral, under)
        if beyond > SLACK:
            share = beyond ** (-(2**refusals) / 2) if refusals < LOOKS - 1 else 0.0
            _hold_back(learner, below, known.shrunk(share))


def _hold_back(learner: "Learner", below: Below, body: BodyLoRA) -> None:
    """Commit the body, less than what is in use, and a head that is within the caps beside it."""
    state, neutral = learner.state, learner.neutral
    adapter = instant.recapped(state.micro, neutral).adapter if below.targets.head else state.micro
    kl = max(0.0, neutral.kl(adapter) + below.further(body))
    with suppress(HeadMoved):  # who was quicker will be looked at next time
        learner.ledger.adjust(state.version, packed(adapter, body), kl, adapter.norm)
    learner.sync()
