"""The instant loop: one rating, one step, while the key is still down.

A rating says that a reply was good or bad, not why. What several ratings agree on is taste; the rest is what
the replies happened to be about. So lora_b is set from all ratings so far, by how far they agree. What it
says of the tokens that ratings may move (probe.py) is written in coordinates: one for each token, and one
for each feature, a direction in which tokens of one kind move together,

    lora_b = gain * held_back(theta_tokens + theta_features @ features^T)

For the reply i with weight w_i, gradient g_i = E_b and Fisher information f_i in these coordinates,

    G = sum w_i g_i      S = sum (w_i g_i)^2      L = sum |w_i| f_i

    theta = step * G / (1 / sigma^2 + L) * G^2 / (G^2 + agree * S)

where each rating makes all before it fade by FADE. Tastes change: while the latest ratings, a moving mean,
punish what the older ones made more likely, those fade faster, the more the clearer that is. One such rating
says nothing.

First a natural gradient step from a prior of width sigma; then Wiener's shrinkage: G^2 / S is 1 for what
moved in one reply only, n where n ratings agree, and near 0 where they contradict each other. Features are
many, and each moves all tokens: from noise alone they would add up. All those of one reading count for no
more than they say beyond noise, by James and Stein: 1 - noise * sum S / sum G^2, or nothing. lora_a stays
what was measured.

Where a reply ends costs it no variety; what it says does. So held_back scales all but the end of replies
down to about SAID_CAP. That depends on the evidence and the frozen model alone: what is taken back leaves
no trace.

Then the global cap: if answers to plain questions are further than KL_CAP from the frozen model's, or prose
has become less likely by more than RISE_CAP, lora_b is scaled back; `gain` remembers by how much, and the
next rating starts there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..kernels import micro as kernels
from ..kernels.micro import NotFinite
from ..kernels.rating import Push, Rule
from ..lora import MicroLoRA
from .kl_probe import Distance, KLProbe
from .trace import ReplyStats, Trace

KL_CAP = 0.1  # nats per token between the learned and the frozen model, in answers to plain questions
SAID_CAP = 0.05  # of it by what replies say, apart from where they end
RISE_CAP = math.log(1.014)  # of prose's negative log-likelihood, nats per token
PER_RATING = 0.05  # nats per token that one rating may add to the KL
TOKEN = Push(step=1.0, agree=12.0, noise=0.0)  # agree: ratings before half of a step is taken
FEATURE = Push(step=1.5, agree=12.0, noise=1.0)
RULE = Rule(TOKEN, FEATURE, SAID_CAP)
FADE = 0.005
TURNED = 1.0  # of the older ratings fade at a trend of -1
LATEST = 8  # ratings that the trend is the mean of
MOVED = 0.15  # log-ratio per token, nats, of a reply that ratings have clearly made more likely
LARGEST = 1e8  # of a weight or gradient; beyond it something is broken
LOOKS = 6  # at the reference text, for the right gain; after that nothing is left
BROKEN = "a weight or gradient is NaN, infinite or beyond all measure"
SLACK = 1.2  # a gain is good enough when it could not be this many times as large


@dataclass(frozen=True)
class Update:
    adapter: MicroLoRA
    kl: float  # KL(new || frozen) in answers to plain questions


@dataclass(frozen=True)
class UncappedUpdate:
    """What all ratings ask for, before the global cap: [r, A + 1] for the tokens that they may move. Of other
    tokens lora_b stays what it is, but for the gain; covered: that is 0."""

    adapter: MicroLoRA
    block: np.ndarray
    evidence: np.ndarray
    covered: bool
    trend: float = 0.0

    def at(self, share: float, probe: KLProbe) -> MicroLoRA:
        old, now = self.adapter, self.adapter.gain
        kept = 0.0 if self.covered or not now else share / now
        b = kernels.micro_place(old.lora_b, kept, self.block, probe.tokens, share, LARGEST)
        return MicroLoRA(old.lora_a, b, self.evidence, share, self.trend, old.alpha)


def update(
    adapter: MicroLoRA,
    trace: Trace,
    weight: float,
    probe: KLProbe,
    kl: float = 0.0,
    stats: ReplyStats | None = None,
    reserve: float = 0.0,
) -> Update | None:
    """The adapter after the rating; None when there is nothing to change.

    trace: of this adapter. kl: the adapter's. stats: `prepare_stats` of the trace. reserve: the part of the
    KL cap that the layer LoRA uses. NotFinite if the weight, the gradients or the update are not finite.
    """
    if weight == 0:
        return None
    if not math.isfinite(weight):
        raise NotFinite(f"the rating's weight is {weight}")
    stats = stats or prepare_stats(trace, probe)
    if not stats.finite:
        raise NotFinite(BROKEN)
    trend = turned(adapter.trend, weight, trace.log_ratio)
    evidence, block = probe.coordinates.solver.rated(
        held(adapter, probe), stats.gradient, stats.information, stats.beside, weight, remembered(trend),
        RULE, probe.answered(adapter), adapter.scale, LARGEST,
    )  # fmt: skip
    whole = UncappedUpdate(adapter, block, evidence, stats.covered, trend)
    return capped(whole, probe, min(KL_CAP, kl + PER_RATING) - reserve)


def noted(adapter: MicroLoRA, trace: Trace, weight: float, kl: float) -> Update | None:
    """A rating that is not to move the head: only the trend follows it."""
    if weight == 0:
        return None
    if not math.isfinite(weight):
        raise NotFinite(f"the rating's weight is {weight}")
    return Update(replace(adapter, trend=turned(adapter.trend, weight, trace.log_ratio)), kl)


def recapped(adapter: MicroLoRA, probe: KLProbe) -> Update:
    """The same adapter within the caps of a reference text that is read anew."""
    share = np.float32(1 / adapter.gain if adapter.gain else 0)
    block = probe.coordinates.columns(adapter.lora_b) * share
    _sound(block)
    return capped(
        UncappedUpdate(adapter, block, adapter.evidence, probe.coordinates.covers(adapter), adapter.trend),
        probe,
    )


def prepare_stats(trace: Trace, probe: KLProbe) -> ReplyStats:
    """What a rating of this reply would say; needs no rating, so it can be ready before there is one."""
    with np.errstate(all="ignore"):  # what is not finite is found when it is used
        adapter, scale = trace.adapter, np.float32(trace.adapter.scale)
        gradient = trace.grad_b.take(probe.tokens, axis=1)
        u = trace.hidden @ adapter.lora_a
        drawn = np.zeros(adapter.lora_b.shape[1], np.float32)
        np.add.at(drawn, trace.tokens, u[:, 0])
        expected = np.maximum(0, drawn.take(probe.tokens) - gradient[0] / scale)  # about sum_t p_t
        square = scale**2 * np.sum(u * u, axis=0)[:, None]
        try:
            rest = beside(adapter, held(adapter, probe), probe)
        except NotFinite:
            rest = np.full((len(square), probe.tokens.size + 1), np.nan, np.float32)
        by_token, by_feature = (
            square / len(u) * expected,
            np.broadcast_to(square, (len(square), probe.coordinates.k)),
        )
        return ReplyStats(
            np.concatenate([gradient, gradient @ probe.features], axis=1),
            np.concatenate([by_token, by_feature], axis=1),
            rest,
            probe.coordinates.covers(adapter),
            all(kernels.all_within(x, LARGEST) for x in (trace.grad_a, trace.grad_b, adapter.lora_a)),
        )


def turned(trend: float, weight: float, log_ratio: float) -> float:
    """The trend after one more rating, in [-1, 1]: above 0 while what is praised is what ratings have made
    more likely. log_ratio: of the reply to the frozen model, nats per token."""
    agreed = _unit(weight) * _unit(log_ratio / MOVED)
    return trend + (agreed - trend) / LATEST


def _unit(x: float) -> float:
    return max(-1.0, min(1.0, x))


def remembered(trend: float) -> float:
    """How much of older ratings is left after one that leads to this trend."""
    return 1 - FADE - TURNED * max(0.0, -trend)


def held(adapter: MicroLoRA, probe: KLProbe) -> np.ndarray:
    """G, S and L of an adapter, [3, r, A + k]; zeros for one that was never rated."""
    shape = (3, adapter.rank, probe.precision.size)
    return adapter.evidence if adapter.evidence.shape == shape else np.zeros(shape, np.float32)


def asked(adapter: MicroLoRA, evidence: np.ndarray, probe: KLProbe) -> np.ndarray:
    """What the evidence [3, r, A + k] asks for at a gain of 1, held back to about SAID_CAP: [r, A + 1]."""
    return probe.coordinates.solver.block(evidence, RULE, probe.answered(adapter), adapter.scale)


def beside(adapter: MicroLoRA, evidence: np.ndarray, probe: KLProbe) -> np.ndarray:
    """What an adapter with this evidence says beside what that asks for, at a gain of 1: [r, A + 1]."""
    if not adapter.gain:
        return np.zeros((adapter.rank, probe.tokens.size + 1), np.float32)
    now = probe.coordinates.columns(adapter.lora_b) * np.float32(1 / adapter.gain)
    return now - asked(adapter, evidence, probe)


def without(adapter: MicroLoRA, before: MicroLoRA, after: MicroLoRA, probe: KLProbe) -> Update:
    """The adapter less what one past update, from `before` to `after`, did to it."""
    old = held(adapter, probe)
    new = old - (held(after, probe) - held(before, probe))
    new[1:] = np.maximum(new[1:], 0)
    trend = _unit(adapter.trend - (after.trend - before.trend))
    block = asked(adapter, new, probe) + beside(adapter, old, probe)
    _sound(block)
    return capped(UncappedUpdate(adapter, block, new, probe.coordinates.covers(adapter), trend), probe)


def capped(whole: UncappedUpdate, probe: KLProbe, limit: float = KL_CAP) -> Update:
    """Scale it until the reference text is within both limits, and hardly further than that: KL to the frozen
    model, and perplexity. The last rating's gain is where the search begins.

    What a base does by itself, the floor, no scaling takes away: one at the limit leaves MicroLoRA nothing.
    """
    distance = _distances(whole, probe)
    share, beyond = min(1.0, max(whole.adapter.gain, 1e-3)), 1.0
    good, refusals = None, 0
    for _ in range(LOOKS):
        found = _finite(distance(share))
        room = _room(found, share, probe, limit)
        if room < 1 and good:
            break
        if room < 1:  # further from a parabola than thought: the steps grow
            share, beyond, refusals = share * 0.97 * room ** (2**refusals), share, refusals + 1
            continue
        grown, good = good, (share, found.kl)
        if grown or share == 1.0 or room < (1.5 * SLACK if refusals else SLACK):
            break
        share = min(0.95 * share * room, (share + beyond) / 2 if refusals else 1.0)
    share, kl = good or (0.0, _finite(distance(0.0)).kl)
    return Update(whole.at(share, probe), kl)


def _sound(numbers: np.ndarray) -> None:
    """NotFinite, unless all are numbers no larger than LARGEST."""
    if not kernels.all_within(numbers, LARGEST):
        raise NotFinite(BROKEN)


def _distances(whole: UncappedUpdate, probe: KLProbe) -> Callable[[float], Distance]:
    """By share. Tokens that ratings may not move are, but for the tail of a consolidation, not moved."""
    if whole.covered:
        return probe.distances(whole.adapter, whole.block)
    return probe.distances_dense(whole.at(1.0, probe))


def _room(found: Distance, share: float, probe: KLProbe, limit: float) -> float:
    """How many times as large the share may be, if both distances are parabolas in it; 1 or more only if they
    are within the limits. What a base does by itself is no distance that a share could answer for."""
    kl, allowed = found.kl - probe.floor, max(limit - probe.floor, 1e-5)
    rise, risen = max(RISE_CAP - probe.rise, 1e-5), found.rise - probe.rise
    room = math.sqrt(allowed / kl) if kl > 0 else math.inf
    linear = found.slope * share
    bend = risen - linear
    if linear * linear + 4 * bend * rise > 0 and linear + math.sqrt(linear**2 + 4 * bend * rise) > 0:
        room = min(room, 2 * rise / (linear + math.sqrt(linear**2 + 4 * bend * rise)))
    return room if kl <= allowed and risen <= rise else min(room, 0.999)


def _finite(found: Distance) -> Distance:
    if not (math.isfinite(found.kl) and math.isfinite(found.rise)):
        raise NotFinite(f"KL to the frozen model is {found.kl}")
    return found
