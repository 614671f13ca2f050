"""The instant loop: one rating, one step, within a millisecond.

The step is sized by what it does, not by a learning rate: along the gradient E, the KL divergence of
a step eta is about eta^2 / 2 * mean_t Var_{p_t}(dz_t), so

    eta = sign(w) sqrt(2 eps |w| / mean_t Var_{p_t}(dz_t))

moves the reply's own distributions by eps |w| nats per token. Then the global cap: if the
adapter as a whole is further than `cap` from the frozen model on neutral text, lora_b is scaled back.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..kernels.micro import NotFinite
from ..lora import MicroLoRA
from .neutral import Neutral
from .trace import Trace

EPSILON = 0.01  # nats per token that one full-weight rating may move the rated reply's distributions
KL_CAP = 0.1  # nats per token between the learned and the frozen model, on neutral text
MOMENTUM = 0.3  # the last update's share in the next one


@dataclass(frozen=True)
class Update:
    adapter: MicroLoRA
    kl: float  # KL(new || frozen) on neutral text
    eta: float


def step_size(weight: float, variance: float, epsilon: float = EPSILON) -> float:
    """eta along the gradient; 0 when there is nothing to push."""
    if weight == 0 or not variance > 0:
        return 0.0
    return math.copysign(math.sqrt(2 * epsilon * abs(weight) / variance), weight)


def momentum_for(adapter: MicroLoRA, trace: Trace, eta: float) -> float:
    """MOMENTUM, or 0 when the last update points against this one (O'Donoghue & Candes 2015, restart):
    a rating must never be outvoted by the one before."""
    along = np.vdot(adapter.momentum_b, trace.grad_b) + np.vdot(adapter.momentum_a, trace.grad_a)
    return MOMENTUM if along * eta > 0 else 0.0


def update(adapter: MicroLoRA, trace: Trace, weight: float, neutral: Neutral) -> Update | None:
    """The adapter after the rating; None when there is nothing to change.

    `trace` must be settled and of this adapter. NotFinite if anything is not finite.
    """
    assert trace.variance is not None
    eta = step_size(weight, trace.variance)
    if eta == 0:
        return None
    new = adapter.stepped(trace.grad_a, trace.grad_b, eta, momentum_for(adapter, trace, eta))
    return capped(new, neutral, eta)


def capped(adapter: MicroLoRA, neutral: Neutral, eta: float = 0.0) -> Update:
    """Scale lora_b until KL(new || frozen) is within the cap: one or two rounds, KL is nearly quadratic.

    What a base does by itself, the floor, no scaling takes away: a base at the cap leaves MicroLoRA nothing.
    """
    kl, floor = _finite(neutral.kl(adapter)), neutral.floor
    while kl > max(KL_CAP, floor + 1e-5):
        share = max(0.0, KL_CAP - floor) / (kl - floor)  # the chord from the floor stays above a convex curve
        adapter = adapter.shrunk(0.999 * (share if floor else math.sqrt(share)))
        kl = _finite(neutral.kl(adapter))
    return Update(adapter, kl, eta)


def _finite(kl: float) -> float:
    if not math.isfinite(kl):
        raise NotFinite(f"KL to the frozen model is {kl}")
    return kl
