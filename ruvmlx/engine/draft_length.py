"""This module decides how many guessed tokens (a draft) the model checks in one call. The number is 0 if a
check is not expected to be clearly faster than decoding without a draft.

A check of k drafted tokens takes longer than a decode step, but gives the accepted tokens and one more token.
`MeasuredLength` measures on this machine how long a check takes. `Acceptance` counts how often a guess is
right after a match of some length (a match: the newest tokens occurred in the chat before). `Acceptance` also
counts the first token of a draft that is not checked, because the next token of the reply shows whether this
guess was right. So the module finds out, without a check, when checks begin to save time in a reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# a check is made if it promises more than MARGIN times the tokens per second of decoding without drafts
MARGIN = 1.05
# before the first measurement: the time that each drafted token adds to a check, divided by the time of a
# decode step without a draft
SLOPE = 0.35
SMALLEST_SLOPE = 0.02
WEIGHT = 0.1  # the weight of a new measurement in the average of the slope (`MeasuredLength`)
# A match is a run of the newest tokens that occurred in the chat before. Match lengths between two
# neighbouring numbers of MATCHES are counted together. PRIOR is the assumed share of right guesses for each
# group of match lengths, and has the weight of PRIOR_TOKENS counted guesses. `python -m tests.research.drafts
# guesses` measures the shares of real replies, and PRIOR is near these shares.
MATCHES = (4, 6, 9, 17, 33)
PRIOR = (0.2, 0.6, 0.75, 0.9, 0.97)
PRIOR_TOKENS = 6.0
# Each new guess multiplies the weight of the older guesses in its group by FADE, because a reply can first
# copy text and later write new text.
FADE = 0.97
# with `speculate` = "auto": the maximum number of guesses of a draft model that are checked in one call
LONGEST_CHAIN = 7
# before the first measurement: the time of a draft model's step, divided by the time of the large model's
# step
UNKNOWN_STEP = 0.2


class Shares(Protocol):
    """An estimate of the share of drafted tokens that are right."""

    def share(self, sign: float) -> float:
        """Return the expected share of right tokens. sign: how sure the guess is, for example the length of
        the match."""


class Certainty:
    """This estimate is always 1, for drafted tokens that a constraint forces."""

    def share(self, sign: float) -> float:
        return 1.0


class Acceptance:
    """Acceptance counts how often guessed tokens are right, by a sign of how sure the guess is: the length of
    the match before the token (prompt_lookup.py), or the draft model's probability of the token."""

    def __init__(self, ends: Sequence[float] = MATCHES, prior: Sequence[float] = PRIOR) -> None:
        """A sign is a number that shows how sure a guess is. ends: signs between two neighbouring ends are
        counted together. prior: the assumed share of right tokens in each group."""
        self._ends = ends
        self._right = [share * PRIOR_TOKENS for share in prior]
        self._all = [PRIOR_TOKENS] * len(prior)

    @property
    def mean(self) -> float:
        """Return the estimated share of right tokens among all guesses, whatever their signs. A sign is a
        number that shows how sure a guess is. The estimate includes PRIOR_TOKENS assumed guesses for each
        group of signs, and newer guesses weigh more."""
        return sum(self._right) / sum(self._all)

    def share(self, sign: float) -> float:
        """Return the share of right tokens among the counted guesses whose sign (how sure the guess is) is in
        the same group as `sign`."""
        i = self._group(sign)
        return self._right[i] / self._all[i]

    def _group(self, sign: float) -> int:
        return next((i for i, end in enumerate(self._ends) if sign < end), len(self._ends) - 1)

    def count(self, sign: float, is_right: bool) -> None:
        i = self._group(sign)
        self._right[i] = FADE * self._right[i] + is_right
        self._all[i] = FADE * self._all[i] + 1


class DraftLength(Protocol):
    """A rule that decides how many tokens to draft. All replies of an engine use the same rule."""

    def choose(self, match: int, longest: int, acceptance: Shares) -> int:
        """Return the number of tokens to draft, from 0 to `longest`, if the newest `match` tokens occurred in
        the chat before."""

    def measure(self, drafted: int, seconds: float) -> None:
        """Learn from the time of a decode step without a draft (drafted=0) or of a check of `drafted`
        tokens."""

    def chain(self, seconds: float) -> "DraftChain":
        """Return an empty draft, to which the guesses of a draft model are added. seconds: the time of one
        step of the draft model."""


@dataclass(frozen=True)
class FixedLength:
    """This rule always drafts `length` tokens, or fewer if the backend's maximum or the found guess is
    shorter."""

    length: int

    def choose(self, match: int, longest: int, acceptance: Shares) -> int:
        return min(self.length, longest)

    def measure(self, drafted: int, seconds: float) -> None:
        """Do nothing, because this rule ignores the times."""

    def chain(self, seconds: float) -> "DraftChain":
        return DraftChain(self.length, 0.0, 0.0)


class MeasuredLength:
    """This rule chooses the number of drafted tokens for which the expected number of tokens per second is
    the largest; 0 if no number promises more than MARGIN times the tokens per second without a draft. The
    rule assumes that a check of k drafted tokens takes as long as 1 + slope * k decode steps without a draft.
    The rule measures the slope on this machine."""

    def __init__(self) -> None:
        self.slope = SLOPE
        # the average seconds of a decode step without a draft; 0 before the first measurement
        self._step = 0.0

    def cost(self, drafted: int) -> float:
        """Return the time of a check of `drafted` tokens, divided by the time of a decode step without a
        draft."""
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
            # Limit each measured slope to four times the average slope, because a single pause of the whole
            # machine must not change the average much.
            slope = min((seconds / self._step - 1) / drafted, 4 * self.slope)
            self.slope += WEIGHT * (max(slope, SMALLEST_SLOPE) - self.slope)

    def chain(self, seconds: float) -> "DraftChain":
        return DraftChain(LONGEST_CHAIN, self.slope, seconds / self._step if self._step else UNKNOWN_STEP)


@dataclass
class DraftChain:
    """A draft that a draft model makes token by token, with the expected number of reply tokens and the
    expected time to make and check the draft.

    longest: the maximum number of tokens of the draft
    slope: the time that each drafted token adds to the check, divided by the time of a decode step of the
        large model
    step: the time of one step of the draft model, divided by the time of a decode step of the large model
    """

    longest: int
    slope: float
    step: float
    count: int = 0
    tokens: float = 1.0  # the expected number of reply tokens that the check of the draft gives
    # the time to make and to check the draft, divided by the time of a decode step of the large model
    cost: float = 1.0
    chance: float = 1.0  # the probability that all tokens of the draft are right

    def is_worth(self, share: float) -> bool:
        """Return True if at least one draft length from 1 to `longest` promises more than MARGIN times the
        tokens per second without a draft, or if drafts cost no time (`FixedLength`). share: the expected
        share of right tokens."""
        tokens = chance = cost = 1.0
        for _ in range(self.longest):
            chance *= share
            tokens, cost = tokens + chance, cost + self.slope + self.step
            if tokens > MARGIN * cost:
                return True
        return self.slope + self.step == 0

    def takes(self, share: float) -> bool:
        """Add the draft model's time for one more guess to `cost`. Return True if the check of this guess
        saves time."""
        self.cost += self.step
        return self.chance * share * self.cost >= self.slope * self.tokens

    def add(self, share: float) -> None:
        """Add a guess to the draft."""
        self.count += 1
        self.chance *= share
        self.tokens, self.cost = self.tokens + self.chance, self.cost + self.slope

    def goes_on(self, share: float) -> bool:
        """Return True if the draft is shorter than `longest`, and one more guess of the draft model saves
        time. share: the expected share of right tokens."""
        more = self.slope + self.step
        return self.count < self.longest and self.chance * share * self.cost >= more * self.tokens


def draft_length(speculate: str) -> DraftLength | None:
    """Return the rule for a value of the setting `speculate`: "auto", "off" (None) or a number of tokens."""
    if speculate == "off":
        return None
    return MeasuredLength() if speculate == "auto" else FixedLength(int(speculate))
