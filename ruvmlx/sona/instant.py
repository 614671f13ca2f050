"""The instant loop updates the output head at once after each rating.

A rating says that a reply was good or bad, not why. Changes on which several ratings agree show the user's
taste; all other changes show only the topics of the replies. So lora_b is computed from all ratings so far,
weighted by their agreement. For the tokens that ratings may move, lora_b is written in coordinates
(coordinates.py). There is one coordinate for each token, and one for each feature. A feature is a direction
in which the logits of similar tokens change together:

    lora_b = gain * (held_back(theta_tokens + theta_features @ features^T) + taste)

`taste` is the push of the taste model (taste_push.py), which the caller gives. For reply i with weight w_i,
gradient g_i (E_b of trace.py) and Fisher information f_i in these coordinates,

    G = sum w_i g_i      S = sum (w_i g_i)^2      L = sum |w_i| f_i

    theta = step * G / (1 / sigma^2 + L) * G^2 / (G^2 + agree * S)

The first factors are a natural gradient step with a prior of width sigma. The last factor, Wiener's
shrinkage, depends on G^2 / S, which is 1 for a coordinate that one reply moved, n where n ratings agree, and
near 0 where they contradict each other. There are many features, and each moves all tokens, so their noise
would add up. All features of one row of lora_b are therefore multiplied by James and Stein's factor max(0, 1
- noise * sum S / sum G^2). lora_a keeps its calibrated values (calibration.py).

A rating down must not punish the end of a long reply. The fault is that the reply did not end earlier. So in
a rating down, the end token of a reply of T tokens has the weight end_credit(T), which is 1 for a short reply
and near 0 for a long reply. The remaining gradient, -sum_t p_t(end) u_t, is the gradient of the probability
that the reply goes on for T tokens. A push against this gradient makes an end likelier at each position where
the model considered an end. If earlier ratings have made this end likelier, a rating up takes the push back
in the same way, because someone who likes half of all long replies does not ask for shorter replies.

A preference between two replies to one question is one piece of evidence. Its w_i g_i is the sum of both
replies' terms, so the parts that both replies share cancel.

Each rating multiplies the evidence of all earlier ratings by 1 - FADE. Tastes change. So a trend is kept,
which is a moving mean over the latest ratings. The trend is below 0 while these ratings punish replies that
earlier ratings made more likely. The older evidence then fades faster, in proportion to the trend.

A change of the end of replies does not reduce the variety of replies, but a change of other tokens does. So
held_back scales all tokens except the end-of-reply tokens down until they add a KL of about SAID_CAP. This
factor is computed from the evidence and the frozen model alone, and it is not part of the stored evidence.

The last step is the global cap. If the KL of answers to plain questions exceeds KL_CAP, or the log-perplexity
of prose has risen by more than RISE_CAP, lora_b is scaled down. `gain` keeps the factor, and the next rating
starts from this gain.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..kernels import micro as kernels
from ..kernels.micro import NotFinite
from ..kernels.rating import Push, Rule
from ..lora import MicroLoRA
from .kl_probe import Distance, KLProbe
from .trace import ReplyStats, Trace

KL_CAP = 0.1  # the maximum KL(learned || frozen) in answers to plain questions, nats per token
SAID_CAP = KL_CAP / 5  # the maximum KL (nats) of all tokens except end-of-reply; the rest is for the taste
RISE_CAP = math.log(1.014)  # the maximum rise of the negative log-likelihood of prose, nats/token
PER_RATING = 0.05  # one rating adds at most this KL, nats per token
TOKEN = Push(step=1.0, agree=12.0, noise=0.0)  # agree: half of a step is taken after 12 ratings that agree
FEATURE = Push(step=1.5, agree=12.0, noise=1.0)
RULE = Rule(TOKEN, FEATURE, SAID_CAP)
FADE = 0.005
TURNED = 1.0  # at a trend of -1, this share of the older evidence fades
TREND_RATINGS = 8  # the number of ratings in the trend's moving mean
MOVED = 0.15  # from this log-ratio (nats per token) on, ratings have clearly made a reply more likely
SHORT = 100  # tokens; the end of a reply up to this length has its full weight in a rating down
MAX_MAGNITUDE = 1e8  # a larger weight or gradient is an error
LOOKS = 6  # the number of KL measurements in the search for the gain; if all exceed a cap, the gain is 0
BROKEN = "a weight or gradient is NaN, infinite or far too large"
FAR = 3.0  # if a refused gain is this many times an accepted gain, a gain between the two is tried
SLACK = 1.2  # a gain is accepted if this many times the gain would exceed a cap


@dataclass(frozen=True)
class ReplyPush:
    """The part of one reply in an update. weight: a weight above 0 makes the reply likelier. log_ratio: the
    reply's log-probability minus its log-probability in the frozen model, nats per token."""

    stats: ReplyStats
    weight: float
    log_ratio: float


@dataclass(frozen=True)
class Update:
    adapter: MicroLoRA
    kl: float  # KL(new || frozen) in answers to plain questions


@dataclass(frozen=True)
class UncappedUpdate:
    """The update from all ratings, before the global cap.

    block: [r, A + 1], the part of lora_b for the A movable tokens, and a last column of zeros, at a gain of
        1. The lora_b of other tokens changes only with the gain.
    covered: True if lora_b is 0 for all other tokens
    taste: [A], the part of the block that the taste model adds
    """

    adapter: MicroLoRA
    block: np.ndarray
    evidence: np.ndarray
    covered: bool
    trend: float = 0.0
    taste: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    def at(self, share: float, probe: KLProbe) -> MicroLoRA:
        old, now = self.adapter, self.adapter.gain
        kept = 0.0 if self.covered or not now else share / now
        b = kernels.micro_place(old.lora_b, kept, self.block, probe.tokens, share, MAX_MAGNITUDE)
        return MicroLoRA(old.lora_a, b, self.evidence, share, self.trend, old.alpha, self.taste)


def update_by(
    adapter: MicroLoRA,
    pushes: Sequence[ReplyPush],
    probe: KLProbe,
    kl: float = 0.0,
    reserve: float = 0.0,
    taste: np.ndarray | None = None,
) -> Update | None:
    """Return the adapter after one piece of evidence; None if nothing changes. The evidence is the sum of one
    or more pushes.

    pushes: pushes whose statistics come from traces under this adapter
    kl: the adapter's KL before the update
    reserve: the part of the KL cap that the layer LoRA uses
    taste: [A], the new push of the taste model; None keeps the adapter's push

    Raises NotFinite if a weight, the gradients or the update are not finite.
    """
    given = [push for push in pushes if push.weight != 0]
    if not given:
        return None
    trend = adapter.trend
    for push in given:
        _require_weight(push.weight)
        if not push.stats.finite:
            raise NotFinite(BROKEN)
        trend = next_trend(trend, push.weight, push.log_ratio)
    before, stats = stored_evidence(adapter, probe), given[0].stats
    gradient, information, weight = _evidence_of(given, before, probe)
    evidence, block = probe.coordinates.solver.add_rating(
        before, gradient, information, stats.beside, weight,
        retention_factor(trend), RULE, probe.answer_contexts(adapter), adapter.scale, MAX_MAGNITUDE,
    )  # fmt: skip
    taste = adapter.taste if taste is None else taste
    whole = UncappedUpdate(adapter, _add_taste(block, taste), evidence, stats.covered, trend, taste)
    return cap_update(whole, probe, min(KL_CAP, kl + PER_RATING) - reserve)


def _evidence_of(
    given: Sequence[ReplyPush], before: np.ndarray, probe: KLProbe
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return (gradient, information, weight) of one piece of evidence.

    The parts that two replies to one question share cancel in the sum. So these parts do not count as noise
    in S.
    """
    gradients = [gradient_of(push.stats, push.weight, before, probe) for push in given]
    if len(given) == 1:
        return gradients[0], given[0].stats.information, given[0].weight
    gradient = sum(np.float32(push.weight) * g for push, g in zip(given, gradients, strict=True))
    information = sum(np.float32(abs(push.weight)) * push.stats.information for push in given)
    return np.asarray(gradient), np.asarray(information), 1.0


def update_trend(adapter: MicroLoRA, pushes: Sequence[ReplyPush], kl: float) -> Update | None:
    """Update the trend alone, for feedback that must not change the head."""
    given = [push for push in pushes if push.weight != 0]
    trend = adapter.trend
    for push in given:
        _require_weight(push.weight)
        trend = next_trend(trend, push.weight, push.log_ratio)
    return Update(replace(adapter, trend=trend), kl) if given else None


def _require_weight(weight: float) -> None:
    if not math.isfinite(weight):
        raise NotFinite(f"the rating's weight is {weight}")


def rescale_to_caps(adapter: MicroLoRA, probe: KLProbe) -> Update:
    """Return the adapter, scaled down until it is within the caps by a newly measured KL probe."""
    share = np.float32(1 / adapter.gain if adapter.gain else 0)
    block = probe.coordinates.columns(adapter.lora_b) * share
    _require_finite(block)
    return cap_update(
        UncappedUpdate(
            adapter, block, adapter.evidence, probe.coordinates.covers(adapter), adapter.trend, adapter.taste
        ),
        probe,
    )


def prepare_stats(trace: Trace, probe: KLProbe) -> ReplyStats:
    """Compute all statistics that a rating of this reply will need."""
    with np.errstate(all="ignore"):  # `finite` and the update check for NaN and Inf
        adapter, scale = trace.adapter, np.float32(trace.adapter.scale)
        gradient = trace.grad_b.take(probe.tokens, axis=1)
        u = trace.hidden @ adapter.lora_a
        drawn = np.zeros(adapter.lora_b.shape[1], np.float32)
        np.add.at(drawn, trace.tokens, u[:, 0])
        expected = np.maximum(0, drawn.take(probe.tokens) - gradient[0] / scale)  # about sum_t p_t
        square = scale**2 * np.sum(u * u, axis=0)[:, None]
        try:
            rest = residual_block(adapter, stored_evidence(adapter, probe), probe)
        except NotFinite:
            rest = np.full((len(square), probe.tokens.size + 1), np.nan, np.float32)
        by_token, by_feature = (
            square / len(u) * expected,
            np.broadcast_to(square, (len(square), probe.coordinates.k)),
        )
        ends, praise = probe.coordinates.ends, np.zeros_like(gradient)
        ended = scale * np.outer(u[-1], probe.tokens[ends] == trace.tokens[-1]).astype(np.float32)
        praise[:, ends] = np.float32(1 - end_credit(len(u))) * ended
        return ReplyStats(
            np.concatenate([gradient, gradient @ probe.features], axis=1),
            np.concatenate([praise, praise @ probe.features], axis=1),
            np.concatenate([by_token, by_feature], axis=1),
            rest,
            probe.coordinates.covers(adapter),
            all(kernels.all_within(x, MAX_MAGNITUDE) for x in (trace.grad_a, trace.grad_b, adapter.lora_a)),
        )


def gradient_of(stats: ReplyStats, weight: float, evidence: np.ndarray, probe: KLProbe) -> np.ndarray:
    """Return the gradient [r, A + k] that a rating of this weight adds to the evidence."""
    tokens = probe.tokens.size
    # True if earlier ratings have made the end of this reply likelier.
    likelier = np.vdot(stats.praise[:, :tokens], evidence[0, :, :tokens]) > 0
    return stats.gradient - stats.praise if weight < 0 or likelier else stats.gradient


def end_credit(tokens: int) -> float:
    """Return the weight, 0 to 1, of the end token in a rating that must not move the end of a long reply.
    tokens: the length of the reply.
    """
    return min(1.0, (SHORT / tokens) ** 4)


def next_trend(trend: float, weight: float, log_ratio: float) -> float:
    """Return the trend after one more rating, in [-1, 1].

    The trend is above 0 while the user praises replies that earlier ratings made more likely. log_ratio: the
    reply's log-ratio to the frozen model, nats per token.
    """
    agreed = _unit(weight) * _unit(log_ratio / MOVED)
    return trend + (agreed - trend) / TREND_RATINGS


def _unit(x: float) -> float:
    return max(-1.0, min(1.0, x))


def retention_factor(trend: float) -> float:
    """Return the factor of the older evidence after a rating that leads to this trend."""
    return 1 - FADE - TURNED * max(0.0, -trend)


def stored_evidence(adapter: MicroLoRA, probe: KLProbe) -> np.ndarray:
    """Return the evidence G, S and L of an adapter: [3, r, A + k]; zeros if the adapter has no ratings."""
    shape = (3, adapter.rank, probe.precision.size)
    return adapter.evidence if adapter.evidence.shape == shape else np.zeros(shape, np.float32)


def block_of(adapter: MicroLoRA, evidence: np.ndarray, probe: KLProbe) -> np.ndarray:
    """Return held_back(theta) of the evidence [3, r, A + k]: the block [r, A + 1] (lora_b's columns of the
    movable tokens, and a column of zeros) at a gain of 1."""
    return probe.coordinates.solver.block(evidence, RULE, probe.answer_contexts(adapter), adapter.scale)


def residual_block(adapter: MicroLoRA, evidence: np.ndarray, probe: KLProbe) -> np.ndarray:
    """Return the part of lora_b that comes neither from the evidence nor from the taste, at a gain of 1:
    [r, A + 1]."""
    if not adapter.gain:
        return np.zeros((adapter.rank, probe.tokens.size + 1), np.float32)
    now = probe.coordinates.columns(adapter.lora_b) * np.float32(1 / adapter.gain)
    return now - _add_taste(block_of(adapter, evidence, probe), adapter.taste)


def _add_taste(block: np.ndarray, taste: np.ndarray) -> np.ndarray:
    """Return the block [r, A + 1] with the taste [A] added to its first row."""
    if not taste.size:
        return block
    total = block.copy()
    total[0, : taste.size] += taste
    return total


def without_update(adapter: MicroLoRA, before: MicroLoRA, after: MicroLoRA, probe: KLProbe) -> Update:
    """Return the adapter without the effect of one past update, from `before` to `after`."""
    old = stored_evidence(adapter, probe)
    new = old - (stored_evidence(after, probe) - stored_evidence(before, probe))
    new[1:] = np.maximum(new[1:], 0)
    trend = _unit(adapter.trend - (after.trend - before.trend))
    block = _add_taste(block_of(adapter, new, probe), adapter.taste) + residual_block(adapter, old, probe)
    _require_finite(block)
    covered = probe.coordinates.covers(adapter)
    return cap_update(UncappedUpdate(adapter, block, new, covered, trend, adapter.taste), probe)


def cap_update(whole: UncappedUpdate, probe: KLProbe, limit: float = KL_CAP) -> Update:
    """Scale the update until it is just within both caps, KL and perplexity. The search starts at the last
    gain.

    The floor is the KL of the base alone, and scaling does not lower the floor. If the base is at the limit,
    the gain is 0.
    """
    distance = _distances(whole, probe)
    share, beyond = min(1.0, max(whole.adapter.gain, 1e-3)), 1.0
    good, refusals = None, 0
    for _ in range(LOOKS):
        found = _finite(distance(share))
        room = _room(found, share, probe, limit)
        if room < 1 and good:
            if share < FAR * good[0]:
                break
            # Over a large step, the KL is not a parabola. So try a gain between the two.
            share = math.sqrt(share * good[0])
            continue
        if room < 1:  # each refusal makes the next step larger, because the KL is not exactly a parabola
            share, beyond, refusals = share * 0.97 * room ** (2**refusals), share, refusals + 1
            continue
        grown, good = good, (share, found.kl)
        if grown or share == 1.0 or room < (1.5 * SLACK if refusals else SLACK):
            break
        share = min(0.95 * share * room, (share + beyond) / 2 if refusals else 1.0)
    share, kl = good or (0.0, _finite(distance(0.0)).kl)
    return Update(whole.at(share, probe), kl)


def _require_finite(numbers: np.ndarray) -> None:
    """Raise NotFinite unless all numbers are finite and at most MAX_MAGNITUDE."""
    if not kernels.all_within(numbers, MAX_MAGNITUDE):
        raise NotFinite(BROKEN)


def _distances(whole: UncappedUpdate, probe: KLProbe) -> Callable[[float], Distance]:
    """Return a function: share -> Distance. The fast way needs an adapter that moves only the movable tokens.
    Other tokens move only if a consolidation (a run of the background or style loop) has left a part of its
    change in the adapter."""
    if whole.covered:
        return probe.distances(whole.adapter, whole.block)
    return probe.distances_dense(whole.at(1.0, probe))


def _room(found: Distance, share: float, probe: KLProbe, limit: float) -> float:
    """Return the factor by which the share can grow to the caps if both distances are parabolas. The factor
    is at least 1 only if the share is within the caps.

    The distance of the base alone is subtracted, because no share can change it.
    """
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
