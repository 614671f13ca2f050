"""This module decides how many guessed tokens (a draft) the model checks in one call. The number is 0 if
plain decoding is faster.

A check of k drafted tokens takes longer than a decode step, but gives the accepted tokens and one more token.
`MeasuredLength` measures the time on this machine. `Acceptance` counts, in one reply, how often a draft is
right after a match of some length. Drafts that are not checked are counted too, because the next token of the
reply shows whether their first token was right. So the module finds out, without any check, when checks begin
to save time in this reply.
"""

from dataclasses import dataclass
from typing import Protocol

MARGIN = 1.05  # a check must promise at least this factor times the tokens per second of plain steps
SLOPE = 0.35  # before the first measurement: the added time of each drafted token, as a part of a plain step
SMALLEST_SLOPE = 0.02
WEIGHT = 0.1  # the weight of a new measurement in the average of the added time
# A match is a run of the newest tokens that occurred in the chat before. Match lengths
# between two neighbouring numbers of MATCHES are counted together. PRIOR is the assumed share of right
# guesses; it has the weight of PRIOR_TOKENS counted guesses. `python -m tests.research.drafts` chose these
# numbers.
MATCHES = (4, 6, 9, 17, 33)
PRIOR = (0.2, 0.6, 0.75, 0.9, 0.97)
PRIOR_TOKENS = 6.0
# Each new guess lowers the weight of older guesses by this factor, because a reply can first copy text and
# later write new text.
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
        """Do nothing, because this rule ignores the times."""


class MeasuredLength:
    """This rule chooses the number of drafted tokens that promises the most tokens per second. A check of k
    drafted tokens takes as long as 1 + slope * k plain steps. The rule measures the slope on this machine."""

    def __init__(self) -> None:
        self.slope = SLOPE
        self._step = 0.0  # seconds of a plain step

    def cost(self, drafted: int) -> float:
        """Return the time of a check of this number of drafted tokens, in plain steps."""
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
