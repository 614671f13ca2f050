"""The instant loop beyond the output head: lora_b of a BodyLoRA is set from all ratings, as the head's is.

For the reply i of n_i tokens with weight w_i and gradient g_i of its log-probability by lora_b,

    G = sum w_i g_i      S = sum (w_i g_i)^2      N = sum |w_i| n_i

    theta = STEP * G / (F (TOKENS + N)) * G^2 / (G^2 + AGREE * S) * J        lora_b = gain * theta

F is the Fisher information of the untouched model's answers per token, so G / F is a natural gradient;
ratings fade as they do in the head (instant.py). J is of each matrix, James and Stein's
1 - NOISE sum S / sum G^2: what is in one reply alone is mostly what that was about.

The guard, at once: KL is about curvature * 1/2 sum F lora_b^2, and gain keeps that within its share of the
cap and one rating's part of it. And while the user reads: KL and perplexity are measured under the change,
the curvature follows from them, and what was too much is taken back (learner.py).
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from ...kernels.micro import NotFinite
from ...lora.layer_lora import BodyLoRA
from ...lora.targets import Targets
from ..instant import KL_CAP, LARGEST, PER_RATING, RISE_CAP
from ..kl_probe import Neutral
from ..trace import Gradient

STEP = 1.0
TOKENS = 300.0  # of replies, that the prior is worth
AGREE = 12.0  # ratings that must agree before half of a step is taken
NOISE = 0.5
BESIDE_HEAD, ALONE = 0.5, 0.9  # share of what the base leaves of the caps
CAREFUL = 0.8  # share of its limit that is used on an estimate alone
HOPELESS = 1e12  # curvature of what has no finite KL: nothing is left of it
TINY = 1e-7  # nats: of less no curvature is measured


@dataclass(frozen=True)
class Limit:
    """What the body may add: kl, nats per token in answers, and rise of prose's negative log-likelihood."""

    kl: float
    rise: float

    @classmethod
    def beside(cls, neutral: Neutral, targets: Targets) -> "Limit":
        """neutral: as it is read under the base alone."""
        share = BESIDE_HEAD if targets.head else ALONE
        return cls(share * max(KL_CAP - neutral.floor, 1e-5), share * max(RISE_CAP - neutral.rise, 1e-5))


def update(
    body: BodyLoRA,
    gradient: Gradient,
    weight: float,
    kept: float,
    targets: Targets,
    limit: Limit,
    beyond: np.ndarray | None = None,
) -> BodyLoRA:
    """The body after a rating that leaves `kept` of the older ones; NotFinite if anything is not finite.

    beyond: `unasked` of the body, if that is known already.
    """
    if weight == 0:
        return body
    if not math.isfinite(weight):
        raise NotFinite(f"the rating's weight is {weight}")
    with np.errstate(over="ignore", invalid="ignore"):  # it is looked at below
        step = np.float32(weight) * gradient.values
        evidence = np.float32(kept) * body.evidence
        evidence[0] += step
        step *= step
        evidence[1] += step
    if not evidence[1].max() < LARGEST**2:  # NaN is not; and what is sound squared is sound
        raise NotFinite("a gradient is NaN, infinite or beyond all measure")
    tokens = kept * body.tokens + abs(weight) * gradient.tokens
    most = min(CAREFUL * limit.kl, estimated(body) + PER_RATING)
    return limited(_moved(body, evidence, tokens, targets, beyond), most)


def without(
    body: BodyLoRA, before: BodyLoRA | None, after: BodyLoRA, targets: Targets, limit: Limit
) -> BodyLoRA:
    """The body less what one past rating, from `before` to `after`, did to it."""
    if body.frame != after.frame or (before and before.frame != after.frame):
        return body  # its places were others: that push stays
    evidence = body.evidence - (after.evidence - (before.evidence if before else 0))
    evidence[1] = np.maximum(evidence[1], 0)
    tokens = max(0.0, body.tokens - after.tokens + (before.tokens if before else 0.0))
    return limited(_moved(body, evidence, tokens, targets), limit.kl)


def _moved(
    body: BodyLoRA, evidence: np.ndarray, tokens: float, targets: Targets, beyond: np.ndarray | None = None
) -> BodyLoRA:
    """Before any cap: gain is 1."""
    new = body.changed(evidence=evidence, tokens=tokens, gain=1.0)
    lora_b = pushed(new, targets)
    lora_b += unasked(body, targets) if beyond is None else beyond
    return new.changed(lora_b=lora_b)


def unasked(body: BodyLoRA, targets: Targets) -> np.ndarray:
    """What lora_b is beyond theta at gain 1 [n], as after a consolidation: it stays, whatever is asked."""
    if not body.gain:
        return np.zeros_like(body.lora_b)
    return body.lora_b * np.float32(1 / body.gain) - pushed(body, targets)


def limited(body: BodyLoRA, kl: float) -> BodyLoRA:
    """Scaled back until its estimated KL is at most `kl`."""
    now = estimated(body)
    if not math.isfinite(now):
        raise NotFinite(f"the estimated KL is {now}")
    return body.shrunk(math.sqrt(kl / now)) if now > kl else body


def pushed(body: BodyLoRA, targets: Targets) -> np.ndarray:
    """theta [n]: what the evidence asks for; 0 outside of the targets."""
    g, s = body.evidence
    square = g * g
    signal, noise = (np.add.reduceat(x, body.starts) for x in (square, s))
    clear = np.maximum(0, 1 - np.float32(NOISE) * noise / np.maximum(signal, np.float32(1e-12)))
    clear[~chosen(body, signal, targets)] = 0
    below = np.float32(AGREE) * s
    below += np.float32(1e-12)
    below += square
    below *= body.fisher
    theta = square
    theta *= g
    theta /= below
    theta *= np.repeat(np.float32(STEP / (TOKENS + body.tokens)) * clear, body.counts)
    return theta


def chosen(body: BodyLoRA, signal: np.ndarray, targets: Targets) -> np.ndarray:
    """Which places are moved, by the squared length of the gradient of each so far."""
    wanted = set(targets.places)
    mask = np.array([place in wanted for place in body.places], bool)
    if 0 < targets.top < mask.sum():
        order = np.argsort(np.where(mask, -signal, np.inf), kind="stable")
        mask = np.isin(np.arange(mask.size), order[: targets.top])
    return mask


def estimated(body: BodyLoRA | None) -> float:
    """KL to the base, nats per token."""
    if body is None:
        return 0.0
    return body.curvature * body.energy


def recalibrated(body: BodyLoRA, base: Neutral, under: Neutral, limit: Limit) -> BodyLoRA:
    """The body with the curvature that was measured: `base` and `under` are the neutral text as it is read
    under the base alone and under both. A rise of prose counts as if it were KL, in proportion to what is
    allowed: it grows with lora_b, KL with its square."""
    flat = body.energy
    if flat < TINY:
        return body
    kl, rise = under.floor - base.floor, max(0.0, under.rise - base.rise)
    if not (math.isfinite(kl) and math.isfinite(rise)):
        return replace(body, curvature=HOPELESS)
    return replace(body, curvature=max(kl, limit.kl * (rise / limit.rise) ** 2, 0.1 * flat) / flat)
