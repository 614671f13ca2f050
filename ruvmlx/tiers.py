"""This module lists the tiers of the KV cache. A tier is a precision for the keys and values of a KV page.

A tiered cache stores the keys and values of old tokens with fewer bits than the keys and values of new
tokens. The table TIERS has one row for each tier, from the oldest tokens to the newest tokens; the row's
index is the tier's number. The C library has the same rows, except the newest tier, in RVM_CODE_TIERS
(neon/include/rvm_pages.h), and the GPU kernels have the same rows in TIERS (metal_kernels/pages.h).
tests/kv/test_tiers.py compares the three tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 64  # the number of tokens in one KV page; all tokens of a page are in the same tier
EVERYTHING = 1 << 40  # a number of tokens that is larger than any context


@dataclass(frozen=True)
class Tier:
    """One tier of the KV cache. bits: the number of bits of one stored number; 16 means f16, 8 and 4 mean
    integer codes (metal_kernels/README.md).

    rotated: True if keys are multiplied by a rotation before the quantisation.
    terms: the precision of the queries by which the C library multiplies the codes: 7 bits (terms 1) or 15
        bits (terms 2).
    cost: the time that a GPU needs for attention over a page of this tier, divided by the time for a page of
    the tier "cold".
    lengths: the age in tokens at which a page leaves the tier, first without memory pressure, then at each
        level of pressure; empty for the oldest tier.
    """

    name: str
    bits: int
    rotated: bool = False
    terms: int = 0
    cost: int = 1
    lengths: tuple[int, ...] = ()


TIERS = (
    Tier("cold", 4, rotated=True, terms=1, cost=1),
    Tier("warm", 8, terms=2, cost=3, lengths=(2048, 1024, 512, 256, 128, 64)),
    Tier("hot", 16, cost=6, lengths=(256, 256, 256, 256, 128, 64)),
)
COLD, WARM, HOT = range(len(TIERS))

# The names of the tiers that a page leaves as it ages, in this order: ("hot", "warm")
LENGTHS = tuple(tier.name for tier in reversed(TIERS[1:]))
# lengths in the form of a setting: those of a chat without memory pressure, and an example
USUAL, EXAMPLE = (",".join(str(tier.lengths[i]) for tier in reversed(TIERS[1:])) for i in (0, 1))


def lengths_by_name(lengths: Sequence[int]) -> dict[str, int]:
    """Return the lengths by the name of their tier, for example {"hot": 256, "warm": 2048}."""
    return dict(zip(LENGTHS, lengths, strict=True))


def fill_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return one length for each name in LENGTHS. A tier without a given length gets the same length as the
    tier before it, so that no page is in this tier."""
    return (*lengths, *[lengths[-1]] * (len(LENGTHS) - len(lengths)))


RULE = f"multiples of {PAGE}, {' <= '.join(LENGTHS)}"  # what `check_lengths` demands, in words


def check_lengths(lengths: Sequence[int]) -> None:
    """Raise ValueError unless there is one length for each name in LENGTHS, in this order, and the lengths
    obey RULE."""
    rising = list(lengths) == sorted(lengths) and lengths[0] >= PAGE
    if len(lengths) != len(LENGTHS) or not rising or any(length % PAGE for length in lengths):
        raise ValueError(f"tiers of {' and '.join(map(str, lengths))} tokens: must be {RULE}")


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return the lengths that a text such as "256,1024" or "256,all" names. "all" means EVERYTHING. If the
    text names too few lengths, `fill_lengths` adds the missing ones. Raises ValueError as `check_lengths`
    does."""
    lengths = fill_lengths([EVERYTHING if age == "all" else int(age) for age in text.split(",")])
    check_lengths(lengths)
    return lengths


def describe_lengths() -> str:
    """Return what EXAMPLE means: "the newest 256 tokens have 16 bits, those up to 1,024 have 8 bits, older
    ones have 4 bits"."""
    aging = list(reversed(TIERS))
    parts = [f"those up to {tier.lengths[1]:,} have {tier.bits} bits" for tier in aging[1:-1]]
    newest = f"the newest {aging[0].lengths[1]} tokens have {aging[0].bits} bits"
    return ", ".join([newest, *parts, f"older ones have {aging[-1].bits} bits"])


def describe_tiers() -> str:
    """Return a text such as "f16, then 8 bits, then 4 bits". If several tiers have the same number of bits,
    the text names this number only once."""
    widths = dict.fromkeys(tier.bits for tier in reversed(TIERS))
    return ", then ".join("f16" if bits == 16 else f"{bits} bits" for bits in widths)
