"""This module is the instant loop for layers below the output head. At each rating, the module computes
lora_b of the LayerLoRA from all ratings so far, in the same way as instant.py computes lora_b of the output
head.

For reply i of n_i tokens with weight w_i and gradient g_i of its log-probability with respect to lora_b,
    G = sum w_i g_i      S = sum (w_i g_i)^2      N = sum |w_i| n_i
    theta = STEP * G / (F (TOKENS + N)) * G^2 / (G^2 + AGREE * S) * J        lora_b = gain * theta

F is the Fisher information per token of the original model's answers, so G / F is a natural gradient. Earlier
ratings fade at the same rate as in the output head (instant.py). J is James and Stein's factor for each
part, max(0, 1 - NOISE sum S / sum G^2). J is small for a change that only one reply needs, because this
change is mostly the topic of that reply.

The KL divergence from the frozen model is capped twice. At a rating, the KL that the layer LoRA adds is
estimated as curvature * 1/2 sum F lora_b^2. `gain` keeps this estimate within the layer LoRA's share of the
KL cap, and it keeps the rise of the estimate within PER_RATING. While the user reads a reply, the KL guard
(layer_kl_guard.py) measures KL and perplexity under the layer LoRA. This measurement gives the curvature: the
measured KL divided by 1/2 sum F lora_b^2. The guard scales the layer LoRA down if the measured KL is over the
limit.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from ...kernels.micro import NotFinite
from ...lora.layer_lora import LayerLoRA
from ...lora.micro_lora import EVIDENCE_BITS, round_bits
from ...lora.targets import Targets
from ..instant import KL_CAP, MAX_MAGNITUDE, PER_RATING, RISE_CAP
from ..kl_probe import KLProbe
from ..trace import LayerGradient

STEP = 1.0
TOKENS = 300.0  # the weight of the prior, as a number of reply tokens
AGREE = 12.0  # this number of ratings that agree gives half of the full step
NOISE = 0.5
# The layer LoRA's share of the KL and the rise that the base LoRA leaves free under the caps: if ratings
# change the output head, too, and if they do not.
BESIDE_HEAD, ALONE = 0.5, 0.9
CAREFUL = 0.8  # the share of the limit that a rating can use, because the KL is only estimated
HOPELESS = 1e12  # the curvature if the measured KL is not finite; it scales lora_b to about 0
TINY = 1e-7  # nats; the curvature is not measured below this energy (LayerLoRA.energy)


@dataclass(frozen=True)
class LayerLimit:
    """The limits of the layer LoRA (nats per token). kl: the maximum KL that the layer LoRA adds in answers.
    rise: the maximum rise of prose's negative log-likelihood that the layer LoRA adds."""

    kl: float
    rise: float

    @classmethod
    def above(cls, probe: KLProbe, targets: Targets) -> "LayerLimit":
        """Return the limits of a layer LoRA that is active together with a base LoRA. probe: the KL probe
        under the base LoRA alone."""
        share = BESIDE_HEAD if targets.head else ALONE
        return cls(share * max(KL_CAP - probe.floor, 1e-5), share * max(RISE_CAP - probe.rise, 1e-5))


def update(
    layer_lora: LayerLoRA,
    gradient: LayerGradient,
    weight: float,
    kept: float,
    targets: Targets,
    limit: LayerLimit,
    unasked_b: np.ndarray | None = None,
) -> LayerLoRA:
    """Return the layer LoRA after a rating of this weight. Raises NotFinite if the weight, the gradient or
    the KL is not finite.

    kept: the factor that multiplies the evidence of earlier ratings
    unasked_b: the result of `residual_b` for the layer LoRA; None if the caller has not computed it
    """
    if weight == 0:
        return layer_lora
    if not math.isfinite(weight):
        raise NotFinite(f"the rating's weight is {weight}")
    with np.errstate(over="ignore", invalid="ignore"):  # the lines below check for NaN and Inf
        step = np.float32(weight) * gradient.values
        evidence = np.float32(kept) * layer_lora.evidence
        evidence[0] += step
        step *= step
        evidence[1] += step
    # The comparison is False for NaN. If the squares S are finite, the gradients G are finite, too.
    if not evidence[1].max() < MAX_MAGNITUDE**2:
        raise NotFinite("a gradient is NaN, infinite or far too large")
    tokens = kept * layer_lora.tokens + abs(weight) * gradient.tokens
    most = min(CAREFUL * limit.kl, estimated_kl(layer_lora) + PER_RATING)
    # theta is computed from the rounded evidence, so that `residual_b` later finds only lora_b's rounding
    evidence = round_bits(evidence, EVIDENCE_BITS)
    return cap_kl(_uncapped_layers(layer_lora, evidence, tokens, targets, unasked_b), most).rounded_copy()


def without_rating(
    layer_lora: LayerLoRA, before: LayerLoRA | None, after: LayerLoRA, targets: Targets, limit: LayerLimit
) -> LayerLoRA:
    """Return the layer LoRA without the effect of one past rating, which changed `before` into `after`. If
    their lora_a differ, the effect stays."""
    if layer_lora.frame != after.frame or (before and before.frame != after.frame):
        return layer_lora  # the LoRAs have different lora_a, so the effect of the rating stays
    evidence = layer_lora.evidence - (after.evidence - (before.evidence if before else 0))
    evidence[1] = np.maximum(evidence[1], 0)
    evidence = round_bits(evidence, EVIDENCE_BITS)
    tokens = max(0.0, layer_lora.tokens - after.tokens + (before.tokens if before else 0.0))
    return cap_kl(_uncapped_layers(layer_lora, evidence, tokens, targets), limit.kl).rounded_copy()


def _uncapped_layers(
    layer_lora: LayerLoRA,
    evidence: np.ndarray,
    tokens: float,
    targets: Targets,
    unasked_b: np.ndarray | None = None,
) -> LayerLoRA:
    """Return the layer LoRA that follows from this evidence at a gain of 1, before it is scaled down to the
    caps."""
    new = layer_lora.replace_fields(evidence=evidence, tokens=tokens, gain=1.0)
    lora_b = evidence_theta(new, targets)
    lora_b += residual_b(layer_lora, targets) if unasked_b is None else unasked_b
    return new.replace_fields(lora_b=lora_b)


def residual_b(layer_lora: LayerLoRA, targets: Targets) -> np.ndarray:
    """Return lora_b [n] - theta at a gain of 1. The difference lora_b - theta is the part of lora_b that a
    consolidation (a run of the background or style loop) leaves in the layer LoRA. Ratings do not change this
    part."""
    if not layer_lora.gain:
        return np.zeros_like(layer_lora.lora_b)
    share = np.float32(1 / layer_lora.gain)
    rest = layer_lora.lora_b * share - evidence_theta(layer_lora, targets)
    # A value below one rounding step comes from `LayerLoRA.rounded_copy`. If each rating kept these rounding
    # errors, they would add up.
    rest[np.abs(rest) < layer_lora.steps * share] = 0
    return rest


def cap_kl(layer_lora: LayerLoRA, kl: float) -> LayerLoRA:
    """Return the layer LoRA, scaled down if its estimated KL exceeds `kl`."""
    now = estimated_kl(layer_lora)
    if not math.isfinite(now):
        raise NotFinite(f"the estimated KL is {now}")
    return layer_lora.shrunk(math.sqrt(kl / now)) if now > kl else layer_lora


def evidence_theta(layer_lora: LayerLoRA, targets: Targets) -> np.ndarray:
    """Compute theta [n] from the layer LoRA's evidence. theta is 0 for matrices that are not targets."""
    g, s = layer_lora.evidence
    square = g * g
    signal, noise = (np.add.reduceat(x, layer_lora.starts) for x in (square, s))
    clear = np.maximum(0, 1 - np.float32(NOISE) * noise / np.maximum(signal, np.float32(1e-12)))
    clear[~places_mask(layer_lora, signal, targets)] = 0
    below = np.float32(AGREE) * s
    below += np.float32(1e-12)
    below += square
    below *= layer_lora.fisher
    theta = square
    theta *= g
    theta /= below
    theta *= np.repeat(np.float32(STEP / (TOKENS + layer_lora.tokens)) * clear, layer_lora.counts)
    return theta


def places_mask(layer_lora: LayerLoRA, signal: np.ndarray, targets: Targets) -> np.ndarray:
    """Return a mask of the layer LoRA's parts that ratings change. signal: the squared length of G for each
    part; with `targets.top`, only the matrices whose parts together have the largest signals change."""
    wanted = {place: 0.0 for place in layer_lora.places if place in set(targets.places)}
    if 0 < targets.top < len(wanted):
        for place, length in zip(layer_lora.places, signal.tolist(), strict=True):
            if place in wanted:
                wanted[place] += length
        wanted = dict(sorted(wanted.items(), key=lambda item: -item[1])[: targets.top])
    return np.array([place in wanted for place in layer_lora.places], bool)


def estimated_kl(layer_lora: LayerLoRA | None) -> float:
    """Return the estimated KL (nats per token) that the layer LoRA adds to the KL of the base LoRA."""
    if layer_lora is None:
        return 0.0
    return layer_lora.curvature * layer_lora.energy


def recalibrate(layer_lora: LayerLoRA, base: KLProbe, under: KLProbe, limit: LayerLimit) -> LayerLoRA:
    """Return the layer LoRA with its measured curvature (measured KL divided by LayerLoRA.energy).

    The curvature follows from the KL or from the rise of the prose's negative log-likelihood: from the value
    that uses more of its limit. The rise is squared, because the rise is linear in lora_b and the KL is
    quadratic.

    base, under: the KL probe under the base LoRA alone, and the KL probe under the base and the layer LoRA
    """
    flat = layer_lora.energy
    if flat < TINY:
        return layer_lora
    kl, rise = under.floor - base.floor, max(0.0, under.rise - base.rise)
    if not (math.isfinite(kl) and math.isfinite(rise)):
        return replace(layer_lora, curvature=HOPELESS)
    return replace(layer_lora, curvature=max(kl, limit.kl * (rise / limit.rise) ** 2, 0.1 * flat) / flat)
