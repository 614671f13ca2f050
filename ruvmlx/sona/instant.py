"""The instant loop: one rating, one step, within a millisecond.

A rating says that a reply was good or bad, not why. What several ratings agree on is taste; the rest is what
the replies happened to be about. So each weight of lora_b is set from all ratings so far, by how far they
agree. For the reply i with weight w_i, gradient g_i = E_b and Fisher information f_i, per element,

    G = sum w_i g_i      S = sum (w_i g_i)^2      L = sum |w_i| f_i          (older ratings fade by DECAY)

    lora_b = gain * G / (1 / sigma^2 + L) * G^2 / (G^2 + AGREE * S)

First a natural gradient step from a prior of width sigma (neutral.py: how freely a token may be moved); then
Wiener's shrinkage: G^2 / S is 1 for a token that moved in one reply only, n where n ratings agree, and
near 0 where they contradict each other. lora_a stays what was measured.

Then the global cap: if the adapter as a whole is further than KL_CAP from the frozen model on neutral text,
lora_b is scaled back; `gain` remembers by how much, and the next rating starts from the whole again.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from ..kernels import micro as kernels
from ..kernels.micro import NotFinite
from ..lora import MicroLoRA
from .neutral import Neutral
from .trace import Trace

KL_CAP = 0.1  # nats per token between the learned and the frozen model, on neutral text
PER_RATING = 0.02  # nats per token that one rating may add to that distance
STEP = 2.0
AGREE = 4.0  # ratings that must agree before half of a step is taken
DECAY = 0.98


@dataclass(frozen=True)
class Update:
    adapter: MicroLoRA
    kl: float  # KL(new || frozen) on neutral text


def update(adapter: MicroLoRA, trace: Trace, weight: float, neutral: Neutral) -> Update | None:
    """The adapter after the rating; None when there is nothing to change.

    `trace` must be of this adapter. NotFinite if anything is not finite.
    """
    if weight == 0:
        return None
    if not all(kernels.all_finite(x) for x in (trace.grad_a, trace.grad_b, adapter.lora_a)):
        raise NotFinite("the reply's gradient holds NaN or Inf")
    old = held(adapter, neutral)
    step = np.float32(weight) * trace.grad_b.take(neutral.tokens, axis=1)
    information = abs(weight) * fisher(adapter, trace, neutral)
    new = np.float32(DECAY) * old + np.stack([step, step * step, information])
    limit = min(KL_CAP, _finite(neutral.kl(adapter)) + PER_RATING)
    return capped(moved(adapter, old, new, neutral), neutral, limit)


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
    b = adapter.lora_b * np.float32(1 / adapter.gain)
    b[:, neutral.tokens] += pushed(new, neutral) - pushed(old, neutral)
    return replace(adapter, lora_b=b, evidence=new, gain=1.0)


def without(adapter: MicroLoRA, before: MicroLoRA, after: MicroLoRA, neutral: Neutral) -> Update:
    """The adapter less what one past update, from `before` to `after`, put into it."""
    old = held(adapter, neutral)
    new = old - (held(after, neutral) - np.float32(DECAY) * held(before, neutral))
    new[1:] = np.maximum(new[1:], 0)
    return capped(moved(adapter, old, new, neutral), neutral)


def capped(adapter: MicroLoRA, neutral: Neutral, limit: float = KL_CAP) -> Update:
    """Scale lora_b until KL(new || frozen) is within the limit: one or two rounds, KL is nearly quadratic.

    What a base does by itself, the floor, no scaling takes away: a base at the cap leaves MicroLoRA nothing.
    """
    kl, floor = _finite(neutral.kl(adapter)), neutral.floor
    while kl > max(limit, floor + 1e-5):
        share = max(0.0, limit - floor) / (kl - floor)  # the chord from the floor stays above a convex curve
        adapter = adapter.shrunk(0.999 * (share if floor else math.sqrt(share)))
        kl = _finite(neutral.kl(adapter))
    return Update(adapter, kl)


def _finite(kl: float) -> float:
    if not math.isfinite(kl):
        raise NotFinite(f"KL to the frozen model is {kl}")
    return kl
