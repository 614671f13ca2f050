"""Which precision a token's keys and values have, by its age.

Newest first: hot (f16), warm (8 bits), cold (4 bits). Tiers are numbered as the kernels number them.
"""

from dataclasses import dataclass

PAGE = 64  # tokens
COLD, WARM, HOT = 0, 1, 2
EVERYTHING = 1 << 40  # tokens; more than any context


@dataclass(frozen=True)
class TierPolicy:
    """hot: tokens kept in f16 at least; warm: the age, in tokens, up to which the others keep 8 bits.

    Whole pages move, so hot holds `hot` to `hot` + 63 tokens.
    """

    name: str = "tiered"
    hot: int = 256
    warm: int = 2048

    def __post_init__(self) -> None:
        if not PAGE <= self.hot <= self.warm or self.hot % PAGE or self.warm % PAGE:
            raise ValueError(
                f"tiers of {self.hot} and {self.warm} tokens: must be multiples of {PAGE}, hot <= warm"
            )

    def counts(self, offset: int) -> tuple[int, int]:
        """-> (cold, cold + warm): so many of the oldest pages a sequence of `offset` tokens has there.

        Counted for the next token to come, which must find `hot` tokens in f16, itself included.
        """
        low = max(0, offset + 1 - self.hot) // PAGE
        return min(low, max(0, offset + 1 - self.warm) // PAGE), low

    def next_change(self, offset: int) -> int:
        """The least offset above this one at which `counts` changes."""
        return min(_next_change(offset, self.hot), _next_change(offset, self.warm))

    def bytes(self, offset: int, page_bytes: tuple[int, int, int]) -> int:
        """Bytes of a sequence's pages, by the bytes of a page of each tier."""
        cold, low = self.counts(offset)
        pages = -(-offset // PAGE)
        return cold * page_bytes[COLD] + (low - cold) * page_bytes[WARM] + (pages - low) * page_bytes[HOT]


def _next_change(offset: int, age: int) -> int:
    """Page j reaches `age` at offset 64 (j + 1) + age - 1."""
    return (max(0, offset + 1 - age) // PAGE + 1) * PAGE + age - 1


TIERED = TierPolicy()
F16 = TierPolicy("f16", EVERYTHING, EVERYTHING)

# What memory pressure does: warm shrinks first, then hot. Level 0 is the policy itself.
_LIMITS = ((256, 1024), (256, 512), (256, 256), (128, 128), (64, 64))
MOST = len(_LIMITS)


def tightened(policy: TierPolicy, level: int) -> TierPolicy:
    """The policy under pressure, 0 (none) to MOST. f16 was asked for by name: it stays."""
    if level == 0 or policy.hot == EVERYTHING:
        return policy
    hot, warm = _LIMITS[level - 1]
    return TierPolicy(policy.name, min(policy.hot, hot), min(policy.warm, warm))
