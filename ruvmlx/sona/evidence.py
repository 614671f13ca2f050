"""This module adds pieces of evidence to an adapter's sums, and computes the adapter's weights from the sums.
A piece of evidence is one rated reply or two compared replies (instant.py).

    evidence = EvidenceAccumulator(adapter, probe)
    evidence.accumulate(pushes)          # add a piece; `pending` is the number of pieces
    update = evidence.apply(kl)          # one update of the weights by all pieces; then `pending` is 0
    update = evidence.apply_with_ewc(kept, 1.0, kl)
    evidence.reset()                     # discard the pieces without an update

The sums G, S and L in the MicroLoRA are the state of this accumulator. A rating is one piece and one update.
A batch of ratings (rating_batch.py) is several pieces and one update. The background loop has the same
functions for its gradients (training/accumulator.py).

`apply_with_ewc` is elastic weight consolidation (EWC, Kirkpatrick et al. 2017) in the coordinates theta of
instant.py. theta_0 are the weights that an earlier version had learned, and L_0 is their Fisher information.
The penalty strength / 2 * sum L_0 (theta - theta_0)^2 has a gradient that is linear in theta, as that of the
evidence. So the sums take it up, and theta goes to theta_0 as the strength grows (step: that of instant.py):

    G += strength * L_0 * theta_0 / step      L += strength * L_0
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels import micro as kernels
from ..kernels.micro import NotFinite
from ..kernels.rating import Push
from ..lora import MicroLoRA
from . import instant
from .instant import ReplyPush, UncappedUpdate, Update
from .kl_probe import KLProbe

Protect = tuple[MicroLoRA, float]  # (the version whose weights a penalty protects, strength of the penalty)


@dataclass(frozen=True)
class EvidencePiece:
    """One piece of evidence, for a MicroLoRA of rank r, A movable tokens and k features.

    gradient, information: [r, A + k], the gradient of the log-probability, and the Fisher information
    weight: the strength of the piece
    kept: the factor, 0 to 1, of all earlier evidence
    """

    gradient: np.ndarray
    information: np.ndarray
    weight: float
    kept: float

    def added_to(self, sums: np.ndarray) -> np.ndarray:
        """Return the sums G, S and L [3, r, A + k] with this piece."""
        return kernels.evidence_add(sums, self.gradient, self.information, self.weight, self.kept)


class EvidenceAccumulator:
    """The pieces of evidence that were added to an adapter since the last update of its weights.

    adapter: the adapter with the weights of the last update
    pending: the number of pieces since that update
    trend: the adapter's trend (instant.py) with these pieces
    """

    def __init__(self, adapter: MicroLoRA, probe: KLProbe):
        self.adapter, self._probe = adapter, probe
        self.reset()

    def reset(self) -> None:
        """Discard the pieces without an update of the weights."""
        self.pending, self.trend = 0, self.adapter.trend
        # The newest piece is kept apart, because one kernel adds it and computes the weights.
        self._newest: EvidencePiece | None = None
        self._older = instant.stored_evidence(self.adapter, self._probe)
        self._beside, self._covered = np.zeros(0, np.float32), True

    @property
    def sums(self) -> np.ndarray:
        """The sums G, S and L [3, r, A + k] with all pieces."""
        return self._older if self._newest is None else self._newest.added_to(self._older)

    def accumulate(self, pushes: Sequence[ReplyPush]) -> None:
        """Add one piece of evidence. Pushes with a weight of 0 are left out; without any other push, nothing
        is added.

        pushes: a ReplyPush for each reply, with the statistics of the reply's trace under `adapter`

        Raises NotFinite, and adds nothing, if a weight or a gradient is not finite.
        """
        given = [push for push in pushes if push.weight != 0]
        if not given:
            return
        trend = self.trend
        for push in given:
            instant.require_weight(push.weight)
            if not push.stats.finite:
                raise NotFinite(instant.BROKEN)
            trend = instant.next_trend(trend, push.weight, push.log_ratio)
        older = self.sums
        self._newest = EvidencePiece(
            *_evidence_of(given, older, self._probe), instant.retention_factor(trend)
        )
        self._older, self.trend, self.pending = older, trend, self.pending + 1
        self._beside, self._covered = given[0].stats.beside, given[0].stats.covered

    def apply(self, kl: float = 0.0, reserve: float = 0.0, taste: np.ndarray | None = None) -> Update | None:
        """Compute the weights from all evidence. Return the update; None if no piece is pending. `adapter` is
        then the new adapter, and `pending` is 0.

        kl: the adapter's KL before the update, nats per token
        reserve: the part of the KL cap that the layer LoRA uses
        taste: [A], the taste model's new part of lora_b; None to keep the adapter's part

        Raises NotFinite, and changes nothing, if the update is not finite.
        """
        if self._newest is None:
            return None
        return self._compute(self._older, self._newest, kl, reserve, taste)

    def apply_with_ewc(
        self,
        kept: MicroLoRA,
        strength: float,
        kl: float = 0.0,
        reserve: float = 0.0,
        taste: np.ndarray | None = None,
    ) -> Update | None:
        """Add the EWC penalty (module docstring) to the sums, then update the weights as `apply` does.
        Without a pending piece, nothing happens.

        kept: the earlier version of the adapter whose weights the penalty protects; its evidence has the
            shape of this adapter's evidence
        strength: the factor of the penalty, 0 or more; 0 is `apply`
        """
        if self._newest is None or strength == 0:
            return self.apply(kl, reserve, taste)
        earlier = instant.stored_evidence(kept, self._probe)
        sums = protected_sums(self.sums, earlier, strength, self._probe)
        nothing = np.zeros(sums.shape[1:], np.float32)
        return self._compute(sums, EvidencePiece(nothing, nothing, 0.0, 1.0), kl, reserve, taste)

    def _compute(
        self, older: np.ndarray, newest: EvidencePiece, kl: float, reserve: float, taste: np.ndarray | None
    ) -> Update:
        old, probe = self.adapter, self._probe
        evidence, block = probe.coordinates.solver.add_rating(
            older, newest.gradient, newest.information, self._beside, newest.weight, newest.kept,
            instant.RULE, probe.answer_contexts(old), old.scale, instant.MAX_MAGNITUDE,
        )  # fmt: skip
        taste = old.taste if taste is None else taste
        whole = UncappedUpdate(
            old, instant.add_taste(block, taste), evidence, self._covered, self.trend, taste
        )
        limit = min(instant.KL_CAP, kl + self.pending * instant.PER_RATING) - reserve
        update = instant.cap_update(whole, probe, limit)
        self.adapter = update.adapter
        self.reset()
        return update


def update_by(
    adapter: MicroLoRA,
    pieces: Sequence[Sequence[ReplyPush]],
    probe: KLProbe,
    kl: float = 0.0,
    reserve: float = 0.0,
    taste: np.ndarray | None = None,
    protect: Protect | None = None,
) -> Update | None:
    """Return the adapter after one update by some pieces of evidence; None if the weights of all replies are
    0. protect: the earlier weights that an EWC penalty protects; None: no penalty. The other parameters, and
    the errors, are those of EvidenceAccumulator."""
    evidence = EvidenceAccumulator(adapter, probe)
    for pushes in pieces:
        evidence.accumulate(pushes)
    if protect is None:
        return evidence.apply(kl, reserve, taste)
    return evidence.apply_with_ewc(*protect, kl, reserve, taste)


def theta_of(evidence: np.ndarray, probe: KLProbe) -> np.ndarray:
    """Return theta [r, A + k] (instant.py) of the evidence [3, r, A + k]: the weights in the coordinates of
    coordinates.py, at a gain of 1 and without held_back."""
    theta = np.empty(evidence.shape[1:], np.float32)
    for push, part in _parts(probe):
        kernels.evidence_push(evidence, probe.precision, push.step, push.agree, push.noise, part, theta)
    return theta


def protected_sums(now: np.ndarray, kept: np.ndarray, strength: float, probe: KLProbe) -> np.ndarray:
    """Return the sums `now` [3, r, A + k] with the EWC penalty (module docstring) of this strength, which
    protects the weights that follow from the sums `kept` [3, r, A + k]."""
    found, theta = now.copy(), theta_of(kept, probe)
    for push, part in _parts(probe):
        theta[:, part] /= np.float32(push.step)
    pull = np.float32(strength) * kept[2]
    found[0] += pull * theta
    found[2] += pull
    return found


def _parts(probe: KLProbe) -> list[tuple[Push, slice]]:
    """Return the rules of the movable tokens and of the features, each with the columns of its weights. A
    probe without features has only the first."""
    tokens, columns = probe.tokens.size, probe.precision.size
    parts = [(instant.TOKEN, slice(0, tokens)), (instant.FEATURE, slice(tokens, columns))]
    return [(push, part) for push, part in parts if part.start < part.stop]


def _evidence_of(
    given: Sequence[ReplyPush], before: np.ndarray, probe: KLProbe
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return (gradient, Fisher information, weight) of one piece of evidence: one reply, or two replies to
    one question. The parts of the gradients that two replies share cancel in the sum, so they add no noise to
    S, the sum of squares."""
    gradients = [instant.gradient_of(push.stats, push.weight, before, probe) for push in given]
    if len(given) == 1:
        return gradients[0], given[0].stats.information, given[0].weight
    gradient = sum(np.float32(push.weight) * g for push, g in zip(given, gradients, strict=True))
    information = sum(np.float32(abs(push.weight)) * push.stats.information for push in given)
    return np.asarray(gradient), np.asarray(information), 1.0
