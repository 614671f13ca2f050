"""This module chooses the policy of new KV caches from measurements. A policy says at which age a KV page
moves to the next tier (a precision of KV pages). A policy is allowed if

    upper = mean KL + 2 standard errors <= limit        KL(f16 || policy), nats per token

Of the allowed policies that fit the byte budget, the policies whose time per token is at most TIE (3%) above
the fastest policy's time count as equally fast; of these policies, the policy that needs the fewest bytes is
chosen. Under memory pressure, the allowed policy that needs the fewest bytes is chosen. If no policy is
allowed or none fits, see `choose`. Ratings of replies do not influence the choice, because a rating judges
the reply, not the precision of the KV cache.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..kv.policy import TIERED, TierPolicy, limit_to
from ..store import KVMeasured
from ..text import size
from ..tiers import EVERYTHING, PAGE, fill_lengths

# nats per token: the default `limit`; the formats of the tiers were chosen with the same limit (kv/README.md)
KL_LIMIT = 0.004
TIE = 0.03  # two policies are equally fast if their times per token differ by at most this fraction
REPLIES = 3  # the minimum number of replies on which a policy must be measured before a choice

# The policies that are measured. f16 is the reference and no candidate. Most candidates have a short hot
# tier, because more hot tokens need more bytes and hardly lower the KL.
CANDIDATES = tuple(
    TierPolicy("tiered", fill_lengths(lengths))
    for lengths in ((64, 512), (64, 1024), (64, 2048), (64, EVERYTHING), TIERED.lengths)
)


@dataclass(frozen=True)
class CandidateSummary:
    """The summary of a policy's measurements.

    replies, blocks: the numbers of replies and of blocks of PAGE tokens on which the policy was measured
    kl: the mean KL(f16 || policy), nats per token
    latency: the time of a decoded token with the policy, divided by the time with an f16 cache (median over
        replies)
    bytes: the bytes of a cache with the policy that holds `TierHistory.context` tokens
    """

    policy: TierPolicy
    replies: int
    blocks: int
    kl: float
    error: float  # the standard error of kl
    latency: float
    bytes: int

    @property
    def upper(self) -> float:
        return self.kl + 2 * self.error

    @property
    def report(self) -> dict[str, Any]:
        return {
            **self.policy.lengths_by_name(),
            "replies": self.replies,
            "tokens": PAGE * self.blocks,
            "kl": self.kl,
            "error": self.error,
            "upper": self.upper,
            "latency": self.latency,
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class KVChoice:
    policy: TierPolicy
    reason: str


def summary(policy: TierPolicy, rows: Sequence[KVMeasured], nbytes: int) -> CandidateSummary:
    """Return a summary of one policy's measurements. rows: the policy's measurements, one for each reply.
    nbytes: the bytes of a cache with the policy."""
    blocks = sum(r.blocks for r in rows)
    kl = sum(r.total for r in rows) / blocks
    latency = median(r.us / r.us_f16 for r in rows)
    return CandidateSummary(policy, len(rows), blocks, kl, _error(rows, kl, blocks), latency, nbytes)


def _error(rows: Sequence[KVMeasured], kl: float, blocks: int) -> float:
    """Return the standard error of the mean KL `kl`. The result is the larger of two errors, the error over
    blocks and the error over replies, because the tokens of one reply are not independent."""
    spread = max(0.0, sum(r.squares for r in rows) / blocks - kl * kl)
    within = spread / max(1, blocks - 1)
    between = sum((r.total - r.blocks * kl) ** 2 for r in rows) / blocks**2
    return math.sqrt(max(within, between * len(rows) / max(1, len(rows) - 1)))


def candidates(lowest: int) -> tuple[TierPolicy, ...]:
    """Return the policies that are measured for a model whose pages can have the tier `lowest` and those
    above."""
    return tuple(dict.fromkeys(limit_to(policy, lowest) for policy in CANDIDATES))


def choose(
    found: Iterable[CandidateSummary],
    *,
    budget: int = 0,
    pressed: bool = False,
    limit: float = KL_LIMIT,
    default: TierPolicy = TIERED,
) -> KVChoice:
    """Choose one of the measured policies by the rule of the module. If no policy that fits the budget is
    allowed, choose the policy with the smallest `upper` among those that fit; if none fits, choose the policy
    that needs the fewest bytes.

    found: the summaries of the policies; if the list is empty, `default` is chosen
    budget: the maximum number of bytes of a cache; 0 for no limit
    pressed: True if memory is short
    limit: the maximum of `upper` (the mean KL plus two standard errors) of an allowed policy, nats per token
    """
    known = list(found)
    fitting = [f for f in known if not budget or f.bytes <= budget]
    good = [f for f in known if f.upper <= limit]
    best = [f for f in good if f in fitting]
    if not known:
        return KVChoice(default, "not enough long replies to measure; the default")
    if pressed and good:
        return _explained_choice(min(good, key=_size), f"memory is short: the smallest under {limit:g} nats")
    if best:
        fast = min(f.latency for f in best)
        tied = [f for f in best if f.latency <= fast * (1 + TIE)]
        return _explained_choice(min(tied, key=_size), f"the fastest under {limit:g} nats")
    if fitting:
        why = "none under it fits the budget" if good else "none is under it"
        return _explained_choice(
            min(fitting, key=lambda f: (f.upper, f.bytes)),
            f"limit {limit:g} nats: {why}; the least KL" + (" that fits the budget" if budget else ""),
        )
    return _explained_choice(min(known, key=_size), f"none fits the budget of {budget} bytes; the smallest")


def _size(found: CandidateSummary) -> tuple[int, float]:
    return found.bytes, found.upper


def _explained_choice(found: CandidateSummary, why: str) -> KVChoice:
    return KVChoice(
        found.policy,
        f"{why} (KL {found.kl:.5f}, at most {found.upper:.5f}; {found.latency:.2f} of f16's time per token; "
        f"{size(found.bytes)})",
    )


@dataclass(frozen=True)
class KVStatus:
    """The policy of new KV caches and its reason.

    asked: True if the user chose the policy
    report: the report that belongs to the stored choice of a policy; None before the first choice
    long_replies: the number of stored replies that are long enough for a measurement
    needed_tokens: the minimum number of tokens of a prompt and its reply for a measurement
    observed: the result of `TierHistory._reply_averages`: figures of the newest replies' caches, one entry
        for each policy
    """

    backend: str
    policy: TierPolicy | None
    asked: bool
    reason: str
    report: dict[str, Any] | None
    long_replies: int
    needed_tokens: int
    observed: list[dict[str, Any]]
