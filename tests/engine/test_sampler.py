from dataclasses import fields

import numpy as np
import pytest

from ruvmlx.engine.types import Sampling
from ruvmlx.errors import UsageError
from ruvmlx.sampling import (
    FILTERS,
    NO_SAMPLING,
    Distribution,
    Filter,
    ReplyOptions,
    Sampler,
    candidates,
    largest_first,
    log_softmax,
    top_ids,
)
from ruvmlx.settings import SAMPLING


def logits(n=1237, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32) * 3


def test_greedy_is_argmax():
    z = logits()
    assert Sampler(Sampling(temperature=0))(z) == int(z.argmax())


def test_the_same_seed_draws_the_same():
    z = logits()
    one, two, three = (Sampler(Sampling(seed=s)) for s in (7, 7, 8))
    drawn = [one(z) for _ in range(50)]
    assert drawn == [two(z) for _ in range(50)]
    assert drawn != [three(z) for _ in range(50)]


def test_frequencies_follow_the_distribution_at_temperature():
    z = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    draw = Sampler(Sampling(temperature=0.5, seed=1))
    counts = np.bincount([draw(z) for _ in range(20000)], minlength=3) / 20000
    expected = np.array([0.25, 0.09, 0.04]) / 0.38
    np.testing.assert_allclose(counts, expected, atol=0.015)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.9999])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p):
    z = logits()
    ids, logprobs = candidates(z, Sampling(top_p=top_p))
    p = np.exp(log_softmax(z).astype(np.float64))
    order = np.argsort(-p)
    expected = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]
    assert set(ids) == set(expected)
    np.testing.assert_allclose(np.exp(logprobs), p[ids], rtol=1e-4)


@pytest.mark.parametrize("size", [300, 3000, 30000])
def test_a_flat_distribution_is_looked_at_as_far_down_as_needed(size):
    ids, _ = candidates(np.zeros(size, np.float32), Sampling(top_p=0.5))
    assert abs(ids.size - size // 2) <= 1
    assert (ids == np.arange(ids.size)).all()


def test_min_p_and_top_k():
    z = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert set(candidates(z, Sampling(min_p=0.25))[0]) == {0, 1, 2}
    assert set(candidates(z, Sampling(top_k=2))[0]) == {0, 1}
    assert set(candidates(z, Sampling(top_k=9))[0]) == {0, 1, 2, 3}


def test_min_p_keeps_an_id_of_just_that_share():
    """At least the share: e^-1 of the likeliest is what the second has, and it stays."""
    z = np.array([0, -1, np.nextafter(np.float32(-1), np.float32(-2))], np.float32)
    (keep,) = (f.keep for f in FILTERS if f.option == "min_p")
    kept = keep(Distribution(z, np, np.exp, np.cumsum), np.exp(-1.0))
    assert np.log(np.exp(-1.0)) == -1 and kept.tolist() == [True, True, False]


def test_top_ids_is_a_sort_with_ties_by_id():
    z = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    assert top_ids(z, 3).tolist() == [1, 2, 3]
    assert top_ids(z, 10).tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("size", [0, 1, 2, 17, 1001, 5003])
@pytest.mark.parametrize("ties", [False, True])
def test_largest_first_is_a_stable_sort_of_all_floats(size, ties):
    """With equal values, both zeros, numbers below the normal ones, and infinities."""
    values = logits(size)
    if ties:
        values = np.round(values) * np.float32(-1)  # has both zeros
    values[::5] *= np.float32(1e-40)
    values[::7], values[3::11] = -np.inf, np.inf
    np.testing.assert_array_equal(largest_first(values), np.argsort(-values, kind="stable"))


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": 1}, {"top_k": -2}, {"seed": -1},
            {"temperature": float("nan")}, {"presence_penalty": 2.1}, {"frequency_penalty": -3},
            {"presence_penalty": float("nan")}, {"logit_bias": ((3, 101),)}, {"logit_bias": ((3, -100.5),)},
            {"repetition_penalty": 0.05}, {"repetition_penalty": 2.1}, {"repetition_window": -1}],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(bad):
    with pytest.raises(UsageError, match="it must be"):
        Sampler(Sampling(**bad))


def test_every_filter_is_an_option_and_its_off_value_excludes_nothing():
    z = logits()
    for f in FILTERS:
        assert Sampling().__dict__[f.option] == f.off
        assert candidates(z, Sampling(**{f.option: f.off}))[0].size == z.size


@pytest.mark.parametrize("value", [0.01, 0.4, 0.95])
@pytest.mark.parametrize("f", [f for f in FILTERS if f.sorts], ids=lambda f: f.option)
def test_a_filter_of_sorted_ids_says_the_same_of_the_most_likely_alone(f, value):
    """The sampler sorts few ids at first: the answer about those must not depend on the others."""
    logprobs = np.sort(log_softmax(logits()))[::-1]
    keep = keep_mask(f, logprobs, value)
    n = np.count_nonzero(keep)
    assert 0 < n < keep.size
    assert keep[:n].all()
    assert np.array_equal(keep_mask(f, logprobs[: n + 5], value), keep[: n + 5])


def keep_mask(f: Filter, logprobs: np.ndarray, value: float) -> np.ndarray:
    def sum_before(p):
        return np.cumsum(p, dtype=np.float64) - p

    return f.keep(Distribution(logprobs, np, np.exp, sum_before), value)


def test_an_option_has_one_name_in_settings_sampler_and_api():
    names = [field.name for field in fields(Sampling)]
    assert sorted([*SAMPLING, "seed", "logit_bias", "repetition_window"]) == sorted(names)
    assert sorted(ReplyOptions.__annotations__) == sorted([*names, *NO_SAMPLING])
