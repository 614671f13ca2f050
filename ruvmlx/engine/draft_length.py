"""This module decides how many drafted tokens are worth a check. The answer is 0 if plain decoding is faster.

A check of k drafted tokens costs more than a decode step. The result of a check is the accepted tokens and
one more token. `MeasuredLength` measures the cost on this machine. `Acceptance` counts, in one reply, how
often a guess is right after a match of some length. A guess that was not checked counts too, because the next
token of the reply shows whether its first token was right. So a reply learns at no cost when drafts begin to
pay.
"""

from dataclasses import dataclass
from typing import Protocol

MARGIN = 1.05  # a check must promise at least this factor times the tokens per second of plain steps
SLOPE = 0.35  # before the first measurement: the added cost of each drafted token, as a part of a step
SMALLEST_SLOPE = 0.02
WEIGHT = 0.1  # the weight of a new measurement in the average cost
# A match is a run of the newest tokens that occurred before. The matches below each of these lengths are
# counted together. PRIOR: the share of right guesses before the first count; PRIOR has the weight of
# PRIOR_TOKENS guesses. `python -m tests.research.drafts` chose these numbers.
MATCHES = (4, 6, 9, 17, 33)
PRIOR = (0.2, 0.6, 0.75, 0.9, 0.97)
PRIOR_TOKENS = 6.0
# Each new guess lowers the weight of older guesses by this factor: a reply can first copy, then write freely.
FADE = 0.97


class Shares(Protocol):
    """The expected share of drafted tokens that are right."""

    def share(self, match: int) -> float:
        """Return the share after a match of this length (tokens)."""


class Certainty:
    """The shares of tokens that are always right, because a constraint forces them."""

    def share(self, match: int) -> float:
        return 1.0


class Acceptance:
    """Acceptance counts how often drafts are right in one reply, by the length of the match before them."""

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
    """A rule that decides how many tokens to draft, for all replies of an engine."""

    def choose(self, match: int, longest: int, acceptance: Shares) -> int:
        """Return the number of tokens to draft, from 0 to `longest`, after a match of this length."""

    def measure(self, drafted: int, seconds: float) -> None:
        """Learn from the time of a plain step (drafted=0) or of a check."""


@dataclass(frozen=True)
class FixedLength:
    """This rule always drafts `length` tokens, if the backend allows so many."""

    length: int

    def choose(self, match: int, longest: int, acceptance: Shares) -> int:
        return min(self.length, longest)

    def measure(self, drafted: int, seconds: float) -> None:
        """Do nothing: the time has no influence."""


class MeasuredLength:
    """This rule chooses the length that promises the most tokens per second, or 0. A check of k drafted
    tokens costs 1 + slope * k steps; the slope is measured."""

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
            # Limit the slope, because a pause of the whole machine must not have the weight of ten
            # measurements.
            slope = min((seconds / self._step - 1) / drafted, 4 * self.slope)
            self.slope += WEIGHT * (max(slope, SMALLEST_SLOPE) - self.slope)


def draft_length(speculate: str) -> DraftLength | None:
    """Return the rule for a value of the setting `speculate`: "auto", "off" (None) or a number of tokens."""
    if speculate == "off":
        return None
    return MeasuredLength() if speculate == "auto" else FixedLength(int(speculate))


def _group(match: int) -> int:
    return next((i for i, end in enumerate(MATCHES) if match < end), len(MATCHES) - 1)
