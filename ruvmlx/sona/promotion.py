"""The promotion test decides whether a newly trained base LoRA replaces the base LoRA in use.

A trained base LoRA is promoted only if held-out ratings (ratings that the training did not use) prefer the
base LoRA, and if the base LoRA changes the model's predictions on the reference text no more than the limits
allow. All measurements use the backend that will run the base LoRA.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernels import micro as kernels
from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA
from .instant import KL_CAP
from .learner import Learner
from .objective import TAU
from .replay import Buffer, RatedExample, TrainingText
from .state import ProbedBase
from .trace import adapted_logits

PPL_RISE = 0.02  # the allowed rise, 2%, of perplexity on the reference text above the original model's
ROUNDED = 1e-4  # the allowed rise of the held-out loss if the MicroLoRA is only merged into the base
ROOM = 0.8  # the share of KL_CAP below which the test tries to keep a new base LoRA; ratings use the rest
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)  # the shares of the trained change of weights that the test tries

# A candidate is a function f: f(share) keeps this share of the trained change, and returns (base LoRA,
# MicroLoRA).
Candidate = Callable[[float], tuple[BaseLoRA, MicroLoRA]]


@dataclass(frozen=True)
class ModelDrift:
    """The distance of an adapter from the original model on the reference text (reference_text.py).

    kl: the KL divergence from the original model, nats per token
    rise: the rise of the reference text's mean negative log-likelihood (nats)
    """

    kl: float
    rise: float

    @property
    def ppl_change(self) -> float:
        return math.expm1(self.rise)

    @property
    def limit(self) -> float:
        """The maximum rise (ModelDrift.rise) of a candidate if this object is the distance of the adapter in
        use. If the adapter in use already exceeds PPL_RISE, a candidate can have the same rise as this
        adapter."""
        return max(math.log1p(PPL_RISE), self.rise)

    def is_within(self, now: "ModelDrift") -> bool:
        return self.kl <= max(ROOM * KL_CAP, now.kl) and self.rise <= now.limit

    @property
    def report(self) -> dict[str, float]:
        return {"kl": self.kl, "ppl_change": self.ppl_change}


@dataclass(frozen=True)
class TriedCandidate:
    """An adapter that the promotion test has measured.

    name: the name under which the test caches the adapter's measurements
    share: the share of the trained change of weights in this adapter
    ground: the adapter's base LoRA with the KL probe under it
    found: the measured distance from the original model
    """

    name: str
    share: float
    ground: ProbedBase
    micro: MicroLoRA
    found: ModelDrift

    @property
    def base(self) -> BaseLoRA:
        assert self.ground.lora is not None
        return self.ground.lora


@dataclass(frozen=True)
class PromotionResult:
    """The result of a promotion test. ground: the tested base LoRA with the KL probe under it. micro: the
    MicroLoRA that was tested with this base LoRA."""

    promoted: bool
    ground: ProbedBase
    micro: MicroLoRA
    kl: float
    report: dict[str, Any]


class PromotionTest:
    """A test that measures adapters on held-out ratings and on the reference text. The base LoRA that was
    measured last stays in the backend.

    If `pause` raises an exception, the next call reuses the finished log-probabilities and the last KL probe,
    unless the adapter version in use has changed.
    """

    def __init__(self, learner: Learner, buffer: Buffer, pause: Callable[[], None]):
        self._learner, self.buffer, self.pause = learner, buffer, pause
        self._backend = learner.backend
        self._frozen: dict[str, float] = {}
        # Log-probabilities. The key has two parts: the adapter's name, and a plain text or the id of a rated
        # reply.
        self._known: dict[tuple[str, TrainingText | str], float] = {}
        self._ground: tuple[str, ProbedBase] | None = None  # (name, base LoRA) of the last measurement
        self._version = -1  # the adapter version in use when `_known` and `_ground` were measured

    def frozen_logprobs(self, examples: Sequence[RatedExample], known: dict[str, float]) -> None:
        """Add the mean log-probability of each example's reply in the original model to `known`, which maps
        reply ids to log-probabilities."""
        missing = [e for e in examples if e.reply_id not in known]
        if missing:
            with self._learner.active.install_for(None):
                self.pause()
                for example in missing:
                    known[example.reply_id] = self._logprob(example.text, None)

    def judge(self, candidate: Candidate, trained: bool = True) -> PromotionResult:
        """Find the largest of SHARES of the trained change of weights that is within the limits of KL and
        perplexity (or else the smallest of SHARES), then test this share on held-out ratings.

        trained: False if the MicroLoRA was only merged into the base LoRA without training; the held-out
            ratings then need not prefer the result
        """
        learner = self._learner
        if learner.version != self._version:
            self._version, self._known, self._ground = learner.version, {}, None
        self.frozen_logprobs(self.buffer.held_out, self._frozen)
        with learner.active.install_for(None):
            plain = self._nll("untouched", None)
        before = ModelDrift(learner.state.kl, self._nll("in use", learner.micro) - plain)
        loss_before = self._loss("in use", learner.micro)
        tries = self._try_shares(candidate, before, plain)
        last = tries[-1]
        loss = self._loss(last.name, last.micro)
        reason = objection(loss_before, loss, last.found, before, 0.0 if trained else ROUNDED)
        facts = {
            "examples": len(self.buffer.train) + len(self.buffer.held_out),
            "held_out": len(self.buffer.held_out),
            "loss_before": loss_before,
            "loss_after": loss,
            "kl": last.found.kl,
            "ppl_change": last.found.ppl_change,
            "before": before.report,
            "tries": [{"share": t.share, "scale": t.base.scale, **t.found.report} for t in tries],
            "promoted": not reason,
            "reason": reason or f"held-out loss {loss_before:.4f} -> {loss:.4f}",
        }
        return PromotionResult(not reason, last.ground, last.micro, last.found.kl, facts)

    def _try_shares(self, candidate: Candidate, before: ModelDrift, plain: float) -> list[TriedCandidate]:
        """Measure smaller and smaller shares of the trained change until an adapter is within the limits.
        Return all measured adapters.

        If the KL of the last adapter to the original model is over ROOM * KL_CAP, scale its whole base LoRA
        down, at most twice.
        """
        tries: list[TriedCandidate] = []
        for share in SHARES:
            base, micro = candidate(share)
            self.pause()
            tries.append(self._try(f"try {len(tries)}", share, base, micro, plain))
            if tries[-1].found.is_within(before):
                break
        for _ in range(2):
            last = tries[-1]
            # the condition is also true for a KL of NaN, which `objection` refuses later
            if not last.found.kl > ROOM * KL_CAP:
                break
            base = last.base.shrunk(0.97 * math.sqrt(ROOM * KL_CAP / last.found.kl))
            tries.append(self._try(f"try {len(tries)}", last.share, base, last.micro, plain))
        return tries

    def _try(self, name: str, share: float, base: BaseLoRA, micro: MicroLoRA, plain: float) -> TriedCandidate:
        ground = self._probed_base(name, base)
        found = ModelDrift(ground.probe.kl(micro), self._nll(name, micro) - plain)
        return TriedCandidate(name, share, ground, micro, found)

    def _probed_base(self, name: str, base: BaseLoRA) -> ProbedBase:
        """Return a base LoRA with its KL probe, which is measured only if the base LoRA with this name was
        not measured last. The base LoRA stays in the backend."""
        if self._ground is None or self._ground[0] != name:
            self._ground = name, self._learner.active.probe_base(base, self.pause)
        ground = self._ground[1]
        if self._backend.lora is not ground.lora:
            self._backend.set_lora(ground.lora)
        self.pause()
        return ground

    def _loss(self, name: str, micro: MicroLoRA) -> float:
        """Return DRO's loss on the held-out ratings: the mean of (r - V - c - tau * rho)^2 / 2
        (objective.py). The constant c is the constant that makes the loss minimal.

        Training makes all replies of earlier models less likely by about the same log-ratio, which says
        nothing about the taste. The constant c removes this effect. DRO also chooses V so that the loss is
        minimal.
        """
        held = self.buffer.held_out
        rho = [self._cached_logprob(name, e, micro) - self._frozen[e.reply_id] for e in held]
        missed = np.array([e.reward - e.value for e in held]) - TAU * np.array(rho)
        return float(0.5 * np.var(missed))

    def _nll(self, name: str, micro: MicroLoRA | None) -> float:
        """Return the mean negative log-likelihood (nats per token) of the reference text: its answers and its
        prose."""
        texts = self.buffer.reference
        total = sum(self._cached_logprob(name, t, micro) * t.answer_tokens for t in texts)
        return -total / sum(t.answer_tokens for t in texts)

    def _cached_logprob(self, name: str, item: TrainingText | RatedExample, micro: MicroLoRA | None) -> float:
        """Return the result of `_logprob` for an adapter and a text, from the cache if possible. name: the
        adapter's name in the cache. item: a plain text, or an example with a text"""
        key = name, item.reply_id if isinstance(item, RatedExample) else item
        if key not in self._known:
            self._known[key] = self._logprob(item.text if isinstance(item, RatedExample) else item, micro)
        return self._known[key]

    def _logprob(self, text: TrainingText, micro: MicroLoRA | None) -> float:
        """Return the mean log-probability per token of the text's answer, under the backend's base LoRA and
        this MicroLoRA."""
        hidden = self._backend.hidden_states(text.tokens[:-1], self.pause)[text.first - 1 :]
        said, total, at = np.asarray(text.tokens[text.first :], np.int32), 0.0, 0
        for part, logits in adapted_logits(micro, hidden, self._backend.head):
            total += float(kernels.logprobs(logits, said[at : at + len(part)]).sum())
            at += len(part)
            self.pause()
        return total / text.answer_tokens


def objection(before: float, after: float, found: ModelDrift, now: ModelDrift, rounded: float = 0.0) -> str:
    """Return why the promotion test refuses an adapter; "" if it promotes the adapter.

    before, after: the loss on held-out ratings of the adapter in use, and of the tested adapter
    found, now: the distance from the original model of the tested adapter, and of the adapter in use
    rounded: the rise of the loss that is allowed, because it can come from rounding; if 0, the loss must fall
    """
    if not all(math.isfinite(x) for x in (before, after, found.kl, found.rise)):
        return "its measurements are not finite"
    if found.kl > KL_CAP:
        return f"KL to the untouched model is {found.kl:.3f}; at most {KL_CAP} is allowed"
    if found.rise > now.limit + 1e-6:
        return f"perplexity on plain text rises by {found.ppl_change:.1%}; {PPL_RISE:.0%} is allowed"
    if not after < before + rounded:
        return f"held-out ratings do not prefer it: loss {before:.4f} -> {after:.4f}"
    return ""
