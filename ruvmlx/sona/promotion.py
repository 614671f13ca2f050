"""The promotion test decides whether a trained base LoRA replaces the base in use.

A base is promoted only if held-out ratings prefer it and it changes plain text no more than the limits allow.
All measurements use the backend that will run the base.
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

PPL_RISE = 0.02  # the allowed rise of perplexity on plain text, compared with the original model
ROUNDED = 1e-4  # the allowed rise of the held-out loss if the MicroLoRA is only merged into the base
ROOM = 0.8  # the maximum share of the KL cap that a base uses; the rest is for later ratings
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)  # shares of the way from the adapter in use to the trained adapter

Candidate = Callable[[float], tuple[BaseLoRA, MicroLoRA]]  # a function: share -> (base, MicroLoRA)


@dataclass(frozen=True)
class ModelDrift:
    """The distance of an adapter from the original model. kl: the KL to the original model, nats per token.
    rise: the rise of the reference text's mean negative log-likelihood (nats).
    """

    kl: float
    rise: float

    @property
    def ppl_change(self) -> float:
        return math.expm1(self.rise)

    @property
    def limit(self) -> float:
        """The maximum rise that a candidate may have. This object must be the drift of the adapter in use.

        If the adapter in use already exceeds PPL_RISE, a candidate may have the same rise.
        """
        return max(math.log1p(PPL_RISE), self.rise)

    def is_within(self, now: "ModelDrift") -> bool:
        return self.kl <= max(ROOM * KL_CAP, now.kl) and self.rise <= now.limit

    @property
    def report(self) -> dict[str, float]:
        return {"kl": self.kl, "ppl_change": self.ppl_change}


@dataclass(frozen=True)
class TriedCandidate:
    """A candidate that was measured.

    name: the key of its measurements
    share: the share of the training
    ground: the candidate's base and the KL probe under this base
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
    """The result of a promotion test. ground: the measured base, and the KL probe under this base."""

    promoted: bool
    ground: ProbedBase
    micro: MicroLoRA
    kl: float
    report: dict[str, Any]


class PromotionTest:
    """A test that measures adapters on held-out ratings and the reference text. The last measured base stays
    in the backend.

    If `pause` raises an exception, the next call reuses all finished measurements.
    """

    def __init__(self, learner: Learner, buffer: Buffer, pause: Callable[[], None]):
        self._learner, self.buffer, self.pause = learner, buffer, pause
        self._backend = learner.backend
        self._frozen: dict[str, float] = {}
        self._known: dict[tuple[str, TrainingText], float] = {}  # log-probabilities by (name, text)
        self._ground: tuple[str, ProbedBase] | None = None  # the name and the base that were measured last
        self._version = -1  # the version in use when `_known` and `_ground` were measured

    def frozen_logprobs(self, examples: Sequence[RatedExample], known: dict[str, float]) -> None:
        """Add each reply's mean log-probability in the original model to `known`, by reply id."""
        missing = [e for e in examples if e.reply_id not in known]
        if missing:
            with self._learner.active.install_for(None):
                self.pause()
                for example in missing:
                    known[example.reply_id] = self._logprob(example.text, None)

    def judge(self, candidate: Candidate, trained: bool = True) -> PromotionResult:
        """Find the largest share of the training within the limits, then measure the held-out ratings.

        trained: False if the MicroLoRA was only merged into the base; then the ratings need not prefer the
        result
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
        """Try smaller and smaller shares of the training, until one is within the limits.

        If the KL of the last candidate to the original model is still too large, the whole base is scaled
        down.
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
            if not last.found.kl > ROOM * KL_CAP:  # this is true for NaN, which `objection` refuses
                break
            base = last.base.shrunk(0.97 * math.sqrt(ROOM * KL_CAP / last.found.kl))
            tries.append(self._try(f"try {len(tries)}", last.share, base, last.micro, plain))
        return tries

    def _try(self, name: str, share: float, base: BaseLoRA, micro: MicroLoRA, plain: float) -> TriedCandidate:
        ground = self._probed_base(name, base)
        found = ModelDrift(ground.probe.kl(micro), self._nll(name, micro) - plain)
        return TriedCandidate(name, share, ground, micro, found)

    def _probed_base(self, name: str, base: BaseLoRA) -> ProbedBase:
        """Return the base with its KL probe, measured once per name. The base stays in the backend."""
        if self._ground is None or self._ground[0] != name:
            self._ground = name, self._learner.active.probe_base(base, self.pause)
        ground = self._ground[1]
        if self._backend.lora is not ground.lora:
            self._backend.set_lora(ground.lora)
        self.pause()
        return ground

    def _loss(self, name: str, micro: MicroLoRA) -> float:
        """Return DRO's loss on the held-out ratings: the mean of (r - V - tau * rho)^2 / 2, where a constant
        is added to V that makes the loss minimal.

        DRO fits V, too. Training makes all old replies equally less likely, which is not a matter of taste.
        The fitted constant removes this effect.
        """
        held = self.buffer.held_out
        rho = [self._cached_logprob(name, e.text, micro) - self._frozen[e.reply_id] for e in held]
        missed = np.array([e.reward - e.value for e in held]) - TAU * np.array(rho)
        return float(0.5 * np.var(missed))

    def _nll(self, name: str, micro: MicroLoRA | None) -> float:
        """Return the mean negative log-likelihood of the reference text, answers and prose (nats per
        token)."""
        texts = self.buffer.reference
        total = sum(self._cached_logprob(name, t, micro) * t.answer_tokens for t in texts)
        return -total / sum(t.answer_tokens for t in texts)

    def _cached_logprob(self, name: str, text: TrainingText, micro: MicroLoRA | None) -> float:
        """Return the result of `_logprob`, cached by name and text."""
        if (name, text) not in self._known:
            self._known[name, text] = self._logprob(text, micro)
        return self._known[name, text]

    def _logprob(self, text: TrainingText, micro: MicroLoRA | None) -> float:
        """Return the mean log-probability per token of the text's answer, under the backend's base."""
        hidden = self._backend.hidden_states(text.tokens[:-1], self.pause)[text.first - 1 :]
        said, total, at = np.asarray(text.tokens[text.first :], np.int32), 0.0, 0
        for part, logits in adapted_logits(micro, hidden, self._backend.head):
            total += float(kernels.logprobs(logits, said[at : at + len(part)]).sum())
            at += len(part)
            self.pause()
        return total / text.answer_tokens


def objection(before: float, after: float, found: ModelDrift, now: ModelDrift, rounded: float = 0.0) -> str:
    """Apply the rule of promotion. Return why a candidate is refused; "" if it is promoted. rounded: a rise
    of the loss that can be rounding alone; if 0, the loss must fall."""
    if not all(math.isfinite(x) for x in (before, after, found.kl, found.rise)):
        return "its measurements are not finite"
    if found.kl > KL_CAP:
        return f"KL to the untouched model is {found.kl:.3f}; at most {KL_CAP} is allowed"
    if found.rise > now.limit + 1e-6:
        return f"perplexity on plain text rises by {found.ppl_change:.1%}; {PPL_RISE:.0%} is allowed"
    if not after < before + rounded:
        return f"held-out ratings do not prefer it: loss {before:.4f} -> {after:.4f}"
    return ""
