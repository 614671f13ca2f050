"""The router's cell: its formula, its gradient, its low-rank updates."""

from dataclasses import fields, replace

import numpy as np
import pytest

from ruvmlx.sona.optional import fastgrnn, router_lora
from ruvmlx.sona.optional.bandit import Regression
from ruvmlx.sona.optional.router_lora import Evidence, RouterLoRA

INPUTS, HIDDEN, ARMS = 5, 7, 3


def noisy_cell(rng) -> fastgrnn.FastGRNNCell:
    """A cell without zeros."""
    cell = fastgrnn.fresh(INPUTS, HIDDEN)
    return replace(
        cell, **{f.name: getattr(cell, f.name) + 0.3 * rng.standard_normal(getattr(cell, f.name).shape)
                 for f in fields(cell)}
    )  # fmt: skip


def noisy_lora(rng) -> RouterLoRA:
    pairs = RouterLoRA.fresh(INPUTS, ARMS, HIDDEN).pairs
    return RouterLoRA.of([(a, b + 0.3 * rng.standard_normal(b.shape)) for a, b in pairs])


def conversations(rng, n=11) -> list[np.ndarray]:
    """Conversations of 0 to 6 turns."""
    return [rng.standard_normal((i % 7, INPUTS)) for i in range(n)]


def evidence(rng, n=11) -> Evidence:
    x, mask = fastgrnn.pad_conversations(conversations(rng, n), INPUTS)
    return Evidence(x, mask, rng.integers(0, ARMS, n), rng.uniform(0, 2, n))


def priors() -> list[Regression]:
    return [Regression.prior(1 + HIDDEN, mean) for mean in (0.6, 0.4, 0.4)]


def numeric(f, array: np.ndarray, eps=1e-6) -> np.ndarray:
    """Central differences of f by every element of the array."""
    out = np.zeros(np.shape(array))
    for i in np.ndindex(out.shape):
        up, down = np.array(array), np.array(array)
        up[i] += eps
        down[i] -= eps
        out[i] = (f(up) - f(down)) / (2 * eps)
    return out


def test_many_conversations_at_once_are_one_turn_after_the_other():
    rng = np.random.default_rng(0)
    cell, said = noisy_cell(rng), conversations(rng)
    h, _ = fastgrnn.forward(cell, *fastgrnn.pad_conversations(said, INPUTS))
    for turns, state in zip(said, h, strict=True):
        slow = np.zeros(HIDDEN)
        for x in turns:
            slow = fastgrnn.step(cell, x, slow)
        np.testing.assert_allclose(state, slow, atol=1e-12)


def test_the_cell_is_the_papers_where_the_gate_has_no_update():
    """Kusupati et al. 2018, eq. 4, for one turn from zero: h = (zeta (1 - z) + nu) * k."""
    cell, x = fastgrnn.fresh(INPUTS, HIDDEN), np.linspace(-1, 2, INPUTS)
    s = x @ cell.w
    z, k = 1 / (1 + np.exp(-(s + cell.bias_z))), np.tanh(s + cell.bias_h)
    zeta, nu = 1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(4.0))
    np.testing.assert_allclose(fastgrnn.step(cell, x, np.zeros(HIDDEN)), (zeta * (1 - z) + nu) * k)
    assert fastgrnn.fresh(INPUTS, HIDDEN) is cell  # drawn once


@pytest.mark.parametrize("name", [f.name for f in fields(fastgrnn.FastGRNNCell)])
def test_the_gradient_by_every_parameter_is_that_of_finite_differences(name):
    rng = np.random.default_rng(1)
    cell, (x, mask) = noisy_cell(rng), fastgrnn.pad_conversations(conversations(rng), INPUTS)
    weight = rng.standard_normal((len(x), HIDDEN))

    def value(array):
        return float(np.sum(weight * fastgrnn.forward(replace(cell, **{name: array}), x, mask)[0]))

    grad = getattr(fastgrnn.backward(cell, fastgrnn.forward(cell, x, mask)[1], weight), name)
    np.testing.assert_allclose(grad, numeric(value, getattr(cell, name)), rtol=1e-5, atol=1e-7)
    assert np.abs(grad).max() > 1e-3


@pytest.mark.parametrize("at", range(2 + ARMS))
@pytest.mark.parametrize("side", [0, 1])
def test_the_losss_gradient_by_every_factor_is_that_of_finite_differences(at, side):
    """The regression's weights follow the features, and yet need no derivative."""
    rng = np.random.default_rng(2)
    lora, known = noisy_lora(rng), evidence(rng, 23)

    def value(array):
        pairs = [list(pair) for pair in lora.pairs]
        pairs[at][side] = array
        return router_lora.loss(RouterLoRA.of([tuple(p) for p in pairs]), known, priors())[0]

    grad = router_lora.loss(lora, known, priors())[1].pairs[at][side]
    np.testing.assert_allclose(grad, numeric(value, lora.pairs[at][side]), rtol=1e-4, atol=1e-7)
    assert np.abs(grad).max() > 1e-5


def test_ranks_are_the_designs_and_a_new_router_changes_nothing():
    lora = RouterLoRA.fresh(INPUTS, ARMS, HIDDEN)
    assert [a.shape[1] for a, _ in lora.pairs] == [8, 2, 4, 4, 4]
    base, cell = fastgrnn.fresh(INPUTS, HIDDEN), lora.cell()
    for f in fields(base):
        np.testing.assert_array_equal(getattr(cell, f.name), getattr(base, f.name))
    h = np.random.default_rng(3).standard_normal((4, HIDDEN))
    np.testing.assert_array_equal(lora.phi(h, 2), np.concatenate([np.ones((4, 1)), h], axis=1))


def test_the_arms_are_fitted_as_the_loss_assumes():
    rng = np.random.default_rng(4)
    lora, known = noisy_lora(rng), evidence(rng, 40)
    for arm, weights in zip(
        router_lora.fit(lora, known, priors()), router_lora.loss(lora, known, priors())[2], strict=True
    ):
        np.testing.assert_allclose(arm.mean, weights, rtol=1e-9)


def test_training_lowers_the_loss_and_can_be_stopped():
    import threading

    rng = np.random.default_rng(5)
    lora, known = RouterLoRA.fresh(INPUTS, ARMS, HIDDEN), evidence(rng, 60)
    trained = router_lora.train(lora, known, priors(), steps=30)
    before, after = (router_lora.loss(x, known, priors())[0] for x in (lora, trained))
    assert after < 0.9 * before
    cancel = threading.Event()

    def stop(done, steps):
        if done == 3:
            cancel.set()

    assert router_lora.train(lora, known, priors(), 30, cancel, stop) is None


def test_updates_survive_the_store_and_damaged_ones_are_refused():
    from ruvmlx.sona.optional.router import ARMS as arms
    from ruvmlx.sona.optional.router import INPUTS as inputs

    rng = np.random.default_rng(6)
    pairs = RouterLoRA.fresh(inputs, len(arms)).pairs
    lora = RouterLoRA.of([(a, rng.standard_normal(b.shape)) for a, b in pairs])
    data = lora.to_bytes()
    back = RouterLoRA.from_bytes(data, inputs, len(arms))
    for one, other in zip(lora.pairs, back.pairs, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
    poisoned = RouterLoRA.of([(a * np.nan, b) for a, b in pairs]).to_bytes()
    for bad in (b"", data[: len(data) // 2], poisoned):
        assert RouterLoRA.from_bytes(bad, inputs, len(arms)) is None
    assert RouterLoRA.from_bytes(data, inputs + 1, len(arms)) is None
