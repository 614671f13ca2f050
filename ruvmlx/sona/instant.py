"""The instant loop: one rating, one step, while the key is still down.

A rating says that a reply was good or bad, not why. What several ratings agree on is taste; the rest is what
the replies happened to be about. So lora_b is set from all ratings so far, by how far they agree. What it
says of the tokens that ratings may move (neutral.py) is written in coordinates: one for each token, and one
for each feature, a direction in which tokens of one kind move together,

    lora_b = gain * (theta_tokens + theta_features @ features^T)

For the reply i with weight w_i, gradient g_i = E_b and Fisher information f_i in these coordinates,

    G = sum w_i g_i      S = sum (w_i g_i)^2      L = sum |w_i| f_i          (older ratings fade by DECAY)

    theta = STEP * G / (1 / sigma^2 + L) * G^2 / (G^2 + AGREE * S)

First a natural gradient step from a prior of width sigma; then Wiener's shrinkage: G^2 / S is 1 for what
moved in one reply only, n where n ratings agree, and near 0 where they contradict each other. Features are
many, and each moves all tokens: from noise alone they would add up. All those of one reading count for no
more than they say beyond noise, by James and Stein: 1 - NOISE * sum S / sum G^2, or nothing. lora_a stays
what was measured.

Then the global cap: if answers to plain questions are further than KL_CAP from the frozen model's, or prose
has become less likely by more than RISE_CAP, lora_b is scaled back; `gain` remembers by how much, and the
next rating starts there.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from ..kernels import micro as kernels
from ..kernels.micro import NotFinite
from ..lora import MicroLoRA
from .neutral import Distance, Neutral
from .trace import Trace

KL_CAP = 0.1  # nats per token between the learned and the frozen model, in answers to plain questions
RISE_CAP = math.log(1.018)  # of prose's negative log-likelihood, nats per token
PER_RATING = 0.05  # nats per token that one rating may add to the KL
STEP = {"token": 4.0, "feature": 16.0}
AGREE = {"token": 12.0, "feature": 12.0}  # ratings that must agree before half of a step is taken
NOISE = 1.0
DECAY = 0.995
LOOKS = 6  # at the neutral text, for the right gain; after that nothing is left
SLACK = 1.3  # a gain is good enough when no distance could be this many times as large


@dataclass(frozen=True)
class Update:
    adapter: MicroLoRA
    kl: float  # KL(new || frozen) in answers to plain questions


@dataclass(frozen=True)
class Said:
    """What a rating of weight 1 says: gradient and Fisher information in the coordinates, [r, A + k] each."""

    gradient: np.ndarray
    information: np.ndarray


def update(
    adapter: MicroLoRA,
    trace: Trace,
    weight: float,
    neutral: Neutral,
    kl: float = 0.0,
    said: Said | None = None,
) -> Update | None:
    """The adapter after the rating; None when there is nothing to change.

    `trace` must be of this adapter, kl is the adapter's; said: what `saying` has prepared. NotFinite if
    anything is not finite.
    """
    if weight == 0:
        return None
    if not all(kernels.all_finite(x) for x in (trace.grad_a, trace.grad_b, adapter.lora_a)):
        raise NotFinite("the reply's gradient holds NaN or Inf")
    with np.errstate(over="ignore", invalid="ignore"):  # it is looked at below
        old, new = held(adapter, neutral), gathered(adapter, said or saying(trace, neutral), weight, neutral)
        if not kernels.all_finite(new):
            raise NotFinite("what the rating adds overflows")
    limit = min(KL_CAP, kl + PER_RATING)
    return capped(moved(adapter, old, new, neutral), neutral, limit, adapter.gain)


def saying(trace: Trace, neutral: Neutral) -> Said:
    """What a rating of this reply would say; needs no rating, so it can be ready before there is one."""
    adapter, scale = trace.adapter, np.float32(trace.adapter.scale)
    gradient = trace.grad_b.take(neutral.tokens, axis=1)
    u = trace.hidden @ adapter.lora_a
    drawn = np.zeros(adapter.lora_b.shape[1], np.float32)
    np.add.at(drawn, trace.tokens, u[:, 0])
    expected = np.maximum(0, drawn.take(neutral.tokens) - gradient[0] / scale)  # about sum_t p_t
    square = scale**2 * np.sum(u * u, axis=0)[:, None]
    by_token, by_feature = square / len(u) * expected, np.broadcast_to(square, (len(square), neutral.k))
    return Said(
        np.concatenate([gradient, gradient @ neutral.features], axis=1),
        np.concatenate([by_token, by_feature], axis=1),
    )


def gathered(adapter: MicroLoRA, said: Said, weight: float, neutral: Neutral) -> np.ndarray:
    """G, S and L with one more rating, [3, r, A + k]."""
    step = np.float32(weight) * said.gradient
    new = np.stack([step, step * step, np.float32(abs(weight)) * said.information])
    return np.float32(DECAY) * held(adapter, neutral) + new


def held(adapter: MicroLoRA, neutral: Neutral) -> np.ndarray:
    """G, S and L of an adapter, [3, r, A + k]; zeros for one that was never rated."""
    shape = (3, adapter.rank, neutral.precision.size)
    return adapter.evidence if adapter.evidence.shape == shape else np.zeros(shape, np.float32)


def pushed(evidence: np.ndarray, neutral: Neutral) -> np.ndarray:
    """theta: the coordinates that the evidence [3, r, A + k] asks for, [r, A + k]."""
    theta = np.empty_like(evidence[0])
    for kind, part in neutral.parts.items():
        g, s, information = evidence[..., part]
        square = g * g
        agreed = square / (square + np.float32(AGREE[kind]) * s + np.float32(1e-12))
        theta[:, part] = np.float32(STEP[kind]) * g / (neutral.precision[part] + information) * agreed
    theta[:, neutral.parts["feature"]] *= beyond_noise(evidence[..., neutral.parts["feature"]])
    return theta


def beyond_noise(evidence: np.ndarray) -> np.ndarray:
    """How much of [3, r, k] chance does not explain, for each reading: [r, 1] (James and Stein 1961)."""
    g, s, _ = evidence
    signal, noise = np.sum(g * g, axis=1, keepdims=True), np.sum(s, axis=1, keepdims=True)
    return np.maximum(0, 1 - np.float32(NOISE) * noise / np.maximum(signal, np.float32(1e-12)))


def moved(adapter: MicroLoRA, old: np.ndarray, new: np.ndarray, neutral: Neutral) -> MicroLoRA:
    """lora_b, the whole of it, with one evidence in place of another; whatever else is in it stays."""
    b = adapter.lora_b * np.float32(1 / adapter.gain if adapter.gain else 0)
    theta = pushed(new, neutral) - (pushed(old, neutral) if adapter.gain else 0)
    b[:, neutral.tokens] += neutral.spread(theta)
    return replace(adapter, lora_b=b, evidence=new, gain=1.0)


def without(adapter: MicroLoRA, before: MicroLoRA, after: MicroLoRA, neutral: Neutral) -> Update:
    """The adapter less what one past update, from `before` to `after`, put into it."""
    old = held(adapter, neutral)
    new = old - (held(after, neutral) - np.float32(DECAY) * held(before, neutral))
    new[1:] = np.maximum(new[1:], 0)
    return capped(moved(adapter, old, new, neutral), neutral, start=adapter.gain)


def capped(adapter: MicroLoRA, neutral: Neutral, limit: float = KL_CAP, start: float = 1.0) -> Update:
    """Scale lora_b until the neutral text is within both limits, and hardly further than that: KL to the
    frozen model, and perplexity. `start`: about how much may stay.

    What a base does by itself, the floor, no scaling takes away: one at the limit leaves MicroLoRA nothing.
    """
    distance, share, good, refused = neutral.distances(adapter), min(1.0, max(start, 1e-3)), None, False
    for _ in range(LOOKS):
        found = _finite(distance(share))
        room = _room(found, neutral, limit)
        if room >= 1:
            good = Update(adapter.shrunk(share), found.kl)
            if share == 1.0 or room < (2 * SLACK if refused else SLACK):
                break
            share = min(1.0, share * math.sqrt(room))
        elif good:
            break
        else:
            share *= 0.97 * (room if refused else math.sqrt(room))
            refused = True
    if good:
        return good
    nothing = adapter.shrunk(0.0)
    return Update(nothing, _finite(distance(0.0)).kl)


def _room(found: Distance, neutral: Neutral, limit: float) -> float:
    """How many times as large lora_b may be. Both distances are convex in it: what is left of them above the
    floor shrinks at least as fast as lora_b, and where they are nearly quadratic as its square."""
    room = math.inf
    if found.kl > neutral.floor:
        room = max(limit, neutral.floor + 1e-5) - neutral.floor
        room /= found.kl - neutral.floor
    if found.rise > neutral.rise:
        room = min(room, (max(RISE_CAP, neutral.rise + 1e-5) - neutral.rise) / (found.rise - neutral.rise))
    return room


def _finite(found: Distance) -> Distance:
    if not (math.isfinite(found.kl) and math.isfinite(found.rise)):
        raise NotFinite(f"KL to the frozen model is {found.kl}")
    return found
