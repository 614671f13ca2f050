"""The tiers of the KV cache: how precisely keys and values are kept, by the age of their tokens.

A row each, from the oldest tokens to the newest; the number of a tier is its row's. The C library and the GPU
kernels have the same rows: RVM_CODE_TIERS in neon/include/rvm_pages.h, TIERS in metal_kernels/pages.h.
tests/kv/test_tiers.py compares the three.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 64  # tokens that change their tier together


@dataclass(frozen=True)
class Tier:
    """bits: of a number: 16 is f16; 8 and 4 are codes (metal_kernels/README.md says how they are made).

    rotated: keys are rotated before they become codes. terms: the C library multiplies codes by queries of
    7 bits (1) or 15 (2). cost: of attention over a page on a GPU, by that over a cold page. lengths: the age
    in tokens at which a page leaves the tier, normally and at each level of memory pressure; none for the
    last.
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

# Tiers that pages leave, the newest tokens' first, as users name them: ("hot", "warm"); lengths for them
LENGTHS = tuple(tier.name for tier in reversed(TIERS[1:]))
EXAMPLE = ",".join(str(tier.lengths[1]) for tier in reversed(TIERS[1:]))


def fill_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths for all of LENGTHS: a tier that has none is empty, so it ends where the one before it does."""
    return (*lengths, *[lengths[-1]] * (len(LENGTHS) - len(lengths)))


def describe_tiers() -> str:
    """ "f16, then 8 bits, then 4 bits": a width that several tiers share is named once."""
    widths = dict.fromkeys(tier.bits for tier in reversed(TIERS))
    return ", then ".join("f16" if bits == 16 else f"{bits} bits" for bits in widths)
