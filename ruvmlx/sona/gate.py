"""The gate: a trained base is used only if ratings that it has not seen say that it is better, and plain text
that it is still the same model. All of it is measured in the backend that will run it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernels import micro as kernels
from ..lora import MicroLoRA
from ..lora.base import BaseLoRA
from .instant import KL_CAP
from .learner import Learner
from .objective import TAU
from .replay import Buffer, Example, Text
from .trace import adapted_logits

PPL_RISE = 0.02  # of plain text, over the untouched model's
ROOM = 0.8  # share of the KL cap that a base may use: the rest is for the ratings to come
ROUNDS = 5


@dataclass(frozen=True)
class Verdict:
    promoted: bool
    base: BaseLoRA  # shrunk, if it had to be
    kl: float
    report: dict[str, Any]


class Gate:
    """Measures adapters on held-out ratings and neutral text. Leaves its last base in the backend."""

    def __init__(self, learner: Learner, buffer: Buffer, pause: Callable[[], None]):
        self._learner, self._buffer, self._pause = learner, buffer, pause
        self._backend = learner.backend
        self._frozen: dict[str, float] = {}
        self._plain: float | None = None

    def frozen_logprobs(self, examples: Sequence[Example], known: dict[str, float]) -> None:
        """Mean log-probability of each reply in the untouched model, added to `known` by its id."""
        missing = [e for e in examples if e.reply_id not in known]
        if missing:
            self._learner.untouched()
            for example in missing:
                known[example.reply_id] = self._logprob(example.text, None)

    def judge(self, base: BaseLoRA, micro: MicroLoRA) -> Verdict:
        """The largest share of the base that plain text allows, and whether held-out ratings prefer it."""
        self.frozen_logprobs(self._buffer.held_out, self._frozen)
        if self._plain is None:
            self._learner.untouched()
            self._plain = self._nll(None)
        self._learner.stand()
        before, now = self._loss(self._learner.micro), self._nll(self._learner.micro)
        limit = max(math.log1p(PPL_RISE), now - self._plain)  # what is not worse than now is allowed
        tried, kl, rise = self._shrunk(base, micro, self._plain, limit)
        after = self._loss(micro)
        reason = _objection(before, after, kl, rise, limit)
        facts = {
            "examples": len(self._buffer.train) + len(self._buffer.held_out),
            "held_out": len(self._buffer.held_out),
            "loss_before": before,
            "loss_after": after,
            "kl": kl,
            "ppl_change": math.expm1(rise),
            "share": tried.scale / base.scale,
            "promoted": not reason,
            "reason": reason or f"held-out loss {before:.4f} -> {after:.4f}",
        }
        return Verdict(not reason, tried, kl, facts)

    def _shrunk(
        self, base: BaseLoRA, micro: MicroLoRA, plain: float, limit: float
    ) -> tuple[BaseLoRA, float, float]:
        """As much of the base as stays within bounds, its KL and its rise of the neutral text's nll.

        Both grow about with the square of the share.
        """
        for _ in range(ROUNDS):
            kl, rise = self._learner.ground(base).neutral.kl(micro), self._nll(micro) - plain
            over = max(kl / (ROOM * KL_CAP), rise / limit)
            if not over > 1:  # NaN is refused later
                break
            tried, base = base, base.shrunk(0.97 * over**-0.5)
        else:
            base = tried
        return base, kl, rise

    def _loss(self, micro: MicroLoRA) -> float:
        """DRO's loss on the held-out ratings: mean of (r - V - tau * rho)^2 / 2."""
        losses = []
        for e in self._buffer.held_out:
            rho = self._logprob(e.text, micro) - self._frozen[e.reply_id]
            losses.append(0.5 * (e.reward - e.value - TAU * rho) ** 2)
        return float(np.mean(losses))

    def _nll(self, micro: MicroLoRA | None) -> float:
        """Mean negative log-likelihood of the neutral answers, nats."""
        texts = self._buffer.neutral
        return -sum(self._logprob(t, micro) * t.said for t in texts) / sum(t.said for t in texts)

    def _logprob(self, text: Text, micro: MicroLoRA | None) -> float:
        """Mean log-probability per token of what was said, under the backend's base."""
        self._pause()
        hidden = self._backend.hidden_states(text.tokens[:-1])[text.first - 1 :]
        said, total, at = np.asarray(text.tokens[text.first :], np.int32), 0.0, 0
        for part, logits in adapted_logits(micro, hidden, self._backend.head):
            total += float(kernels.logprobs(logits, said[at : at + len(part)]).sum())
            at += len(part)
        return total / text.said


def _objection(before: float, after: float, kl: float, rise: float, limit: float) -> str:
    """Why the candidate is not used; "" when it is."""
    if not all(math.isfinite(x) for x in (before, after, kl, rise)):
        return "its numbers are not finite"
    if kl > KL_CAP:
        return f"KL to the untouched model is {kl:.3f}; at most {KL_CAP} is allowed"
    if rise > limit + 1e-6:
        return f"perplexity on plain text rises by {math.expm1(rise):.1%}; {PPL_RISE:.0%} is allowed"
    if not after < before:
        return f"held-out ratings do not prefer it: loss {before:.4f} -> {after:.4f}"
    return ""
