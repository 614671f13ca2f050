"""Attention that reads a page once for all sequences which share it, against each sequence alone."""

import numpy as np
import pytest

from ruvmlx.kernels import matmul
from ruvmlx.kernels.library import implementations
from ruvmlx.tiers import COLD, HOT, WARM
from tests.oracles.shared_pages import SharedKV, attend_rows, attend_rows_ref, demote

# head_dim, group, shared tokens, own tokens, page -> tier (of shared pages, and of own ones).
SHAPES = {
    "starter": (64, 3, 300, 75, {0: COLD, 1: WARM, 2: COLD, 4: WARM}),
    "whole pages": (32, 1, 128, 1, {}),
    "less than a page": (18, 5, 39, 60, {0: WARM}),
    "one token": (80, 2, 1, 130, {0: COLD, 1: COLD}),
    "wide": (128, 4, 191, 66, {0: COLD, 1: WARM, 2: WARM}),
    "most": (256, 1, 130, 3, {0: WARM}),
}


def forks(name, count):
    """`count` caches of one length: forks, a fork of a fork every third time; the rest of each is its own."""
    head_dim, group, shared, own, tiers = SHAPES[name]
    caches = [SharedKV.of(shared, head_dim)]
    for i in range(1, count):
        parent = caches[-1] if i % 3 == 2 else caches[0]
        caches.append(parent.fork())
        if i % 3 == 1 and own > 9:  # its forks share these, too
            caches[-1].extend(9, seed=50 + i)
    for i, cache in enumerate(caches):
        cache.extend(shared + own - cache.kv.tokens, seed=i)
    demote(caches, tiers)
    q = np.random.default_rng(count).normal(0, 2, (count, group, head_dim)).astype(np.float32)
    return caches, q


def error(got, want):
    return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))


def shared_pages(caches):
    return sum(all(c.kv.pages[i] is page for c in caches) for i, page in enumerate(caches[0].kv.pages))


@pytest.mark.pairwise
@pytest.mark.parametrize("impl", implementations())
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("count", [3, 7, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_shared_pages_are_those_of_each_sequence(name, count, window, parts, impl):
    """In float64 over what its pages hold; and the same bits as the kernel's with that sequence alone."""
    caches, q = forks(name, count)
    got = attend_rows(caches, q, window, parts, impl)
    most = 0.03 if COLD in caches[0].kv.tiers else 1e-3
    assert error(got, attend_rows_ref(caches, q, window)) < most
    for i, cache in enumerate(caches):
        np.testing.assert_array_equal(got[i], attend_rows([cache], q[i : i + 1], window, parts, impl)[0])


def test_the_shapes_share_pages():
    """Or the tests above compare nothing."""
    assert {name: shared_pages(forks(name, 5)[0]) for name in SHAPES} == {
        "starter": 4, "whole pages": 2, "less than a page": 0, "one token": 0, "wide": 2, "most": 2,
    }  # fmt: skip


@pytest.mark.parametrize("impl", matmul.implementations())
def test_whichever_kernels_read_the_pages(impl):
    """The same bits, for odd numbers of rows, too."""
    for count in (3, 5, 7):
        caches, q = forks("starter", count)
        np.testing.assert_array_equal(attend_rows(caches, q, matmul=impl), attend_rows(caches, q))


def test_a_page_may_have_another_tier_in_each_sequence():
    """One sequence is a step ahead in demoting; what they still share is read once."""
    caches, q = forks("whole pages", 3)
    demote(caches[:1], {0: WARM})
    demote(caches[1:], {1: COLD})
    assert [c.kv.tiers[:2] for c in caches] == [[WARM, HOT], [HOT, COLD], [HOT, COLD]]
    got = attend_rows(caches, q)
    assert error(got, attend_rows_ref(caches, q)) < 0.05
    for i, cache in enumerate(caches):
        np.testing.assert_array_equal(got[i], attend_rows([cache], q[i : i + 1])[0])


def test_a_wrong_page_is_found():
    """The twin tells sequences apart: with the pages of two of them exchanged it differs."""
    caches, q = forks("starter", 3)
    assert error(attend_rows([caches[1], caches[0], caches[2]], q), attend_rows_ref(caches, q)) > 0.1
