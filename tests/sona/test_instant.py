from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.kernels.micro import NotFinite, beyond_noise
from ruvmlx.kernels.rating import EvidenceSolverRef, Rule
from ruvmlx.lora import MicroLoRA
from ruvmlx.lora.micro_lora import row_steps
from ruvmlx.sona import instant
from ruvmlx.sona.calibration import HeadRows, directions, features, measure, states_to_measure
from ruvmlx.sona.evidence import update_by
from ruvmlx.sona.kl_probe import log_softmax_rows
from ruvmlx.sona.reference_text import read
from ruvmlx.sona.trace import Trace

from .test_trace import traced_reply


@pytest.fixture
def probe(tiny, tiny_backend):
    config = tiny.config
    return measure(tiny_backend, tiny.tokenizer, 2, config.max_context)


@pytest.fixture
def trace(engine, tiny, probe):
    """The trace of a reply by a model that has learned nothing yet."""
    return traced_reply(engine, MicroLoRA.fresh(probe.directions, tiny.config.vocab_size), 0.7)


def update_once(adapter, trace, weight, probe, stats=None):
    """The update of one rating."""
    push = instant.ReplyPush(stats or instant.prepare_stats(trace, probe), weight, trace.log_ratio)
    return update_by(adapter, [[push]], probe)


def mean_logprob(trace, adapter, backend) -> float:
    z = backend.head(trace.hidden_states)
    adapter.add_to_logits(z, trace.hidden_states)
    z = z.astype(np.float64) - z.max(axis=1, keepdims=True)
    return float(np.mean(z[np.arange(len(z)), trace.tokens] - np.log(np.exp(z).sum(axis=1))))


@pytest.mark.parametrize("weight", [1.0, 0.3, -0.3, -1.0])
def test_the_reply_moves_the_way_it_was_rated(trace, tiny_backend, probe, weight):
    update = update_once(trace.adapter, trace, weight, probe)
    before = mean_logprob(trace, trace.adapter, tiny_backend)
    after = mean_logprob(trace, update.adapter, tiny_backend)
    assert (after - before) * weight > 0


def test_no_weight_no_update(trace, probe):
    assert update_once(trace.adapter, trace, 0.0, probe) is None


def ended_reply(trace, probe, backend) -> Trace:
    """The same reply, but that its last token ends it."""
    tokens = [*trace.tokens[:-1], int(probe.eos[0])]
    return Trace.from_hidden(trace.adapter, 0, trace.hidden_states, tokens, backend.head, None)


def end_of(values, probe) -> np.ndarray:
    """The row of the end token, of columns that are movable tokens first: [r]."""
    return values[:, probe.coordinates.ends[0]]


@pytest.mark.parametrize("short,credit", [(10, (10 / 23) ** 4), (23, 1.0), (99, 1.0)])
def test_a_rating_down_blames_a_long_reply_for_going_on(
    trace, probe, tiny_backend, monkeypatch, short, credit
):
    """The end token's gradient is credit * s u_T - s sum_t p_t(end) u_t; no other token's is changed."""
    monkeypatch.setattr(instant, "SHORT", short)
    reply = ended_reply(trace, probe, tiny_backend)
    assert len(reply.tokens) == 23
    z = tiny_backend.head(reply.hidden_states).astype(np.float64)
    p = np.exp(z)[:, probe.eos[0]] / np.exp(z).sum(axis=1)
    u = readings(reply)
    stats = instant.prepare_stats(reply, probe)
    want = reply.adapter.scale * (credit * u[-1] - p @ u)
    without = stats.gradient - stats.praise
    np.testing.assert_allclose(end_of(without, probe), want, rtol=1e-4)
    changed = np.flatnonzero(stats.praise[:, : probe.tokens.size].any(axis=0))
    assert set(changed) <= set(probe.coordinates.ends) and bool(len(changed)) == (credit < 1)
    features = without[:, : probe.tokens.size] @ probe.features
    np.testing.assert_allclose(without[:, probe.tokens.size :], features, atol=1e-4)


def test_only_a_rating_down_of_a_reply_that_ended_late_spares_the_end(
    trace, probe, tiny_backend, monkeypatch
):
    reply = ended_reply(trace, probe, tiny_backend)

    def lora_b(trace, weight, short):
        monkeypatch.setattr(instant, "SHORT", short)
        return update_once(trace.adapter, trace, weight, probe).adapter.lora_b

    assert np.array_equal(lora_b(reply, 1.0, 3), lora_b(reply, 1.0, 99))
    assert np.array_equal(lora_b(trace, -1.0, 3), lora_b(trace, -1.0, 99))  # it was cut off
    end = probe.eos[0]
    spared, blamed = (float(np.mean(readings(reply) @ lora_b(reply, -1.0, s)[:, end])) for s in (3, 99))
    assert spared > 0 > blamed


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_short_replies_are_rated_without_a_rule_for_their_end(
    trace, probe, tiny_backend, monkeypatch, weight
):
    reply, found = ended_reply(trace, probe, tiny_backend), []
    for short in (len(trace.tokens), 10**9):
        monkeypatch.setattr(instant, "SHORT", short)
        found.append(update_once(reply.adapter, reply, weight, probe).adapter.lora_b)
    assert np.array_equal(*found)


def test_a_rating_up_takes_back_what_ratings_down_did_to_the_end(trace, probe, tiny_backend, monkeypatch):
    """Alone it praises the end of a long reply; after a rating down of the same reply it cancels that."""
    monkeypatch.setattr(instant, "SHORT", 3)
    reply = ended_reply(trace, probe, tiny_backend)

    def end_pushed(adapter):
        return float(np.mean(readings(reply) @ end_of(adapter.evidence[0], probe)))

    up, down = (update_once(reply.adapter, reply, w, probe).adapter for w in (1.0, -1.0))
    assert end_pushed(up) > 0 and end_pushed(down) > 0
    stats = instant.prepare_stats(reply, probe)
    both = update_once(down, reply, 1.0, probe, stats=stats).adapter
    assert abs(end_pushed(both)) < 0.02 * end_pushed(down)


def slow_lora_b(rated, probe) -> np.ndarray:
    """instant.py's formula in float64, one coordinate at a time, from the (trace, weight) of every rating.
    Returns lora_b's columns of probe.tokens, [r, A]."""
    tokens, features = list(probe.tokens), probe.features.astype(np.float64)
    said = np.zeros((2, len(tokens)))
    theta = np.zeros((2, features.shape[1]))
    for r in range(2):
        signal = noise = 0.0
        for j in range(len(tokens)):
            g, s, information = slow_sums(
                rated,
                lambda t, r=r, j=j: t.grad_b[r, tokens[j]],
                lambda t, r=r, j=j: slow_fisher(t, r, tokens[j]),
            )
            said[r, j] = slow_step(instant.TOKEN, g, s, probe.precision[j] + information)
        for k in range(features.shape[1]):
            g, s, information = slow_sums(
                rated,
                lambda t, r=r, k=k: t.grad_b[r, tokens] @ features[:, k],
                lambda t, r=r: t.adapter.scale**2 * np.sum(readings(t)[:, r] ** 2),
            )
            theta[r, k] = slow_step(instant.FEATURE, g, s, probe.precision[len(tokens) + k] + information)
            signal, noise = signal + g * g, noise + s
        theta[r] *= max(0, 1 - instant.FEATURE.noise * noise / signal)
    return said + theta @ features.T


def readings(trace) -> np.ndarray:
    return (trace.hidden_states @ trace.adapter.lora_a).astype(np.float64)


def slow_fisher(trace, r, token) -> float:
    u, scale, drawn = readings(trace), trace.adapter.scale, np.asarray(trace.tokens) == token
    expected = max(0.0, u[drawn, 0].sum() - trace.grad_b[0, token] / scale)
    return scale**2 * np.mean(u[:, r] ** 2) * expected


def slow_sums(rated, gradient, fisher) -> tuple[float, float, float]:
    g = s = information = trend = 0.0
    for trace, weight in rated:
        agreed = np.clip(weight, -1, 1) * np.clip(trace.log_ratio / instant.MOVED, -1, 1)
        trend += (agreed - trend) / instant.TREND_RATINGS
        left = 1 - instant.FADE
        if trend < 0:
            left += instant.TURNED * trend
        g = left * g + weight * float(gradient(trace))
        s = left * s + (weight * float(gradient(trace))) ** 2
        information = left * information + abs(weight) * fisher(trace)
    return g, s, information


def slow_step(push, g, s, precision) -> float:
    return push.step * g / precision * g * g / (g * g + push.agree * s + 1e-12)


def test_weights_are_what_the_formula_says(trace, probe, tiny_backend, monkeypatch):
    """Five ratings, each by the model that the one before left; no cap in the way."""
    for cap in ("KL_CAP", "RISE_CAP", "PER_RATING"):
        monkeypatch.setattr(instant, cap, 100.0)
    for kind, step, noise in ("TOKEN", 0.5, 0.0), ("FEATURE", 0.05, 0.2):
        monkeypatch.setattr(instant, kind, replace(getattr(instant, kind), step=step, noise=noise))
    monkeypatch.setattr(instant, "RULE", Rule(instant.TOKEN, instant.FEATURE))
    rated, faded = [], False
    for weight in (1.0, -0.3, 0.7, 0.8, 0.9):
        rated.append((trace, weight))
        adapter = update_once(trace.adapter, trace, weight, probe).adapter
        trace = trace.replay(adapter, 0, tiny_backend.head)
        faded = faded or adapter.trend < 0
    assert faded
    g, s, _ = adapter.evidence[..., probe.tokens.size :]
    assert adapter.gain == 1 and beyond_noise(g, s, instant.FEATURE.noise).max() > 0.1
    want = slow_lora_b(rated, probe)
    np.testing.assert_allclose(
        adapter.lora_b[:, probe.tokens], want, rtol=1e-2, atol=1e-3 * np.abs(want).max()
    )


def test_ratings_are_forgotten_when_the_taste_turns():
    """Replies that older ratings made likely, praised for a while, then punished."""
    trend, left = 0.0, []
    for weight in (1.0, -0.2) * 20 + (-1.0,) * 10:
        trend = instant.next_trend(trend, weight, instant.MOVED / 2)
        left.append(instant.retention_factor(trend))
    assert min(left[:40]) == 1 - instant.FADE
    assert np.prod(left[40:]) < 0.3


def test_a_long_turn_of_taste_forgets_all_and_no_more():
    """After fifty contrary ratings the factor was below 0: old evidence came back with the other sign."""
    trend = 0.0
    for _ in range(100):
        trend = instant.next_trend(trend, -1.0, instant.MOVED)
        assert 0 <= instant.retention_factor(trend) <= 1
    assert instant.retention_factor(-1.0) == 0


def test_wrong_ratings_now_and_then_are_no_change_of_taste():
    rng, trend, left = np.random.default_rng(5), 0.2, []
    for liked, wrong in zip(rng.random(200) < 0.4, rng.random(200) < 0.2, strict=True):
        weight = (0.8 if liked else -0.5) * (-1 if wrong else 1)
        trend = instant.next_trend(trend, weight, 0.12 if liked else 0.03)
        left.append(instant.retention_factor(trend))
    assert np.mean(left) > 0.98


def test_what_ratings_agree_on_counts_and_what_they_contradict_does_not(probe):
    """The same push four times, against the same four times there and back."""
    one, a = np.full((2, probe.precision.size), 0.5, np.float32), probe.tokens.size
    alike, torn = (np.stack([sum_, 4 * one**2, one]) for sum_ in (4 * one, 0.1 * one))
    want = 4 * one / (probe.precision + one)
    for push, part in (instant.TOKEN, slice(0, a)), (instant.FEATURE, slice(a, None)):
        want[:, part] *= push.step * (1 - push.noise / 4) * 16 / (16 + 4 * push.agree)
    want = np.pad(want[:, :a] + want[:, a:] @ probe.features.T, ((0, 0), (0, 1)))
    found = pushed_weights(alike, probe)
    np.testing.assert_allclose(found, want, rtol=1e-2, atol=1e-3 * np.abs(want).max())
    assert np.abs(pushed_weights(torn, probe)).max() < 1e-4 * np.abs(found).max()


def pushed_weights(evidence, probe) -> np.ndarray:
    """The lora_b that the evidence gives, without a cap."""
    return probe.coordinates.solver.block(evidence, instant.RULE)


@pytest.mark.parametrize("size", [0.02, 0.1])
def test_what_is_asked_is_what_its_twin_says(trace, probe, size):
    evidence, adapter = strong_evidence(probe, size), trace.adapter
    twin = EvidenceSolverRef(probe.precision, probe.features.astype(np.float16), probe.coordinates.ends)
    want = twin.block(evidence, instant.RULE, probe.answer_contexts(adapter), adapter.scale)
    found = instant.block_of(adapter, evidence, probe)
    np.testing.assert_allclose(found, want, atol=1e-4 * np.abs(want).max())


def test_features_say_nothing_where_chance_explains_all(probe):
    rng = np.random.default_rng(4)
    g = rng.normal(size=(50, 2, probe.coordinates.k))
    noise, taste = ((x.sum(axis=0), (x * x).sum(axis=0)) for x in (g, g + 0.5))
    much = instant.FEATURE.noise
    assert beyond_noise(*noise, much).max() < 0.4 and beyond_noise(*taste, much).min() > 0.8


def strong_evidence(probe, size=1.0) -> np.ndarray:
    """Many ratings that agree, as [3, r, A + k]."""
    g = size * np.random.default_rng(8).normal(size=(2, probe.precision.size)).astype(np.float32)
    return np.stack([g, g * g / 200, np.ones_like(g)])


def slow_said(probe, adapter, block) -> float:
    """KL of tokens other than end-of-reply, over the whole vocabulary, from each answer's own probabilities,
    float64."""
    p = np.exp(log_softmax_rows(probe.head(probe.contexts[: probe.answers]))).astype(np.float64)
    push = np.zeros((2, p.shape[1]))
    push[:, probe.tokens] = block[:, :-1]
    push[:, probe.eos] = 0
    d = adapter.scale * (probe.contexts[: probe.answers] @ adapter.lora_a) @ push
    new = p * np.exp(d)
    new /= new.sum(axis=1, keepdims=True)
    return float(np.mean(np.sum(new * np.log(new / p), axis=1)))


@pytest.mark.parametrize("size", [0.001, 0.02, 0.05, 0.3])
@pytest.mark.parametrize("reads", [1.0, 0.3])  # what was measured; another's, that reads less
def test_what_replies_say_is_held_back_and_their_end_is_not(probe, trace, size, reads):
    adapter = replace(trace.adapter, lora_a=trace.adapter.lora_a * np.float32(reads))
    evidence = strong_evidence(probe, size)
    free = pushed_weights(evidence, probe)
    held = instant.block_of(adapter, evidence, probe)
    before, after = slow_said(probe, adapter, free), slow_said(probe, adapter, held)
    quiet = free.copy()
    quiet[:, probe.coordinates.ends] = 0
    found = probe.answer_contexts(adapter).distance(quiet, adapter.scale)
    assert found[0] == pytest.approx(before, rel=1e-3, abs=1e-6)
    if before <= instant.SAID_CAP:
        np.testing.assert_array_equal(held, free)
    else:
        assert after == pytest.approx(instant.SAID_CAP, rel=0.1)
    others = np.setdiff1d(np.arange(probe.tokens.size + 1), probe.coordinates.ends)
    assert len(probe.coordinates.ends) == len(probe.eos)
    np.testing.assert_array_equal(held[:, probe.coordinates.ends], free[:, probe.coordinates.ends])
    share = np.sum(held[:, others] * free[:, others]) / np.sum(free[:, others] ** 2)
    np.testing.assert_allclose(held[:, others], share * free[:, others], rtol=1e-4, atol=1e-6)


def test_what_is_held_back_leaves_no_trace(trace, probe):
    """From evidence that asks for too much to one that does not, and back: the same, but for rounding."""
    much, little = strong_evidence(probe, 0.3), strong_evidence(probe, 0.001)
    first = step(trace.adapter, much, much, probe).at(0.5, probe)
    second = step(first, much, little, probe).at(0.7, probe)
    back = step(second, little, much, probe).at(0.5, probe)
    # Each step leaves out a rest below one step of the rounding.
    np.testing.assert_allclose(back.lora_b, first.lora_b, atol=4 * row_steps(second.lora_b).max())


def step(adapter, before, evidence, probe) -> instant.UncappedUpdate:
    """Update an adapter whose evidence was `before` to this evidence."""
    block = instant.block_of(adapter, evidence, probe) + instant.residual_block(adapter, before, probe)
    return instant.UncappedUpdate(adapter, block, evidence, probe.coordinates.covers(adapter))


def test_a_rating_is_taken_back(trace, probe, tiny_backend):
    """Less the second of two updates, the adapter is nearly what the first one left, but for its gain."""
    first = update_once(trace.adapter, trace, 1.0, probe).adapter
    again = trace.replay(first, 0, tiny_backend.head)
    second = update_once(first, again, -1.0, probe).adapter
    back = instant.without_update(second, first, second, probe).adapter
    whole = [adapter.lora_b / adapter.gain for adapter in (first, second, back)]
    assert np.abs(whole[2] - whole[0]).max() < 0.1 * np.abs(whole[1] - whole[0]).max()


def test_the_caps_hold_and_are_no_tighter_than_needed(trace, probe):
    rng = np.random.default_rng(2)
    b = np.zeros_like(trace.adapter.lora_b)
    b[:, probe.tokens] = rng.normal(size=(2, probe.tokens.size)) * 3
    far = replace(trace.adapter, lora_b=b)
    assert probe.kl(far) > instant.KL_CAP
    capped = instant.cap_update(
        instant.UncappedUpdate(far, probe.coordinates.columns(b), far.evidence, True), probe
    )
    found = probe.distance(capped.adapter)
    assert capped.kl == pytest.approx(found.kl, rel=1e-5)
    assert found.kl <= instant.KL_CAP and found.rise <= instant.RISE_CAP
    assert found.kl > 0.4 * instant.KL_CAP or found.rise > 0.4 * instant.RISE_CAP


def test_two_hundred_ratings_one_way_stay_within_the_caps(trace, probe, tiny_backend):
    adapter = trace.adapter
    for _ in range(200):
        update = update_once(adapter, trace, 1.0, probe)
        adapter, found = update.adapter, probe.distance(update.adapter)
        assert update.kl <= instant.KL_CAP and found.rise <= instant.RISE_CAP
        trace = trace.replay(adapter, 0, tiny_backend.head)


def strong_update(trace, probe, adapter, kl=0.0) -> instant.Update:
    """One rating with a taste that would go far beyond every limit."""
    a = probe.tokens.size
    taste = 50 * np.random.default_rng(6).normal(size=a).astype(np.float32)
    push = instant.ReplyPush(instant.prepare_stats(trace, probe), 1.0, trace.log_ratio)
    return update_by(adapter, [[push]], probe, kl, taste=taste)


def test_one_rating_moves_answers_by_half_of_what_all_may(trace, probe, tiny_backend, monkeypatch):
    """0.05 nats per token at first, 0.1 with the second, and no more: docs/learning.md."""
    monkeypatch.setattr(instant, "RISE_CAP", 100.0)
    adapter, kl, found = trace.adapter, 0.0, []
    for _ in range(3):
        update = strong_update(trace, probe, adapter, kl)
        adapter, kl = update.adapter, update.kl
        found.append(probe.distance(adapter).kl)
        trace = trace.replay(adapter, 0, tiny_backend.head)
    first, *later = found
    assert 0.03 < first <= 0.0501 and all(0.06 < kl <= 0.1001 for kl in later)


def test_ratings_raise_the_perplexity_of_prose_by_little(trace, probe, monkeypatch):
    """By 1 percent at most, where nothing else is in the way: docs/ratings.md."""
    for cap in ("KL_CAP", "PER_RATING"):
        monkeypatch.setattr(instant, cap, 100.0)
    found = probe.distance(strong_update(trace, probe, trace.adapter).adapter)
    assert 1.005 < np.exp(found.rise) <= 1.0091


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("where", ["grad_a", "grad_b", "lora_a", "lora_b"])
def test_nothing_that_is_not_finite_comes_out(trace, probe, poison, where):
    """Poison anywhere either raises, or (1e30) ends within the cap; the old adapter keeps its bytes."""
    owner = trace.adapter if where.startswith("lora") else trace
    getattr(owner, where)[-1, -1] = poison
    before = trace.adapter.to_bytes()
    try:
        update = update_once(trace.adapter, trace, 1.0, probe)
    except NotFinite:
        pass
    else:
        assert update.kl <= instant.KL_CAP and np.isfinite(update.adapter.lora_b).all()
    assert trace.adapter.to_bytes() == before


def test_directions_read_replies_and_not_prose():
    """Replies lie apart from prose along one axis, and in them the end comes near along another."""
    rng = np.random.default_rng(1)
    states = rng.normal(size=(600, 16))
    in_reply = np.arange(600) < 300
    states[:, 0] += 8 * in_reply
    states[:, 2] += 8 * ~in_reply
    ending = 3 * states[:, 1] + rng.normal(size=600)
    u = states @ directions(states, in_reply, ending)
    np.testing.assert_allclose(u[in_reply, 0].mean(), 1, rtol=1e-5)
    np.testing.assert_allclose(u[in_reply, 1].std(), 1, rtol=1e-3)
    assert abs(u[~in_reply].mean(axis=0)).max() < 0.2
    assert np.corrcoef(u[in_reply, 1], ending[in_reply])[0, 1] > 0.8


def test_features_are_white_and_keep_what_is_alike_together():
    """Three kinds of tokens with the same row in each: one feature value for all of a kind."""
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(3, 5)).astype(np.float32).repeat(10, axis=0)
    frequency = rng.random(30)
    head = lambda h: h @ np.pad(rows, ((2, 4), (0, 0))).T  # noqa: E731
    found = features(HeadRows(5, np.arange(2, 32)).run(head, lambda: None), frequency)
    assert found.shape == (30, 2)
    p = frequency / frequency.sum()
    np.testing.assert_allclose((found * p[:, None]).T @ found, np.eye(2), atol=1e-3)
    np.testing.assert_allclose(p @ found, 0, atol=1e-4)
    np.testing.assert_allclose(found.reshape(3, 10, 2).std(axis=1), 0, atol=1e-4)


def test_distance_over_some_tokens_is_that_over_all(trace, probe):
    """A prior of a third of the vocabulary: the other tokens count as one, and nothing is lost."""
    few = probe.tokens[::3]
    packed = replace(probe, tokens=few)
    adapter = random_adapter(trace, few)
    adapter = replace(
        adapter, lora_a=adapter.lora_a * np.float32(1.001)
    )  # so that no more than contexts counts
    assert len(probe.few) == len(probe.contexts)
    got, want = packed.distance(adapter), probe.distances_dense(adapter)(1.0)
    assert (got.kl, got.rise) == pytest.approx((want.kl, want.rise), abs=1e-5)


def test_the_distance_of_a_share_of_all_that_an_adapter_moves(trace, probe):
    """One that a consolidation has left a tail in, beside the tokens that ratings may move."""
    adapter = replace(random_adapter(trace, np.arange(probe.vocab_size), 0.05), gain=0.5)
    block = 2 * probe.coordinates.columns(random_adapter(trace, probe.tokens, 0.1).lora_b)
    few = replace(probe, tokens=np.ascontiguousarray(probe.tokens[::3]))
    third = [*range(0, probe.tokens.size, 3), probe.tokens.size]
    whole = instant.UncappedUpdate(adapter, np.ascontiguousarray(block[:, third]), adapter.evidence, False)
    for share in (0.3, 1.0):
        got = instant._distances(whole, few)(share)
        want = few.distances_dense(whole.at(share, few))(1.0)
        assert (got.kl, got.rise) == pytest.approx((want.kl, want.rise), rel=1e-4, abs=1e-6) and got.kl > 1e-4


def random_adapter(trace, tokens, size=1.0) -> MicroLoRA:
    b = np.zeros_like(trace.adapter.lora_b)
    b[:, tokens] = size * np.random.default_rng(3).normal(size=(2, len(tokens)))
    return replace(trace.adapter, lora_b=b)


def test_prose_that_is_read_most_is_looked_at_whole():
    readings = np.random.default_rng(6).normal(size=(500, 2))
    rows, counts = states_to_measure(readings, 100)
    answers, loud, rest = np.split(rows, np.cumsum(counts)[:-1])
    assert len(answers) and answers.max() < 100 <= min(loud.min(), rest.min())
    size = np.sum(readings**2, axis=1)
    assert len(loud) and size[loud].min() == np.sort(size[100:])[-len(loud)]
    assert not set(loud) & set(rest) and len({*rows.tolist()}) == len(rows)


def test_groups_of_prose_count_by_the_states_they_stand_for(probe):
    counts, prose = np.array([2, 3, 4]), np.array(30)
    few = replace(probe, counts=counts, prose=prose)
    assert few.groups.of(np.arange(9)) == [(2, 0.0), (3, 0.1), (4, 0.9)]
    some = few.groups.of(np.array([0, 1, 6, 8]))  # none of those that count for themselves
    assert some == [(2, 0.0), (0, 0.0), (2, 1.0)]


def test_the_rise_is_nearly_that_of_all_prose(whole_text, trace, probe, tiny, tiny_backend):
    """A few contexts and the exact linear part of all come closer to all than the few alone."""
    adapter = random_adapter(trace, probe.tokens, 0.05)
    texts = read(tiny_backend, tiny.tokenizer, tiny.config.max_context)
    states, following, answers = texts.states, texts.following, texts.answers
    z = tiny_backend.head(states[answers:])
    frozen = log_softmax_rows(z)
    adapter.add_to_logits(z, states[answers:])
    at = np.arange(len(z)), following[answers:]
    want = float(np.mean(frozen[at] - log_softmax_rows(z)[at]))
    found, few = probe.distance(adapter), probe.distances_dense(adapter)(1.0)
    assert abs(found.rise - want) < 0.5 * abs(few.rise - want)
    slope = probe.distances(adapter, probe.coordinates.columns(adapter.lora_b))(1e-3)
    assert slope.rise == pytest.approx(1e-3 * slope.slope, rel=0.05)
