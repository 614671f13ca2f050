"""Notices a reply that repeats itself: the same few tokens over and over.

Small models fall into such loops, and then write until the limit. `tests/engine/test_repetition.py` has the
replies that the numbers were chosen on: loops, and tables, lists and code that only look like them.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

REPEATS = "the reply only repeated itself, so it was ended; ratings of it teach nothing."

GRAM = 6  # tokens that are compared at once
BEFORE = 2  # earlier occurrences that make a gram a repeated one
WINDOW = 128  # newest tokens that are looked at: more than a row of JSON, which has little of its own
SHARE = 0.92  # of them that must end a repeated gram: one token of its own breaks GRAM of them
# A reply that reached its limit: so many of its last tokens end a gram that came before, and are prose.
PROSE_WINDOW, PROSE_SHARE, PROSE_LETTERS = 192, 0.75, 0.9


class Repetition:
    """Receives the tokens of one reply, one at a time. `is_loop`: the newest ones only repeat earlier ones.

    The rows of a table or of JSON repeat as well, but each has something of its own, which no gram around it
    survives.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self._grams: Counter[tuple[int, ...]] = Counter()
        self._newest: deque[int] = deque(maxlen=GRAM)
        self._repeated: deque[bool] = deque(maxlen=WINDOW)
        self._count = 0  # of True in `_repeated`
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
    def is_loop(self) -> bool:
        return self._count >= SHARE * WINDOW


def is_repeated_prose(tokens: Sequence[int], text: str) -> bool:
    """Does a reply that was cut at its limit say the same sentences in turn? They may change a little, so
    `Repetition` does not end it. Rows of data are repeated, too, but consist of fewer letters."""
    if len(tokens) < PROSE_WINDOW or not text:
        return False
    grams = [tuple(tokens[max(0, end - GRAM) : end]) for end in range(1, len(tokens) + 1)]
    earlier, repeated = set[tuple[int, ...]](), list[bool]()
    for gram in grams:
        repeated.append(gram in earlier)
        earlier.add(gram)
    letters = sum(char.isalpha() or char.isspace() for char in text) / len(text)
    return letters >= PROSE_LETTERS and sum(repeated[-PROSE_WINDOW:]) >= PROSE_SHARE * PROSE_WINDOW
