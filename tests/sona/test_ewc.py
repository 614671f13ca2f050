"""EWC's penalty against full matrices; its Fisher information against the gradients of every example."""

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.sona.optional import ewc
from ruvmlx.sona.optional.ewc import DECAY, FADE, Anchor, Fisher, penalty

SIZES = {("q_proj", 0): (7, 5, 3), ("up_proj", 1): (13, 31, 2), ("down_proj", 1): (31, 1, 4)}  # in, out, rank


def a_base(seed, scale=2.0, places=SIZES) -> BaseLoRA:
    rng, pairs = np.random.default_rng(seed), {}
    for place in places:
        n_in, n_out, rank = SIZES[place]
        pairs[place] = tuple(rng.normal(0, 0.5, s).astype(np.float32) for s in ((n_in, rank), (rank, n_out)))
    return BaseLoRA(pairs, scale)


def gradients(seed, count) -> list[dict]:
    """Each example's gradient of each matrix, [in, out]."""
    rng = np.random.default_rng(seed)
    return [{p: rng.normal(0, 0.1 + i, SIZES[p][:2]) for p in SIZES} for i in range(count)]


def a_fisher(seed, count=3) -> Fisher:
    fisher = Fisher({})
    for example in gradients(seed, count):
        fisher.add({p: ((g**2).sum(axis=1), (g**2).sum(axis=0)) for p, g in example.items()})
    return fisher


def dense(base, place) -> np.ndarray:
    """dW [in, out], float64."""
    if place not in base.pairs:
        return np.zeros(SIZES[place][:2])
    a, b = base.pairs[place]
    return base.scale * a.astype(np.float64) @ b.astype(np.float64)


def dense_fisher(fisher, place) -> np.ndarray:
    rows, columns = fisher.mean(place)
    return np.outer(rows, columns) / rows.sum()


def penalty_ref(base, anchors, strength) -> float:
    """The penalty, summed over every element of every matrix."""
    return sum(
        strength / 2 * np.sum(dense_fisher(x.fisher, p) * (dense(base, p) - dense(x.base, p)) ** 2)
        for x in anchors
        for p in base.pairs
    )


def gradient_ref(base, anchors, strength) -> dict:
    out = {}
    for place, (a, b) in base.pairs.items():
        slope = sum(
            strength * dense_fisher(x.fisher, place) * (dense(base, place) - dense(x.base, place))
            for x in anchors
        )
        out[place] = (base.scale * slope @ b.T, base.scale * a.T @ slope)
    return out


def two_anchors() -> list[Anchor]:
    """Two anchors; the second one's base lacks a matrix and has another scale."""
    return [
        Anchor(a_base(1), a_fisher(5)),
        Anchor(a_base(2, scale=0.7, places=[("q_proj", 0), ("down_proj", 1)]), a_fisher(6, count=1)),
    ]


def test_the_penalty_is_that_of_the_full_matrices():
    base, anchors = a_base(0), two_anchors()
    value, grads = penalty(base, anchors, 3.0)
    assert value == pytest.approx(penalty_ref(base, anchors, 3.0), rel=1e-9)
    want = gradient_ref(base, anchors, 3.0)
    assert grads.keys() == want.keys()
    for place, pair in grads.items():
        for got, ref in zip(pair, want[place], strict=True):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, ref, rtol=1e-5, atol=1e-6 * np.abs(ref).max())


def test_the_gradient_is_finite_differences():
    base, anchors, rng = a_base(0), two_anchors(), np.random.default_rng(9)
    way = {p: [rng.normal(0, 1, w.shape) for w in pair] for p, pair in base.pairs.items()}

    def at(step) -> float:
        pairs = {p: tuple(w + step * d for w, d in zip(base.pairs[p], way[p], strict=True)) for p in way}
        return penalty(BaseLoRA(pairs, base.scale), anchors, 3.0)[0]

    slope = sum(
        np.vdot(d, g)
        for p, pair in penalty(base, anchors, 3.0)[1].items()
        for d, g in zip(way[p], pair, strict=True)
    )
    assert (at(1e-4) - at(-1e-4)) / 2e-4 == pytest.approx(slope, rel=1e-5)


def test_it_does_not_see_the_gauge():
    """(A Q, Q^-1 B) is the same change: the same penalty, and the gradients turn along, g_A Q^-T and Q^T g_B.

    By element of A and B, the same squared gradients would make another penalty.
    """
    base, anchors, rng = a_base(0), two_anchors(), np.random.default_rng(4)
    turned, turns = {}, {}
    for place, (a, b) in base.pairs.items():
        q = turns[place] = rng.normal(0, 1, (a.shape[1],) * 2) + 2 * np.eye(a.shape[1])
        turned[place] = (a.astype(np.float64) @ q, np.linalg.solve(q, b.astype(np.float64)))
        assert not np.allclose(np.sum(turned[place][0] ** 2), np.sum(a**2), rtol=0.1)
    value, grads = penalty(base, anchors, 3.0)
    other, turned_grads = penalty(BaseLoRA(turned, base.scale), anchors, 3.0)
    assert other == pytest.approx(value, rel=1e-9)
    for place, q in turns.items():
        (a, b), (other_a, other_b) = grads[place], turned_grads[place]
        np.testing.assert_allclose(other_a @ q.T, a, rtol=1e-4, atol=1e-5 * np.abs(a).max())
        np.testing.assert_allclose(np.linalg.solve(q.T, other_b), b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_at_the_anchor_there_is_none():
    base = a_base(1)
    value, grads = penalty(base, [Anchor(base, a_fisher(5))], 1e3)
    assert value < 1e-9 and max(np.abs(g).max() for pair in grads.values() for g in pair) < 1e-3
    assert penalty(base, [], 1e3) == (0.0, {})


def test_a_fisher_of_nothing_or_of_other_places_costs_nothing():
    zero = Fisher({("q_proj", 0): (np.zeros(7), np.zeros(5)), ("o_proj", 3): (np.ones(7), np.ones(7))}, 1.0)
    value, grads = penalty(a_base(0), [Anchor(a_base(1), zero)], 5.0)
    assert value == 0 and not any(g.any() for pair in grads.values() for g in pair)


def test_the_mean_is_the_exponential_one_of_the_examples_squares():
    """Both sums of the dense mean are kept: the factored form has them exactly."""
    examples, fisher = gradients(5, 4), a_fisher(5, 4)
    weights = (1 - DECAY) * DECAY ** np.arange(3, -1, -1)
    assert fisher.mass == pytest.approx(weights.sum()) and fisher.examples == 4
    for place in SIZES:
        mean = sum(w * e[place] ** 2 for w, e in zip(weights, examples, strict=True)) / weights.sum()
        factored = dense_fisher(fisher, place)
        np.testing.assert_allclose(factored.sum(axis=1), mean.sum(axis=1))
        np.testing.assert_allclose(factored.sum(axis=0), mean.sum(axis=0))


def test_of_one_input_and_output_it_is_exact():
    """One token: G = x g^T, and its square is a product already."""
    rng = np.random.default_rng(0)
    squared = np.outer(rng.normal(size=7), rng.normal(size=5)) ** 2
    fisher = Fisher({})
    fisher.add({("q_proj", 0): (squared.sum(axis=1), squared.sum(axis=0))})
    np.testing.assert_allclose(dense_fisher(fisher, ("q_proj", 0)), squared)


def test_two_tasks_become_one():
    one, other = a_fisher(5), a_fisher(6, 2)
    del other.squares["q_proj", 0]
    both = one.then(other)
    assert both.examples == 5 and both.squares.keys() == one.squares.keys()
    for i in range(2):
        want = FADE * one.mean(("up_proj", 1))[i] + other.mean(("up_proj", 1))[i]
        np.testing.assert_allclose(both.mean(("up_proj", 1))[i], want)
        np.testing.assert_allclose(both.mean(("q_proj", 0))[i], FADE * one.mean(("q_proj", 0))[i])


def test_it_survives_the_disk():
    fisher = a_fisher(5)
    back = Fisher.from_bytes(fisher.to_bytes())
    assert back.to_bytes() == fisher.to_bytes() and (back.mass, back.examples) == (fisher.mass, 3)
    for data in (b"junk", fisher.to_bytes()[:90]):
        with pytest.raises(CorruptFile):
            Fisher.from_bytes(data)


def test_it_can_be_left_between_matrices():
    calls = []
    penalty(a_base(0), two_anchors(), 1.0, lambda: calls.append(1))
    assert len(calls) == 2 * len(SIZES)
    assert ewc.TASKS == 10 and DECAY == 0.999
