"""Decides how many drafted tokens are worth a check: 0 where plain decoding is faster.

A check of k drafted tokens costs more than a step. It yields the accepted tokens and one more token.
`MeasuredLength` measures the cost on this machine. `Acceptance` counts how often the guess after a match of
some length is right in one reply. A guess that was not checked counts too: the next token of the reply says
whether its first token was right. So a reply learns at no cost when drafts begin to pay.
"""

from dataclasses import dataclass
from typing import Protocol

MARGIN = 1.05  # a check must promise this many times the tokens per second of plain steps
SLOPE = 0.35  # what each drafted token adds to a step, before it is measured (share of a step)
SMALLEST_SLOPE = 0.02
WEIGHT = 0.1  # of a new measurement of the cost
# The matches below each of these lengths are counted together. PRIOR: the share of right guesses before the
# first count; it has the weight of PRIOR_TOKENS guesses. `python -m tests.research.drafts` chose them.
MATCHES = (4, 6, 9, 17, 33)
PRIOR = (0.2, 0.6, 0.75, 0.9, 0.97)
PRIOR_TOKENS = 6.0
FADE = 0.97  # older drafts count less: a reply may copy first and speak freely then


class Shares(Protocol):
    """The expected share of right tokens."""

    def share(self, match: int) -> float:
        """Return the share after a match of this length."""


class Certainty:
    """Tokens that are always right, because a constraint forces them."""

    def share(self, match: int) -> float:
        return 1.0


class Acceptance:
    """How often drafts are right in one reply, by the length of the match before them."""

    def __init__(self) -> None:
        self._right = [share * PRIOR_TOKENS for share in PRIOR]
        self._all = [PRIOR_TOKENS] * len(PRIOR)

    def share(self, match: int) -> float:
        """Return the expected share of right tokens after a match of this length."""
        i = _group(match)
        return self._right[i] / self._all[i]

    def count(self, match: int, is_right: bool) -> None:
        i = _group(match)
        self._right[i] = FADE * self._right[i] + is_right
        self._all[i] = FADE * self._all[i] + 1


class DraftLength(Protocol):
    """Decides how many tokens to draft, for all replies of an engine."""

    def choose(self, match: int, longest: int, acceptance: Shares) -> int:
        """Return how many tokens to draft, from 0 to `longest`, after a match of this length."""

    def measure(self, drafted: int, seconds: float) -> None:
        """Take the time of a step (0 drafted tokens) or of a check into account."""


@dataclass(frozen=True)
class FixedLength:
    """Each guess drafts this many tokens, if the backend allows so many."""

    length: int

    def choose(self, match: int, longest: int, acceptance: Shares) -> int:
        return min(self.length, longest)

    def measure(self, drafted: int, seconds: float) -> None:
        """Do nothing: the time has no influence."""


class MeasuredLength:
    """The length that promises the most tokens per second, or 0. A check of k drafted tokens costs
    1 + slope * k steps; the slope is measured."""

    def __init__(self) -> None:
        self.slope = SLOPE
        self._step = 0.0  # seconds of a plain step

    def cost(self, drafted: int) -> float:
        """Return the cost of a check, in plain steps."""
        return 1 + self.slope * drafted

    def choose(self, match: int, longest: int, acceptance: Shares) -> int:
        best, gain, tokens, chain = 0, MARGIN, 1.0, 1.0
        for k in range(1, longest + 1):
            chain *= acceptance.share(match + k - 1)
            tokens += chain
            if tokens / self.cost(k) > gain:
                best, gain = k, tokens / self.cost(k)
        return best

    def measure(self, drafted: int, seconds: float) -> None:
        if drafted == 0:
            self._step += (WEIGHT if self._step else 1.0) * (seconds - self._step)
        elif self._step:
            # A pause of the whole machine must not count like ten measurements.
            slope = min((seconds / self._step - 1) / drafted, 4 * self.slope)
            self.slope += WEIGHT * (max(slope, SMALLEST_SLOPE) - self.slope)


def draft_length(speculate: str) -> DraftLength | None:
    """Return the rule for a value of the setting `speculate`: "auto", "off" (None) or a number of tokens."""
    if speculate == "off":
        return None
    return MeasuredLength() if speculate == "auto" else FixedLength(int(speculate))


def _group(match: int) -> int:
    return next((i for i, end in enumerate(MATCHES) if match < end), len(MATCHES) - 1)
