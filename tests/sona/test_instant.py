from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.kernels.micro import NotFinite
from ruvmlx.lora import MicroLoRA
from ruvmlx.sona import instant
from ruvmlx.sona.neutral import directions, measure

from .test_trace import traced_reply


@pytest.fixture
def neutral(tiny, tiny_backend):
    config = tiny.config
    return measure(tiny_backend, tiny.tokenizer, 2, config.vocab_size, config.max_context)


@pytest.fixture
def trace(engine, tiny, neutral):
    """Of a reply by a model that learned nothing yet."""
    return traced_reply(engine, MicroLoRA.fresh(neutral.directions, tiny.config.vocab_size), 0.7)


def mean_logprob(trace, adapter, backend) -> float:
    z = backend.head(trace.hidden)
    adapter.add_to_logits(z, trace.hidden)
    z = z.astype(np.float64) - z.max(axis=1, keepdims=True)
    return float(np.mean(z[np.arange(len(z)), trace.tokens] - np.log(np.exp(z).sum(axis=1))))


@pytest.mark.parametrize("weight", [1.0, 0.3, -0.3, -1.0])
def test_the_reply_moves_the_way_it_was_rated(trace, tiny_backend, neutral, weight):
    update = instant.update(trace.adapter, trace, weight, neutral)
    before = mean_logprob(trace, trace.adapter, tiny_backend)
    after = mean_logprob(trace, update.adapter, tiny_backend)
    assert (after - before) * weight > 0


def test_no_weight_no_update(trace, neutral):
    assert instant.update(trace.adapter, trace, 0.0, neutral) is None


def slow_weights(rated, neutral, v) -> np.ndarray:
    """The formula of instant.py for one token, float64, from (trace, weight) of every rating: [r]."""
    g_sum = s_sum = l_sum = np.zeros(2)
    for trace, weight in rated:
        u = (trace.hidden @ trace.adapter.lora_a).astype(np.float64)
        scale, drawn = trace.adapter.scale, np.asarray(trace.tokens) == v
        expected = max(0.0, u[drawn, 0].sum() - trace.grad_b[0, v] / scale)
        g = weight * trace.grad_b[:, v].astype(np.float64)
        g_sum, s_sum = instant.DECAY * g_sum + g, instant.DECAY * s_sum + g * g
        l_sum = instant.DECAY * l_sum + abs(weight) * scale**2 * (u * u).mean(axis=0) * expected
    precision = neutral.precision[list(neutral.tokens).index(v)]
    agreed = g_sum**2 / (g_sum**2 + instant.AGREE * s_sum)
    return instant.STEP * g_sum / (precision + l_sum) * agreed


def test_weights_are_what_the_formula_says(trace, neutral, tiny_backend, monkeypatch):
    """Five ratings, each by the model that the one before left; no cap in the way."""
    for cap in ("KL_CAP", "RISE_CAP", "PER_RATING"):
        monkeypatch.setattr(instant, cap, 100.0)
    rated = []
    for weight in (1.0, -0.3, 0.7, -1.0, 0.2):
        rated.append((trace, weight))
        adapter = instant.update(trace.adapter, trace, weight, neutral).adapter
        trace = trace.replayed(adapter, 0, tiny_backend.head)
    for v in neutral.tokens[::7]:
        np.testing.assert_allclose(
            adapter.lora_b[:, v], slow_weights(rated, neutral, v), rtol=2e-2, atol=2e-4
        )


def test_what_ratings_agree_on_counts_and_what_they_contradict_does_not(neutral):
    """The same push four times, against the same four times there and back."""
    one = np.full((2, neutral.tokens.size), 0.5, np.float32)
    alike = np.stack([4 * one, 4 * one**2, one])
    torn = np.stack([0.1 * one, 4 * one**2, one])
    share = instant.pushed(alike, neutral) / (instant.STEP * 4 * one / (neutral.precision + one))
    np.testing.assert_allclose(share, 16 / (16 + 4 * instant.AGREE), rtol=1e-3)
    assert np.abs(instant.pushed(torn, neutral)).max() < 1e-4 * np.abs(instant.pushed(alike, neutral)).max()


def test_a_rating_is_taken_back(trace, neutral, tiny_backend):
    """Less the second of two updates, the adapter is nearly what the first one left."""
    first = instant.update(trace.adapter, trace, 1.0, neutral).adapter
    again = trace.replayed(first, 0, tiny_backend.head)
    second = instant.update(first, again, -1.0, neutral).adapter
    back = instant.without(second, first, second, neutral).adapter
    apart = np.abs(back.lora_b - first.lora_b).max()
    assert apart < 0.1 * np.abs(second.lora_b - first.lora_b).max()


def test_the_caps_hold_and_are_no_tighter_than_needed(trace, neutral):
    rng = np.random.default_rng(2)
    b = np.zeros_like(trace.adapter.lora_b)
    b[:, neutral.tokens] = rng.normal(size=(2, neutral.tokens.size)) * 3
    far = replace(trace.adapter, lora_b=b)
    assert neutral.kl(far) > instant.KL_CAP
    capped = instant.capped(far, neutral)
    found = neutral.distance(capped.adapter)
    assert found.kl == capped.kl <= instant.KL_CAP and found.rise <= instant.RISE_CAP
    assert found.kl > 0.5 * instant.KL_CAP or found.rise > 0.5 * instant.RISE_CAP


def test_two_hundred_ratings_one_way_stay_within_the_caps(trace, neutral, tiny_backend):
    adapter = trace.adapter
    for _ in range(200):
        update = instant.update(adapter, trace, 1.0, neutral)
        adapter, found = update.adapter, neutral.distance(update.adapter)
        assert update.kl <= instant.KL_CAP and found.rise <= instant.RISE_CAP
        trace = trace.replayed(adapter, 0, tiny_backend.head)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("where", ["grad_a", "grad_b", "lora_a", "lora_b"])
def test_nothing_that_is_not_finite_comes_out(trace, neutral, poison, where):
    """Poison anywhere either raises, or (1e30) ends within the cap; the old adapter keeps its bytes."""
    owner = trace.adapter if where.startswith("lora") else trace
    getattr(owner, where)[-1, -1] = poison
    before = trace.adapter.to_bytes()
    try:
        update = instant.update(trace.adapter, trace, 1.0, neutral)
    except NotFinite:
        pass
    else:
        assert update.kl <= instant.KL_CAP and np.isfinite(update.adapter.lora_b).all()
    assert trace.adapter.to_bytes() == before


def test_directions_read_the_mean_as_one_and_the_rest_as_unit_variance():
    rng = np.random.default_rng(1)
    states = rng.normal(size=(500, 16)) * np.linspace(5, 1, 16) + 3
    ending = states @ rng.normal(size=16)
    u = states @ directions(states, ending, 3)
    np.testing.assert_allclose(u[:, 0].mean(), 1, rtol=1e-5)
    np.testing.assert_allclose(u[:, 1:].var(axis=0), 1, rtol=1e-3)
    assert np.corrcoef(u[:, 1], ending)[0, 1] > 0.5


def test_distance_over_some_tokens_is_that_over_all(trace, neutral):
    """A prior of a third of the vocabulary: the other tokens count as one, and nothing is lost."""
    few = neutral.tokens[::3]
    packed = replace(neutral, tokens=few, precision=neutral.precision[::3])
    b = np.zeros_like(trace.adapter.lora_b)
    b[:, few] = np.random.default_rng(3).normal(size=(2, few.size))
    adapter = replace(trace.adapter, lora_b=b)
    assert len(neutral.few) == len(neutral.contexts)
    got, want = packed.distance(adapter), neutral.distance_dense(adapter)
    assert (got.kl, got.rise) == pytest.approx((want.kl, want.rise), abs=1e-5)
