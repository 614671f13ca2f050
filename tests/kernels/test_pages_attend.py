"""Attention over warm and cold pages in integers, against float64 over the numbers that the pages hold."""

import numpy as np
import pytest

from ruvmlx.kernels import layers, matmul
from ruvmlx.kernels.library import implementations
from ruvmlx.tiers import COLD, HOT, PAGE, WARM
from tests.oracles import pages as p

IMPLS = matmul.implementations()
DIMS = (2, 18, 32, 64, 80, 96, 128, 256, 512)
ROWS = (1, 2, 3, 4, 5, 8, 15, 17, 51)


def random(*shape, seed=0, spread=1.0):
    return np.random.default_rng(seed + sum(shape)).normal(0, spread, shape).astype(np.float32)


def random_page(tier, head_dim, seed=0):
    """(page, K, V): of a model's size; K and V are what it holds."""
    data = p.pack_ref(tier, random(PAGE, head_dim, seed=seed), random(PAGE, head_dim, seed=seed + 9))
    k, v = p.numbers_ref(tier, data, head_dim)
    return p.from_canonical(tier, data, head_dim), k.astype(np.float64), v.astype(np.float64)


def error(got, want):
    return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize(("tier", "most"), [(WARM, 2e-4), (COLD, 0.03)])
def test_scores_and_values(tier, most, head_dim):
    """15 bits of query or weight in front of 8, 7 in front of 4: an error below that of the page itself."""
    page, k, v = random_page(tier, head_dim)
    for rows in ROWS:
        q, w = random(rows, head_dim), np.exp(random(rows, PAGE, spread=2))
        got = [(p.scores(tier, page, q, impl), p.values(tier, page, w, head_dim, impl)) for impl in IMPLS]
        assert error(got[0][0], q @ k.T) < most
        assert error(got[0][1], w @ v) < most
        for scores, values in got[1:]:
            np.testing.assert_array_equal(scores, got[0][0])
            np.testing.assert_array_equal(values, got[0][1])


@pytest.mark.parametrize("tier", [WARM, COLD])
def test_a_row_does_not_depend_on_its_neighbours(tier):
    """A draft that is verified in a batch stays what it was."""
    page, *_ = random_page(tier, 64)
    q, w = random(21, 64), np.abs(random(21, PAGE))
    scores, values = p.scores(tier, page, q), p.values(tier, page, w, 64)
    for r in range(21):
        np.testing.assert_array_equal(p.scores(tier, page, q[r : r + 1])[0], scores[r])
        np.testing.assert_array_equal(p.values(tier, page, w[r : r + 1], 64)[0], values[r])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("tier", [WARM, COLD])
def test_nan_and_infinities_spoil_only_their_row(tier, impl):
    """NaN and infinities spoil their row only; what is tiny counts as zero."""
    page, *_ = random_page(tier, 80)
    q, w = random(5, 80), np.abs(random(5, PAGE))
    scores, values = p.scores(tier, page, q, impl), p.values(tier, page, w, 80, impl)
    q[1, 3], q[3, 79], w[1, 63], w[3, 0] = np.nan, -np.inf, np.inf, np.nan
    for got, want in ((p.scores(tier, page, q, impl), scores), (p.values(tier, page, w, 80, impl), values)):
        assert np.isnan(got[[1, 3]]).all()
        np.testing.assert_array_equal(got[[0, 2, 4]], want[[0, 2, 4]])
    assert (p.scores(tier, page, np.full((3, 80), 1e-40, np.float32), impl) == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_largest_numbers(impl):
    """All codes and queries at their ends: sums of 512 products are exact."""
    for head_dim in (64, 512):
        for sign in (-1, 1):
            k = np.full((PAGE, head_dim), 127.0 * sign, np.float32)
            q = np.full((3, head_dim), 32384.0, np.float32)
            page = p.from_canonical(WARM, p.pack_ref(WARM, k, k), head_dim)
            assert (p.scores(WARM, page, q, impl) == np.float32(head_dim * 32384 * 127.0 * sign)).all()
            w = np.full((2, PAGE), 32384.0, np.float32)
            assert (p.values(WARM, page, w, head_dim, impl) == np.float32(64 * 32384 * 127.0 * sign)).all()


def sequence(head_dim, tiers, last, layers_impl=None):
    """A cache of len(tiers) demoted pages and `last` hot tokens; and K (before rotation), V that it holds."""
    tokens = len(tiers) * PAGE + last
    turn = layers.turns(np.arange(tokens), 10000.0 ** (-np.arange(head_dim // 2) * 2 / head_dim))
    k, v = random(tokens, head_dim), random(tokens, head_dim, seed=6)
    cache = layers.PagedKV(head_dim)
    cache.append(k, v, turn, layers_impl)
    keys = layers.rope_ref(k[:, None], turn)[:, 0].astype(np.float16).astype(np.float32)
    values = v.astype(np.float16).astype(np.float32)
    for i, tier in enumerate(tiers):
        at = slice(i * PAGE, (i + 1) * PAGE)
        hot = cache.pages[i].view(np.uint8)
        if tier != HOT:
            page = p.demote(HOT, hot[None], tier, head_dim, layers_impl)[0]
            data = p.canonical(tier, page, head_dim)
            cache.pages[i], cache.tiers[i] = page, tier
            keys[at], values[at] = p.numbers_ref(tier, data, head_dim)
            if tier == COLD:
                keys[at] = unrotate(keys[at])
    return cache, turn, keys, values


def unrotate(x):
    """The blocks are symmetric and orthonormal: rotating twice is nothing."""
    return p.rotate_ref(x)


def attend_ref(q, keys, values, turn, position, window, slopes=None):
    at = position + np.arange(len(q))
    queries = layers.rope_ref(q, turn[at]).astype(np.float64)
    scores = np.einsum("tgd,sd->tgs", queries, keys.astype(np.float64)) / np.sqrt(q.shape[-1])
    s = np.arange(len(keys))
    if slopes is not None:
        scores += slopes[:, None] * (s - at[:, None, None])
    seen = (s <= at[:, None]) & (at[:, None] - s < (window or len(keys) + 1))
    scores = np.where(seen[:, None], scores, -np.inf)
    w = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("tgs,sd->tgd", w / w.sum(-1, keepdims=True), values)


@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize(("head_dim", "group", "queries"), [(64, 3, 1), (80, 1, 5), (64, 4, 17), (80, 3, 2)])
def test_slopes_over_all_tiers(impl, head_dim, group, queries):
    """ALiBi: the distance counts from the query, whatever the tier."""
    tiers = (COLD, WARM, COLD, WARM, WARM, HOT)
    cache, turn, keys, values = sequence(head_dim, tiers, 33 + queries, impl)
    position, slopes = len(keys) - queries, np.float32([1 / 256, 1 / 64, 0.5, 1 / 128])[:group]
    q = random(queries, group, head_dim, seed=7, spread=2)
    for parts in (1, 3):
        got = cache.attend(q, turn[position:], position, 0, parts, impl, slopes=slopes)
        want = attend_ref(q, keys, values, turn, position, 0, slopes)
        assert error(got, want) < 0.03
    assert error(got, attend_ref(q, keys, values, turn, position, 0)) > 0.1


@pytest.mark.pairwise
@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [0, 100, 230])
@pytest.mark.parametrize(
    ("head_dim", "group", "queries"),
    [(64, 3, 1), (32, 1, 2), (80, 4, 5), (96, 3, 3), (128, 8, 1), (128, 1, 17), (256, 2, 1), (64, 3, 16)],
)
def test_attention_over_all_tiers(impl, head_dim, group, queries, window, parts):
    """Groups, queries, windows, several key ranges; cold, warm and hot pages in any order."""
    tiers = (COLD, WARM, COLD, WARM, WARM, HOT)
    last = 33 + queries
    cache, turn, keys, values = sequence(head_dim, tiers, last, impl)
    position = len(keys) - queries
    q = random(queries, group, head_dim, seed=7, spread=2)
    got = cache.attend(q, turn[position:], position, window, parts, impl)
    want = attend_ref(q, keys, values, turn, position, window)
    assert error(got, want) < 0.03
    warm, turn, keys, values = sequence(head_dim, [WARM] * 5, last, impl)
    position = len(keys) - queries
    got = warm.attend(q, turn[position:], position, window, parts, impl)
    want = attend_ref(q, keys, values, turn, position, window)
    assert error(got, want) < 1e-3


def test_the_matrix_kernels_do_not_change_attention():
    """Whichever reads the pages: the same bits."""
    cache, turn, keys, _ = sequence(64, (COLD, WARM), 9)
    q, position = random(1, 3, 64, spread=2), len(keys) - 1
    want = cache.attend(q, turn[position:], position)
    for impl in IMPLS:
        np.testing.assert_array_equal(cache.attend(q, turn[position:], position, matmul=impl), want)


def test_demoted_pages_cost_little():
    """Against the numbers before demotion: 8 bits about 1%, 4 bits about 15% of the output's spread."""
    hot, turn, keys, _ = sequence(64, (HOT,) * 4, 1)
    q, position = random(1, 3, 64, spread=2), len(keys) - 1
    want = hot.attend(q, turn[position:], position)
    for tier, least, most in ((WARM, 1e-4, 0.02), (COLD, 0.01, 0.25)):
        cache, *_ = sequence(64, (tier,) * 4, 1)
        assert least < error(cache.attend(q, turn[position:], position), want) < most
