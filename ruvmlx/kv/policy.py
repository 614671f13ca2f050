"""This module decides, by the age of a KV page's tokens, which tier (precision) the page has."""

from dataclasses import dataclass, replace
from typing import Any

from ..tiers import COLD, EVERYTHING, HOT, PAGE, TIERS, WARM, check_lengths, lengths_by_name

# For each level of memory pressure (0: no pressure): the ages at which a page leaves the tiers, the hot tier
# first.
_LEVELS = tuple(zip(*(tier.lengths for tier in reversed(TIERS[1:])), strict=True))
MAX_LEVEL = len(_LEVELS) - 1
# the lowest level at which all tokens behind the hot tier have the fewest bits (4)
FOUR_BIT_LEVEL = next(level for level, ages in enumerate(_LEVELS) if len(set(ages)) == 1)


@dataclass(frozen=True)
class TierPolicy:
    """A policy decides the tier of each page by the age of the page (the number of newer tokens). The lengths
    say up to which age a page stays in each tier.

    lengths: the ages (tokens) at which a page leaves the hot tier, the warm tier, and so on. Only whole pages
        change their tier, so with a length of 256 tokens the hot tier holds 256 to 319 tokens.
    lowest: the tier with the fewest bits that a page can have, also under memory pressure
    """

    name: str = "tiered"
    lengths: tuple[int, ...] = _LEVELS[0]
    lowest: int = COLD

    def __post_init__(self) -> None:
        check_lengths(self.lengths)

    def lengths_by_name(self) -> dict[str, Any]:
        """Return the lengths by the name of their tier, for example {"hot": 256, "warm": 2048}."""
        return lengths_by_name(self.lengths)

    @property
    def reach(self) -> int:
        """Return the token offset in a text from which on tokens attend to pages in each tier that the policy
        uses; 0 for f16, which has no lower tier."""
        return max((age + PAGE for age in self.lengths if age < EVERYTHING), default=0)

    def counts(self, offset: int) -> tuple[int, ...]:
        """Return one number for each tier below hot: how many of the oldest pages, in a sequence of `offset`
        tokens, are in this tier or in a lower tier.

        A page's age is computed as if the sequence had one more token, so that with the next token the newest
        lengths[0] tokens are in f16.
        """
        return tuple(max(0, offset + 1 - age) // PAGE for age in reversed(self.lengths))

    def next_change(self, offset: int) -> int:
        """Return the smallest number of tokens above `offset` at which the result of `counts` changes."""
        return min(_next_change(offset, age) for age in self.lengths)

    def bytes(self, offset: int, page_bytes: tuple[int, ...]) -> int:
        """Return the number of bytes of the pages of a sequence with `offset` tokens. page_bytes: bytes of
        one page, by tier."""
        ends = (0, *self.counts(offset), -(-offset // PAGE))
        return sum((ends[tier + 1] - ends[tier]) * size for tier, size in enumerate(page_bytes))


def _next_change(offset: int, age: int) -> int:
    """Return the smallest number of tokens in the sequence, above `offset`, at which a page reaches this age
    (tokens). Page j reaches the age at 64 (j + 1) + age - 1 tokens."""
    return (max(0, offset + 1 - age) // PAGE + 1) * PAGE + age - 1


def limit_to(policy: TierPolicy, lowest: int) -> TierPolicy:
    """Return the policy without the tiers below the tier `lowest`."""
    kept = HOT - lowest  # the number of tiers below hot that pages can still have
    lengths = (*policy.lengths[:kept], *[EVERYTHING] * (HOT - kept))
    return replace(policy, lengths=lengths, lowest=max(policy.lowest, lowest))


TIERED = TierPolicy()
EIGHT_BITS = limit_to(TIERED, WARM)
F16 = TierPolicy("f16", (EVERYTHING,) * HOT)


def tighten(policy: TierPolicy, level: int) -> TierPolicy:
    """Return the policy with the shorter lengths of a level of memory pressure, from 0 (no pressure) to
    MAX_LEVEL. The result has no tier below the policy's lowest tier. A policy with f16 alone never changes,
    because it means that the user asked for full precision."""
    if level == 0 or policy.lengths[0] == EVERYTHING:
        return policy
    return limit_to(replace(policy, lengths=tuple(map(min, policy.lengths, _LEVELS[level]))), policy.lowest)
