"""A token drawn in C, in every implementation that this machine runs, against its NumPy twin."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx import sampling as sampler
from ruvmlx.kernels.draw import TokenDrawing
from ruvmlx.kernels.library import available
from ruvmlx.kernels.micro import NotFinite
from ruvmlx.sampling import FILTERS, Filter, Sampler, Sampling, candidates, draw_token

EDGE = 2e-6  # of probability: the kernel's sums may pass top_p, or u, this much sooner or later
BELOW_ONE = 1 - 2.0**-53
FILTERED = [
    dict(zip(("top_p", "top_k", "min_p"), some, strict=True))
    for some in itertools.product((1, 0.9999, 0.9, 0.05), (0, 1, 7, 5000), (0, 0.02, 0.5))
]


def random(seed, size=1237, spread=3.0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) * np.float32(spread)


LOGITS = {
    "one id": np.zeros(1, np.float32),
    "two": random(0, 2),
    "a block and one": random(1, 1025),
    "two blocks": random(2, 2048),
    "many": random(3, 5003),
    "flat": np.zeros(3001, np.float32),
    "one far above": np.r_[np.zeros(99), 80.0, np.zeros(1100)].astype(np.float32),
    "steps of ties": np.repeat(np.arange(12), 111).astype(np.float32) / 2,
    "both zeros": np.where(np.arange(300) % 3, np.float32(0), np.float32(-0.0)),
    "huge": random(4, 1500, 3e4),
    "tiny differences": random(5, 1500, 1e-5),
    "far down": random(6, 1500) - 1e4,
    "masked": np.where(np.arange(2500) % 7 == 3, random(7, 2500), np.float32(-np.inf)),
}


def in_c(impl, s: Sampling) -> TokenDrawing:
    return TokenDrawing(s.temperature, s.top_p, s.min_p, s.top_k, impl)


def is_near(token, z, s: Sampling, u):
    """Does the twin draw it where each sum is a rounding error further, or is it between two such tokens?"""
    by_rank = s.top_p < 1 or s.top_k > 0
    order = np.argsort(-z, kind="stable") if by_rank else np.arange(z.size)
    place = {int(i): at for at, i in enumerate(order)}
    found = []
    for a, b, c in itertools.product((0, -EDGE, EDGE), repeat=3):
        moved = replace(s, top_p=min(1 - 1e-9, s.top_p + a) if s.top_p < 1 else 1, min_p=s.min_p * (1 + b))
        last = u + c >= 1
        found.append(place[int(candidates(z, moved)[0][-1]) if last else draw_token(z, moved, max(u + c, 0))])
    return min(found) <= place[token] <= max(found)


@pytest.mark.parametrize("impl", available("draw"))
@pytest.mark.parametrize("name", LOGITS)
def test_a_token_is_the_twins(impl, name):
    """All options together, at both ends of the line and between; an array that starts anywhere."""
    z = np.r_[np.float32(0), LOGITS[name]][1:]
    others = 0
    for temperature, options in itertools.product((0.01, 0.2, 1.0, 3.0), FILTERED):
        s = Sampling(temperature, **options)
        draw = in_c(impl, s)
        for u in (0.0, 0.3713, 0.9099, BELOW_ONE):
            token, want = draw(z, u), draw_token(z, s, u)
            others += token != want
            assert token == want or is_near(token, z, s, u), (s, u)
    assert others < 40  # of 768; where all are equal, rounding decides


@pytest.mark.parametrize("impl", available("draw"))
@pytest.mark.parametrize(
    "s",
    [
        Sampling(0.2, top_p=0.9),
        Sampling(0.7),
        Sampling(0.8, min_p=0.05),
        Sampling(1.3, top_p=0.99, top_k=50, min_p=0.01),
    ],
    ids=str,
)
def test_a_reply_of_a_whole_vocabulary_is_the_twins(impl, s):
    draw, numbers = in_c(impl, s), np.random.default_rng(5)
    for i in range(60):
        z, u = random(i, 49_152, 4.0), numbers.random()
        assert draw(z, u) == draw_token(z, s, u)


@pytest.mark.parametrize("impl", available("draw"))
@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-6, 0.003])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.999}, {"min_p": 0.001}])
def test_the_coldest_are_greedy(impl, temperature, options):
    for seed in range(5):
        z = random(seed)
        assert in_c(impl, Sampling(temperature, **options))(z, BELOW_ONE) == int(z.argmax())


@pytest.mark.parametrize("impl", available("draw"))
@pytest.mark.parametrize("options", [{}, {"min_p": 0.1}, {"top_p": 0.9999999}, {"top_k": 1000}])
def test_an_id_without_probability_is_never_drawn(impl, options):
    z = np.full(1100, -np.inf, np.float32)
    z[[7, 500, 993]] = 0
    draw = in_c(impl, Sampling(1.0, **options))
    assert [draw(z, u) for u in (0.0, 0.5, BELOW_ONE)] == [7, 500, 993]


@pytest.mark.parametrize("impl", available("draw"))
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_logits_that_are_no_numbers_are_refused(impl, bad, options):
    draw = in_c(impl, Sampling(1.0, **options))
    for at in (0, 1030, 2047):
        z = random(0, 2048)
        z[at] = bad
        with pytest.raises(NotFinite):
            draw(z, 0.5)
    with pytest.raises(NotFinite):
        draw(np.full(9, -np.inf, np.float32), 0.5)


def test_options_that_mean_nothing_are_refused():
    for s in (Sampling(0.0), Sampling(top_p=0), Sampling(min_p=1), Sampling(temperature=float("nan"))):
        with pytest.raises(ValueError, match="bad argument"):
            in_c(None, s)(random(0), 0.5)
    with pytest.raises(ValueError, match="u = 1"):
        in_c(None, Sampling())(random(0), 1.0)


def test_a_filter_that_c_does_not_know_is_applied_in_numpy(monkeypatch):
    """Here one that keeps the ids from 900 on."""
    kept = Filter("top_k", 0, lambda d, value: np.arange(d.logits.size) >= 900)
    monkeypatch.setattr(sampler, "FILTERS", (*FILTERS, kept))
    s = Sampling(1.5, top_p=0.99, top_k=300, seed=1)
    draw, numbers = Sampler(s), np.random.default_rng(1)
    for seed in range(20):
        token = draw(random(seed))
        assert token >= 900 and token == draw_token(random(seed), s, numbers.random())
