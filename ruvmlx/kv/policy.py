"""The precision of keys and values by the age of their token.

From the newest to the oldest token: hot (f16), warm (8 bits), cold (4 bits). Tier numbers are those of the
kernels.
"""

from dataclasses import dataclass

PAGE = 64  # tokens
COLD, WARM, HOT = 0, 1, 2
EVERYTHING = 1 << 40  # tokens; more than any context


@dataclass(frozen=True)
class TierPolicy:
    """hot: at least this many of the newest tokens stay in f16; warm: tokens younger than this age, in
    tokens, keep at least 8 bits; older ones get 4 bits.

    Whole pages move, so the hot tier holds `hot` to `hot` + 63 tokens.
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
        """(cold, cold + warm): how many of the oldest pages of a sequence of `offset` tokens are in these
        tiers.

        Computed for the next token, which must find `hot` tokens in f16, itself included.
        """
        low = max(0, offset + 1 - self.hot) // PAGE
        return min(low, max(0, offset + 1 - self.warm) // PAGE), low

    def next_change(self, offset: int) -> int:
        """The smallest offset above this one at which `counts` changes."""
        return min(_next_change(offset, self.hot), _next_change(offset, self.warm))

    def bytes(self, offset: int, page_bytes: tuple[int, int, int]) -> int:
        """Bytes of the pages of a sequence. page_bytes: bytes of one page, by tier."""
        cold, low = self.counts(offset)
        pages = -(-offset // PAGE)
        return cold * page_bytes[COLD] + (low - cold) * page_bytes[WARM] + (pages - low) * page_bytes[HOT]


def _next_change(offset: int, age: int) -> int:
    """Page j reaches `age` at offset 64 (j + 1) + age - 1."""
    return (max(0, offset + 1 - age) // PAGE + 1) * PAGE + age - 1


TIERED = TierPolicy()
F16 = TierPolicy("f16", EVERYTHING, EVERYTHING)

# (hot, warm) limits of levels 1 to MOST: warm shrinks first, then hot. Level 0 is the policy itself.
_LIMITS = ((256, 1024), (256, 512), (256, 256), (128, 128), (64, 64))
MOST = len(_LIMITS)


def tightened(policy: TierPolicy, level: int) -> TierPolicy:
    """The policy at a level of memory pressure, 0 (none) to MOST. F16 never tightens: the user asked for
    it."""
    if level == 0 or policy.hot == EVERYTHING:
        return policy
    hot, warm = _LIMITS[level - 1]
    return TierPolicy(policy.name, min(policy.hot, hot), min(policy.warm, warm))
