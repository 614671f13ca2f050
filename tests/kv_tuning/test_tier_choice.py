"""The rule that chooses the KV cache's lengths: a table of measurements and choices."""

import inspect
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.kv.policy import TIERED, TierPolicy
from ruvmlx.kv_tuning.tier_choice import CANDIDATES, CandidateSummary, choose, summary
from ruvmlx.store import KVMeasured
from ruvmlx.tiers import EVERYTHING

SMALL, MIDDLE, LARGE = (TierPolicy("tiered", pair) for pair in ((64, 512), (64, 2048), (256, EVERYTHING)))


def candidate(policy, kl, latency, nbytes, error=0.0001) -> CandidateSummary:
    return CandidateSummary(policy, 3, 24, kl, error, latency, nbytes)


KNOWN = [
    candidate(SMALL, 0.0050, 0.70, 300),
    candidate(MIDDLE, 0.0025, 0.80, 400),
    candidate(LARGE, 0.0001, 0.90, 550),
]
EQUAL = [replace(f, latency=latency) for f, latency in zip(KNOWN, (0.5, 0.81, 0.80), strict=True)]
CHEAP = [replace(KNOWN[0], kl=0.0010, latency=0.99), *KNOWN[1:]]


@pytest.mark.parametrize(
    ("known", "given", "want", "why"),
    [
        ([], {}, TIERED, "not enough long replies"),
        ([], {"pressed": True, "budget": 1}, TIERED, "not enough long replies"),
        (KNOWN, {}, MIDDLE, "the fastest under 0.004"),
        (KNOWN, {"limit": 0.01}, SMALL, "the fastest under 0.01"),
        (KNOWN, {"limit": 0.002}, LARGE, "the fastest under 0.002"),
        (EQUAL, {}, MIDDLE, "the fastest"),  # 1% slower is as fast, and it is smaller
        (CHEAP, {}, MIDDLE, "the fastest"),
        (CHEAP, {"pressed": True}, SMALL, "memory is short: the smallest"),
        (KNOWN, {"pressed": True}, MIDDLE, "memory is short"),  # never over the limit
        (KNOWN, {"budget": 400}, MIDDLE, "the fastest"),
        (KNOWN, {"budget": 399}, SMALL, "none under it fits the budget; the least KL that fits the budget"),
        (KNOWN, {"budget": 399, "pressed": True}, MIDDLE, "memory is short"),
        (KNOWN, {"limit": 1e-5}, LARGE, "none is under it; the least KL"),
        (KNOWN, {"limit": 1e-5, "budget": 500}, MIDDLE, "the least KL that fits the budget"),
        (KNOWN, {"limit": 1e-5, "pressed": True}, LARGE, "none is under it; the least KL"),
        (KNOWN, {"budget": 299}, SMALL, "none fits the budget of 299 bytes"),
    ],
)
def test_what_is_chosen(known, given, want, why):
    for order in (known, known[::-1]):
        choice = choose(order, **given)
        assert choice.policy == want and why in choice.reason


def test_the_upper_bound_counts_not_the_mean():
    """A mean under the limit that is not known well enough is not under it."""
    unsure = [replace(KNOWN[1], error=0.001), KNOWN[2]]
    assert choose(unsure).policy == LARGE


def test_ratings_are_no_input():
    """What `choose` knows of a reply is how long, how near and how fast; nothing that a rating could move."""
    known = {
        *inspect.signature(choose).parameters,
        *CandidateSummary.__dataclass_fields__,
        *KVMeasured.__dataclass_fields__,
    }
    assert not [name for name in known if "rating" in name or "reward" in name or "quality" in name]


def test_the_default_policy_is_a_candidate_and_f16_is_not():
    """The default is one of them, f16 is none."""
    assert TIERED in CANDIDATES and all(c.lengths[0] < EVERYTHING for c in CANDIDATES)
    assert len(set(CANDIDATES)) == len(CANDIDATES)


def measurement(reply_id, kl, us=1.0) -> KVMeasured:
    return KVMeasured(reply_id, (64, 512), len(kl), sum(kl), float(np.square(kl).sum()), us, 2.0)


def test_summary_against_numpy():
    """Replies that are alike: the error is that of their blocks; unequal lengths are weighed by them."""
    blocks = np.random.default_rng(5).uniform(0.001, 0.003, 30)
    rows = [
        measurement("a", blocks[:7], 1.0),
        measurement("b", blocks[7:23], 1.8),
        measurement("c", blocks[23:], 1.2),
    ]
    got = summary(SMALL, rows, 77)
    assert (got.replies, got.blocks, got.latency, got.bytes) == (3, 30, 0.6, 77)
    assert got.kl == pytest.approx(blocks.mean())
    within = blocks.std(ddof=1) / np.sqrt(30)
    assert within * 0.999 <= got.error < 2 * within


def test_replies_that_differ_widen_the_error():
    """Two texts of a hundred equal blocks each are two facts, not two hundred."""
    rows = [measurement("a", [0.001] * 100), measurement("b", [0.003] * 100)]
    assert summary(SMALL, rows, 0).error == pytest.approx(0.001)  # std(ddof=1) / sqrt(2)
    assert summary(SMALL, [measurement("a", [0.002])], 0).error == 0
