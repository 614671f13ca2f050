"""This module detects a reply that repeats the same few tokens again and again.

Small models can fall into loops of the same few tokens, and then write until the token limit. The constants
of this module were chosen on the replies in `tests/engine/test_repetition.py`: real loops, and tables, lists
and code that only look like loops.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

REPEATS = "the reply only repeated itself, so it was ended; ratings of it teach nothing."

GRAM = 6  # the number of tokens in a gram; a gram is a run of tokens that is compared as a whole
BEFORE = 2  # a gram is repeated if it occurred at least BEFORE times earlier in the reply
# the number of newest tokens that are checked; more than a row of JSON has, because most of a row's tokens
# are also in other rows
WINDOW = 128
# the reply is a loop if at least this share of the WINDOW newest tokens end a repeated gram; one new token
# makes GRAM grams new
SHARE = 0.92
# These three constants are for a reply that reached its token limit. At least PROSE_SHARE of the reply's last
# PROSE_WINDOW tokens must be the last token of a gram (a run of tokens) that occurred earlier.
# At least PROSE_LETTERS of the reply's characters must be letters or spaces.
PROSE_WINDOW, PROSE_SHARE, PROSE_LETTERS = 192, 0.75, 0.9


class Repetition:
    """A detector of loops in one reply. Pass each token of the reply to `add`. `is_loop` is True if at least
    the share SHARE of the newest WINDOW tokens repeats earlier tokens.

    Rows of a table or of JSON repeat too, but a row usually has some tokens that no earlier row has. A gram
    (a run of GRAM tokens) with a new token is new, so rows usually do not count as a loop.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self._grams: Counter[tuple[int, ...]] = Counter()
        self._newest: deque[int] = deque(maxlen=GRAM)
        self._repeated: deque[bool] = deque(maxlen=WINDOW)
        self._count = 0  # the number of True values in `_repeated`
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Add the next token of the reply."""
        self._newest.append(token)
        gram = tuple(self._newest)
        if len(self._repeated) == WINDOW:
            self._count -= self._repeated[0]
        self._repeated.append(self._grams[gram] >= BEFORE)
        self._count += self._repeated[-1]
        self._grams[gram] += 1

    @property
    def share(self) -> float:
        """Return the share of the newest tokens, at most WINDOW, that end a repeated gram."""
        return self._count / len(self._repeated) if self._repeated else 0.0

    @property
    def is_loop(self) -> bool:
        return self._count >= SHARE * WINDOW


def is_repeated_prose(tokens: Sequence[int], text: str) -> bool:
    """Return True if a reply that was cut at its limit repeats the same sentences with small changes.
    `Repetition` does not find this loop, because the changes make new grams. Rows of data repeat too, but
    have fewer letters, so this function usually ignores them."""
    if len(tokens) < PROSE_WINDOW or not text:
        return False
    grams = [tuple(tokens[max(0, end - GRAM) : end]) for end in range(1, len(tokens) + 1)]
    earlier, repeated = set[tuple[int, ...]](), list[bool]()
    for gram in grams:
        repeated.append(gram in earlier)
        earlier.add(gram)
    letters = sum(char.isalpha() or char.isspace() for char in text) / len(text)
    return letters >= PROSE_LETTERS and sum(repeated[-PROSE_WINDOW:]) >= PROSE_SHARE * PROSE_WINDOW
