"""The instant loop updates lora_b of the MicroLoRA (the LoRA of the output head) at once after each rating.

A rating says that a reply was good or bad, but not why the user thinks so. Changes on which several ratings
agree show the user's taste; all other changes show mostly the topics of the replies. So lora_b is computed
from all ratings so far, and a change is larger if more ratings agree on it. A movable token is a token whose
logit ratings may change. For the movable tokens, lora_b is written in coordinates (coordinates.py): one
coordinate for each token, and one for each feature. A feature is a direction in which the logits of similar
tokens change together:
    lora_b = gain * (held_back(theta_tokens + theta_features @ features^T) + taste)
    (theta: the coordinates; gain and held_back: scales that keep the KL small; @: the matrix product)

`taste` is the part of lora_b that the taste model adds (taste_push.py). A part of lora_b from another source
(`residual_block`) is added unchanged. For reply i with weight w_i, gradient g_i of its log-probability (E_b
of trace.py) and Fisher information f_i in these coordinates,
    G = sum w_i g_i      S = sum (w_i g_i)^2      L = sum |w_i| f_i      (sums over the rated replies i)

    theta = step * G / (1 / sigma^2 + L) * G^2 / (G^2 + agree * S)      (for each coordinate)

step * G / (1 / sigma^2 + L) is a natural gradient step with a prior of standard deviation sigma. The last
factor of theta is Wiener's shrinkage. Wiener's factor depends on G^2 / S, which is 1 for a coordinate that
one reply moved, n if n ratings agree on the coordinate, and near 0 if the ratings contradict each other.
There are many features, and each feature moves all movable tokens, so the noise of the features would add up.
All features of one row of lora_b are therefore multiplied by James and Stein's factor max(0, 1 - noise * sum
S / sum G^2). lora_a keeps its calibrated values (calibration.py).

A bad rating (weight below 0) must not punish the end of a long reply: the fault is that the reply did not end
earlier. So in a bad rating, the end token of a reply of T tokens has the weight end_credit(T), which is 1 for
a short reply and near 0 for a long reply. If end_credit(T) is 0, the gradient that remains for the end token,
-sum_t p_t(end) u_t (p_t(end): the probability of an end at position t; u_t: the state at t times lora_a), is
the gradient of the log-probability that the reply goes on for T tokens. A step against this gradient makes an
end likelier at each position where the end had some probability. If earlier ratings have made the end of a
long reply likelier, a good rating uses this gradient, too, and so makes an end less likely again, because a
user who likes half of all long replies does not ask for shorter replies.

With the reason "too long", end_credit is 0 for a reply of any length. With the reason "too short", a rating
leaves the end tokens alone, and the push of the reason makes an end less likely.

A preference between two replies to one question is one piece of evidence. The w_i g_i of a preference is the
sum of both replies' terms. The weights of the two replies have opposite signs, so the parts that both replies
share cancel.

Each update multiplies the evidence of all earlier ratings by at most 1 - FADE, because tastes change. The
adapter also keeps a trend, -1 to 1: a moving mean over about TREND_RATINGS ratings of how much each rating
agrees with earlier ones. The trend is below 0 while the latest ratings punish replies that earlier ratings
made more likely. While the trend is below 0, the older evidence fades faster, in proportion to the trend.

A change of where replies end hardly reduces the variety of replies, but a change of other tokens does. So
held_back scales all tokens except the end-of-reply tokens down until these other tokens add a KL of at most
about SAID_CAP. The scale of held_back is computed from the evidence, lora_a and the frozen model, and is not
stored.

The last step of an update limits its size. If the KL of answers to the reference text's questions exceeds
KL_CAP or the old KL plus PER_RATING, or if the log-perplexity of prose has risen by more than RISE_CAP,
lora_b is scaled down. `gain` keeps the scale, and the search of the next rating starts from this gain.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..kernels import micro as kernels
from ..kernels.micro import NotFinite
from ..kernels.rating import Push, Rule
from ..lora import MicroLoRA
from ..lora.micro_lora import row_steps
from .kl_probe import Distance, KLProbe
from .trace import ReplyStats, Trace

# The maximum KL(learned || frozen) in answers to the questions of the reference text, nats per token
KL_CAP = 0.1
# The KL, in nats per token, to which held_back limits the change of all tokens except end-of-reply tokens.
# The rest of KL_CAP is for end-of-reply tokens and the taste model's push (taste_push.py).
SAID_CAP = KL_CAP / 5
# The maximum rise of the negative log-likelihood of prose, nats per token. The rise on other prose was at
# most 2.03 times the rise on the reference text (docs/evidence.md), and may be at most log(1.02).
RISE_CAP = math.log(1.009)
PER_RATING = 0.05  # the maximum KL that one rating adds, nats per token
TOKEN = Push(step=1.0, agree=12.0, noise=0.0)  # agree: 12 ratings that agree give half of the full step
FEATURE = Push(step=1.5, agree=12.0, noise=1.0)
RULE = Rule(TOKEN, FEATURE, SAID_CAP)
FADE = 0.005
TURNED = 1.0  # the share of the older evidence that fades at a trend of -1, besides the share FADE
TREND_RATINGS = 8  # the number of ratings in the trend's moving mean
MOVED = 0.15  # nats per token; ratings have clearly made a reply more likely if its log-ratio is this large
SHORT = 100  # tokens; a bad rating gives the end token its full weight in a reply of at most this length
MAX_MAGNITUDE = 1e8  # the maximum size of a weight or gradient; a larger number is an error
LOOKS = 6  # the maximum number of KL measurements in the search for the gain; if all fail, the gain is 0
BROKEN = "a weight or gradient is NaN, infinite or far too large"
FAR = 3.0  # if a refused gain is this many times an accepted gain, a gain between the two is tried
SLACK = 1.2  # the search ends at a gain within the caps if this many times the gain would exceed a cap


@dataclass(frozen=True)
class ReplyPush:
    """One reply's part in an update of the weights.

    weight: the strength of the update; above 0, the reply becomes likelier
    log_ratio: the reply's log-ratio (Trace.log_ratio), nats per token
    """

    stats: ReplyStats
    weight: float
    log_ratio: float


@dataclass(frozen=True)
class Update:
    adapter: MicroLoRA
    kl: float  # KL(new || frozen) in answers of the reference text


@dataclass(frozen=True)
class UncappedUpdate:
    """The update that all ratings give, before it is scaled down to the caps.

    block: [r, A + 1], the r rows of lora_b at a gain of 1: a column for each of the A movable tokens, and a
        last column of zeros. The gain also scales the columns of all other tokens, which the block does not
        have.
    covered: True if lora_b is 0 for all tokens that are not movable
    taste: [A], the part of the block's first row that the taste model adds
    """

    adapter: MicroLoRA
    block: np.ndarray
    evidence: np.ndarray
    covered: bool
    trend: float = 0.0
    taste: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    def at(self, gain: float, probe: KLProbe) -> MicroLoRA:
        """Return the adapter after the update at this gain."""
        old, now = self.adapter, self.adapter.gain
        kept = 0.0 if self.covered or not now else gain / now
        b = kernels.micro_place(old.lora_b, kept, self.block, probe.tokens, gain, MAX_MAGNITUDE)
        return MicroLoRA(old.lora_a, b, self.evidence, gain, self.trend, old.alpha, self.taste)


def update_trend(adapter: MicroLoRA, pushes: Sequence[ReplyPush], kl: float) -> Update | None:
    """Update only the adapter's trend, because the learner's ratings do not change the output head. Return
    None if all pushes have a weight of 0."""
    given = [push for push in pushes if push.weight != 0]
    trend = adapter.trend
    for push in given:
        require_weight(push.weight)
        trend = next_trend(trend, push.weight, push.log_ratio)
    return Update(replace(adapter, trend=trend), kl) if given else None


def require_weight(weight: float) -> None:
    """Raise NotFinite unless a rating's weight is finite."""
    if not math.isfinite(weight):
        raise NotFinite(f"the rating's weight is {weight}")


def rescale_to_caps(adapter: MicroLoRA, probe: KLProbe, taste: np.ndarray | None = None) -> Update:
    """Return the adapter, scaled so that it is within both caps (KL in answers, perplexity of prose). probe:
    a newly measured KL probe. taste: [A], the taste model's new part; None to keep the adapter's part."""
    inverse = np.float32(1 / adapter.gain if adapter.gain else 0)
    block = probe.coordinates.columns(adapter.lora_b) * inverse
    if taste is not None:
        block = add_taste(add_taste(block, -inverse * adapter.gain * adapter.taste), taste)
    _require_finite(block)
    covered, new = probe.coordinates.covers(adapter), adapter.taste if taste is None else taste
    return cap_update(UncappedUpdate(adapter, block, adapter.evidence, covered, adapter.trend, new), probe)


def judge_end(trace: Trace, reason: str, probe: KLProbe) -> Trace:
    """Return the trace of a reply for a bad rating. The reasons "long" and "short" set the weight of the end
    tokens in this rating. For any other reason, and without a reason, the length of the reply sets the
    weight."""
    if reason not in ("long", "short"):
        return trace
    judged = copy.copy(trace)
    judged.stats = prepare_stats(trace, probe, reason)
    return judged


def prepare_stats(trace: Trace, probe: KLProbe, reason: str = "") -> ReplyStats:
    """Compute all statistics of a reply that a later rating will need. reason: the reason of a bad
    rating"""
    with np.errstate(all="ignore"):  # `ReplyStats.finite` and the update check for NaN and Inf later
        adapter, scale = trace.adapter, np.float32(trace.adapter.scale)
        gradient = trace.grad_b.take(probe.tokens, axis=1)
        u = trace.hidden_states @ adapter.lora_a
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
        if reason == "short":
            gradient[:, ends] = 0
        else:
            praise[:, ends] = np.float32(1 - (0 if reason == "long" else end_credit(len(u)))) * ended
        return ReplyStats(
            np.concatenate([gradient, gradient @ probe.features], axis=1),
            np.concatenate([praise, praise @ probe.features], axis=1),
            np.concatenate([by_token, by_feature], axis=1),
            rest,
            probe.coordinates.covers(adapter),
            all(kernels.all_within(x, MAX_MAGNITUDE) for x in (trace.grad_a, trace.grad_b, adapter.lora_a)),
        )


def gradient_of(stats: ReplyStats, weight: float, evidence: np.ndarray, probe: KLProbe) -> np.ndarray:
    """Return the gradient [r, A + k] that, times `weight`, a rating adds to the evidence (r rows of lora_b, A
    movable tokens, k features)."""
    tokens = probe.tokens.size
    # `likelier` is True if earlier ratings have made the end of this reply likelier.
    likelier = np.vdot(stats.praise[:, :tokens], evidence[0, :, :tokens]) > 0
    return stats.gradient - stats.praise if weight < 0 or likelier else stats.gradient


def end_credit(tokens: int) -> float:
    """Return the weight, 0 to 1, of the end token in a bad rating. The weight is near 0 for a long reply.
    tokens: the length of the reply in tokens.
    """
    return min(1.0, (SHORT / tokens) ** 4)


def next_trend(trend: float, weight: float, log_ratio: float) -> float:
    """Return the adapter's trend (module docstring) after one more rating, in [-1, 1]. The trend is above 0
    while ratings agree with earlier ratings, for example praise replies that the earlier ratings made more
    likely.

    log_ratio: the reply's log-ratio (Trace.log_ratio), nats per token
    """
    agreed = _unit(weight) * _unit(log_ratio / MOVED)
    return trend + (agreed - trend) / TREND_RATINGS


def _unit(x: float) -> float:
    return max(-1.0, min(1.0, x))


def retention_factor(trend: float) -> float:
    """Return the factor, at least 0, by which a rating multiplies the older evidence. trend: the trend after
    this rating."""
    return max(0.0, 1 - FADE - TURNED * max(0.0, -trend))


def stored_evidence(adapter: MicroLoRA, probe: KLProbe) -> np.ndarray:
    """Return the sums G, S and L of an adapter's ratings: [3, r, A + k]; zeros if the adapter has no sums of
    this shape."""
    shape = (3, adapter.rank, probe.precision.size)
    return adapter.evidence if adapter.evidence.shape == shape else np.zeros(shape, np.float32)


def block_of(adapter: MicroLoRA, evidence: np.ndarray, probe: KLProbe) -> np.ndarray:
    """Return the block [r, A + 1] that the evidence [3, r, A + k] gives at a gain of 1. The block is
    held_back(theta): lora_b's columns of the A movable tokens, and a column of zeros."""
    return probe.coordinates.solver.block(evidence, RULE, probe.answer_contexts(adapter), adapter.scale)


def residual_block(adapter: MicroLoRA, evidence: np.ndarray, probe: KLProbe) -> np.ndarray:
    """Return the part of lora_b, at a gain of 1, that comes neither from ratings nor from the taste model:
    [r, A + 1]."""
    if not adapter.gain:
        return np.zeros((adapter.rank, probe.tokens.size + 1), np.float32)
    inverse = np.float32(1 / adapter.gain)
    now = probe.coordinates.columns(adapter.lora_b) * inverse
    rest = now - add_taste(block_of(adapter, evidence, probe), adapter.taste)
    # A value below one rounding step comes from `MicroLoRA.rounded_copy`. If each rating kept these rounding
    # errors, they would add up.
    rest[np.abs(rest) < row_steps(adapter.lora_b) * inverse] = 0
    return rest


def add_taste(block: np.ndarray, taste: np.ndarray) -> np.ndarray:
    """Return the block [r, A + 1] with the taste model's part [A] added to its first row."""
    if not taste.size:
        return block
    total = block.copy()
    total[0, : taste.size] += taste
    return total


def taste_part(adapter: MicroLoRA, tokens: np.ndarray) -> np.ndarray:
    """Return the part of lora_b [r, V] that the taste model adds. tokens: [A], the movable tokens."""
    part = np.zeros_like(adapter.lora_b)
    if adapter.taste.size:
        part[0, tokens] = np.float32(adapter.gain) * adapter.taste
    return part


def without_update(adapter: MicroLoRA, before: MicroLoRA, after: MicroLoRA, probe: KLProbe) -> Update:
    """Return the adapter without the effect of one past update, which changed `before` into `after`. The
    later fading of this update's evidence is not taken into account."""
    old = stored_evidence(adapter, probe)
    new = old - (stored_evidence(after, probe) - stored_evidence(before, probe))
    new[1:] = np.maximum(new[1:], 0)
    trend = _unit(adapter.trend - (after.trend - before.trend))
    block = add_taste(block_of(adapter, new, probe), adapter.taste) + residual_block(adapter, old, probe)
    _require_finite(block)
    covered = probe.coordinates.covers(adapter)
    return cap_update(UncappedUpdate(adapter, block, new, covered, trend, adapter.taste), probe)


def cap_update(whole: UncappedUpdate, probe: KLProbe, limit: float = KL_CAP) -> Update:
    """Search, with at most LOOKS measurements, for a large gain at which the update is within both caps, of
    KL and of perplexity. Return the update at this gain, or at 0 if no gain is found. The search starts at
    about the gain before the update.

    A gain scales only this update, so no gain lowers the KL of the base LoRA alone. If the base LoRA alone is
    at the limit, the gain is about 0.
    """
    distance = _distances(whole, probe)
    gain = min(1.0, max(whole.adapter.gain, 1e-3))
    good: tuple[float, float] | None = None  # the largest gain within the caps so far, and its KL
    refused: list[float] = []  # the gains beyond a cap before the first gain within the caps
    for _ in range(LOOKS):
        found = _finite(distance(gain))
        growth = _growth(found, gain, probe, limit)
        if growth >= 1:
            is_second, good = good is not None, (gain, found.kl)
            if is_second or gain == 1.0 or growth < (1.5 * SLACK if refused else SLACK):
                break
            gain = min(0.95 * gain * growth, (gain + refused[-1]) / 2 if refused else 1.0)
        elif good is None:
            # take a larger step down after each refusal, because the KL is not exactly a parabola
            refused.append(gain)
            gain = gain * 0.97 * growth ** (2 ** (len(refused) - 1))
        elif gain < FAR * good[0]:
            break
        else:
            # Over a large change of the gain, the KL is not a parabola. So try a gain between the accepted
            # gain and the refused gain.
            gain = math.sqrt(gain * good[0])
    gain, kl = good or (0.0, _finite(distance(0.0)).kl)
    return Update(whole.at(gain, probe), kl)


def _require_finite(numbers: np.ndarray) -> None:
    """Raise NotFinite unless all numbers are finite and at most MAX_MAGNITUDE."""
    if not kernels.all_within(numbers, MAX_MAGNITUDE):
        raise NotFinite(BROKEN)


def _distances(whole: UncappedUpdate, probe: KLProbe) -> Callable[[float], Distance]:
    """Return a function f: f(gain) is the update's distance from the frozen model at this gain.
    `probe.distances` is fast, but needs an adapter that changes only movable tokens. An adapter changes other
    tokens if it was imported, or if a consolidation (a run of the background or style loop) left a part of
    its change in the adapter."""
    if whole.covered:
        return probe.distances(whole.adapter, whole.block)
    return probe.distances_dense(whole.at(1.0, probe))


def _growth(found: Distance, gain: float, probe: KLProbe, limit: float) -> float:
    """Return the factor by which the gain can grow until a cap is reached. If the gain is not within the
    caps, the factor is below 1. The estimate supposes that KL and rise are parabolas of the factor t:
    KL(t) = kl * t^2 and rise(t) = linear * t + bend * t^2.

    The KL and the rise of the base LoRA alone are subtracted, because no gain can change them.
    """
    kl, most_kl = found.kl - probe.floor, max(limit - probe.floor, 1e-5)
    rise, most_rise = found.rise - probe.rise, max(RISE_CAP - probe.rise, 1e-5)
    by_kl = math.sqrt(most_kl / kl) if kl > 0 else math.inf
    linear = found.slope * gain
    growth = min(by_kl, _first_root(linear, rise - linear, most_rise))
    return growth if kl <= most_kl and rise <= most_rise else min(growth, 0.999)


def _first_root(linear: float, bend: float, most: float) -> float:
    """Return the smallest t > 0 with linear * t + bend * t^2 = most, for most > 0; infinity: none."""
    square = linear**2 + 4 * bend * most
    if square > 0 and linear + math.sqrt(square) > 0:
        return 2 * most / (linear + math.sqrt(square))
    return math.inf


def _finite(found: Distance) -> Distance:
    if not (math.isfinite(found.kl) and math.isfinite(found.rise)):
        raise NotFinite(f"KL to the frozen model is {found.kl}")
    return found
