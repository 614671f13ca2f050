"""The instant loop: one rating, one step, while the key is still down.

A rating says that a reply was good or bad, not why. What several ratings agree on is taste; the rest is what
the replies happened to be about. So each weight of lora_b is set from all ratings so far, by how far they
agree. For the reply i with weight w_i, gradient g_i = E_b and Fisher information f_i, per element,

    G = sum w_i g_i      S = sum (w_i g_i)^2      L = sum |w_i| f_i          (older ratings fade by DECAY)

    lora_b = gain * G / (1 / sigma^2 + L) * G^2 / (G^2 + AGREE * S)

First a natural gradient step from a prior of width sigma (neutral.py: how freely a token may be moved); then
Wiener's shrinkage: G^2 / S is 1 for a token that moved in one reply only, n where n ratings agree, and
near 0 where they contradict each other. lora_a stays what was measured.

Then the global cap: if the adapter as a whole is further than KL_CAP from the frozen model on neutral text,
or plain text has become less likely by more than RISE_CAP, lora_b is scaled back; `gain` remembers by how
much, and the next rating starts from the whole again.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from ..kernels import micro as kernels
from ..kernels.micro import NotFinite
from ..lora import MicroLoRA
from .neutral import Distance, Neutral
from .trace import Trace

KL_CAP = 0.1  # nats per token between the learned and the frozen model, on neutral text
RISE_CAP = math.log(1.02)  # of prose's negative log-likelihood, nats per token
PER_RATING = 0.05  # nats per token that one rating may add to the KL
STEP = 2.0
AGREE = 6.0  # ratings that must agree before half of a step is taken
DECAY = 0.995
ROUNDS = 6  # of scaling back; after that nothing is left


@dataclass(frozen=True)
class Update:
    adapter: MicroLoRA
    kl: float  # KL(new || frozen) on neutral text


def update(
    adapter: MicroLoRA, trace: Trace, weight: float, neutral: Neutral, kl: float = 0.0
) -> Update | None:
    """The adapter after the rating; None when there is nothing to change.

    `trace` must be of this adapter, kl is the adapter's. NotFinite if anything is not finite.
    """
    if weight == 0:
        return None
    if not all(kernels.all_finite(x) for x in (trace.grad_a, trace.grad_b, adapter.lora_a)):
        raise NotFinite("the reply's gradient holds NaN or Inf")
    with np.errstate(over="ignore", invalid="ignore"):  # it is looked at below
        old, new = held(adapter, neutral), gathered(adapter, trace, weight, neutral)
        if not kernels.all_finite(new):
            raise NotFinite("what the rating adds overflows")
    limit = min(KL_CAP, kl + PER_RATING)
    return capped(moved(adapter, old, new, neutral), neutral, limit)


def gathered(adapter: MicroLoRA, trace: Trace, weight: float, neutral: Neutral) -> np.ndarray:
    """G, S and L with one more rating, [3, r, A]."""
    step = np.float32(weight) * trace.grad_b.take(neutral.tokens, axis=1)
    information = abs(weight) * fisher(adapter, trace, neutral)
    return np.float32(DECAY) * held(adapter, neutral) + np.stack([step, step * step, information])


def held(adapter: MicroLoRA, neutral: Neutral) -> np.ndarray:
    """G, S and L of an adapter, [3, r, A]; zeros for one that was never rated."""
    shape = (3, adapter.rank, neutral.tokens.size)
    return adapter.evidence if adapter.evidence.shape == shape else np.zeros(shape, np.float32)


def fisher(adapter: MicroLoRA, trace: Trace, neutral: Neutral) -> np.ndarray:
    """About sum_t s^2 u_t^2 p_t(v), [r, A].

    The first direction reads nearly 1 everywhere, so sum_t p_t is what E_b has taken from the tokens drawn.
    """
    u = trace.hidden @ adapter.lora_a
    drawn = np.zeros(adapter.lora_b.shape[1], np.float32)
    np.add.at(drawn, trace.tokens, u[:, 0])
    expected = np.maximum(0, (drawn - trace.grad_b[0] / np.float32(adapter.scale)).take(neutral.tokens))
    return np.float32(adapter.scale**2) * np.mean(u * u, axis=0)[:, None] * expected


def pushed(evidence: np.ndarray, neutral: Neutral) -> np.ndarray:
    """The weights that the evidence [3, r, A] asks for, [r, A]."""
    g, s, information = evidence
    square = g * g
    return np.float32(STEP) * g * square / ((neutral.precision + information) * (square + AGREE * s + 1e-12))


def moved(adapter: MicroLoRA, old: np.ndarray, new: np.ndarray, neutral: Neutral) -> MicroLoRA:
    """lora_b with one evidence in place of another; whatever else is in it stays."""
    b = adapter.lora_b * np.float32(1 / adapter.gain if adapter.gain else 0)
    b[:, neutral.tokens] += pushed(new, neutral) - (pushed(old, neutral) if adapter.gain else 0)
    return replace(adapter, lora_b=b, evidence=new, gain=1.0)


def without(adapter: MicroLoRA, before: MicroLoRA, after: MicroLoRA, neutral: Neutral) -> Update:
    """The adapter less what one past update, from `before` to `after`, put into it."""
    old = held(adapter, neutral)
    new = old - (held(after, neutral) - np.float32(DECAY) * held(before, neutral))
    new[1:] = np.maximum(new[1:], 0)
    return capped(moved(adapter, old, new, neutral), neutral)


def capped(adapter: MicroLoRA, neutral: Neutral, limit: float = KL_CAP) -> Update:
    """Scale lora_b until the neutral text is within both limits: KL to the frozen model, and perplexity.

    What a base does by itself, the floor, no scaling takes away: one at the limit leaves MicroLoRA nothing.
    """
    for i in range(ROUNDS):
        found = _finite(neutral.distance(adapter))
        share = _share(found, neutral, limit, careful=i > 1)
        if share == 1.0:
            return Update(adapter, found.kl)
        adapter = adapter.shrunk(0.999 * share)
    nothing = replace(adapter, lora_b=np.zeros_like(adapter.lora_b), gain=0.0)
    return Update(nothing, _finite(neutral.distance(nothing)).kl)


def _share(found: Distance, neutral: Neutral, limit: float, careful: bool) -> float:
    """How much of lora_b may stay, 1 if all of it. Both curves are convex: the chord from the floor is always
    enough, but too much where they are nearly quadratic, so that is tried first."""
    share, floor, rise_floor = 1.0, neutral.floor, neutral.rise
    if found.kl > max(limit, floor + 1e-5):
        share = max(0.0, limit - floor) / (found.kl - floor)
    if found.rise > max(RISE_CAP, rise_floor + 1e-5):
        share = min(share, max(0.0, RISE_CAP - rise_floor) / (found.rise - rise_floor))
    return share if careful else math.sqrt(share)


def _finite(found: Distance) -> Distance:
    if not (math.isfinite(found.kl) and math.isfinite(found.rise)):
        raise NotFinite(f"KL to the frozen model is {found.kl}")
    return found
