import numpy as np
import pytest

from ruvmlx.kernels.micro import NotFinite
from ruvmlx.lora import MicroLoRA
from ruvmlx.sona import instant
from ruvmlx.sona.neutral import Neutral, directions

from .test_trace import random_adapter, traced_reply


@pytest.fixture
def neutral(tiny, tiny_backend):
    rng = np.random.default_rng(0)
    contexts = rng.normal(size=(40, tiny.config.hidden_size)).astype(np.float32)
    return Neutral(contexts, contexts.mean(axis=0), directions(contexts, 2), tiny_backend.head)


@pytest.fixture
def settled(engine, tiny, tiny_backend):
    trace = traced_reply(engine, random_adapter(tiny.config), 0.7)
    trace.settle(tiny_backend.head)
    return trace


def mean_logprob(trace, adapter, backend) -> float:
    z = backend.head(trace.hidden)
    adapter.add_to_logits(z, trace.hidden)
    z = z.astype(np.float64) - z.max(axis=1, keepdims=True)
    return float(np.mean(z[np.arange(len(z)), trace.tokens] - np.log(np.exp(z).sum(axis=1))))


@pytest.mark.parametrize("weight", [1.0, 0.3, -0.3, -1.0])
def test_the_reply_moves_the_way_it_was_rated(settled, tiny_backend, neutral, weight, monkeypatch):
    monkeypatch.setattr(instant, "KL_CAP", 10.0)  # the random adapter is far from the frozen model already
    update = instant.update(settled.adapter, settled, weight, neutral)
    before = mean_logprob(settled, settled.adapter, tiny_backend)
    after = mean_logprob(settled, update.adapter, tiny_backend)
    assert (after - before) * weight > 0


def test_step_is_sized_in_nats(settled):
    """Twice the variance, or half the weight, makes the step smaller by sqrt(2)."""
    eta = instant.step_size(1.0, settled.variance)
    assert instant.step_size(1.0, 2 * settled.variance) == pytest.approx(eta / np.sqrt(2))
    assert instant.step_size(-0.5, settled.variance) == pytest.approx(-eta / np.sqrt(2))
    assert instant.step_size(0.0, settled.variance) == 0 == instant.step_size(1.0, 0.0)


def test_no_weight_no_update(settled, neutral):
    assert instant.update(settled.adapter, settled, 0.0, neutral) is None


def test_the_cap_holds_and_is_no_tighter_than_needed(settled, neutral):
    far = MicroLoRA(
        settled.adapter.lora_a, settled.adapter.lora_b * 30,
        settled.adapter.momentum_a, settled.adapter.momentum_b,
    )  # fmt: skip
    assert neutral.kl(far) > instant.KL_CAP
    capped = instant.capped(far, neutral)
    assert 0.5 * instant.KL_CAP < capped.kl <= instant.KL_CAP
    assert neutral.kl(capped.adapter) == capped.kl


def test_two_hundred_ratings_one_way_stay_within_the_cap(settled, neutral, tiny_backend):
    adapter, trace = settled.adapter, settled
    for _ in range(200):
        update = instant.update(adapter, trace, 1.0, neutral)
        adapter = update.adapter
        assert update.kl <= instant.KL_CAP
        trace = trace.replayed(adapter, 0, tiny_backend.head)


def test_momentum_helps_along_and_never_against(settled):
    eta = instant.step_size(1.0, settled.variance)
    moved = settled.adapter.stepped(settled.grad_a, settled.grad_b, eta, 0.0)
    assert instant.momentum_for(moved, settled, eta) == instant.MOMENTUM
    assert instant.momentum_for(moved, settled, -eta) == 0


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("where", ["grad_a", "grad_b", "lora_a", "lora_b"])
def test_nothing_that_is_not_finite_comes_out(settled, neutral, poison, where):
    """Poison anywhere either raises, or (1e30) ends within the cap; the old adapter keeps its bytes."""
    owner = settled.adapter if where.startswith("lora") else settled
    getattr(owner, where)[-1, -1] = poison
    before = settled.adapter.to_bytes()
    try:
        update = instant.update(settled.adapter, settled, 1.0, neutral)
    except NotFinite:
        pass
    else:
        assert update.kl <= instant.KL_CAP and np.isfinite(update.adapter.lora_b).all()
    assert settled.adapter.to_bytes() == before


def test_directions_read_the_mean_as_one_and_the_rest_as_unit_variance():
    rng = np.random.default_rng(1)
    states = rng.normal(size=(500, 16)) * np.linspace(5, 1, 16) + 3
    u = states @ directions(states, 3)
    np.testing.assert_allclose(u[:, 0].mean(), 1, rtol=1e-5)
    np.testing.assert_allclose(u[:, 1:].var(axis=0), 1, rtol=1e-3)
    assert abs(np.corrcoef(u[:, 1], u[:, 2])[0, 1]) < 0.01
