"""Notices a reply that repeats itself: the same few tokens over and over.

Small models fall into such loops, and then write until the limit. `tests/engine/test_repetition.py` has the
replies that the numbers were chosen on: loops, and tables, lists and code that only look like them.
"""

from collections import Counter, deque
from collections.abc import Iterable

REPEATS = "the reply only repeated itself, so it was ended; ratings of it teach nothing."

GRAM = 6  # tokens that are compared at once
BEFORE = 2  # earlier occurrences that make a gram a repeated one
WINDOW = 64  # newest tokens that are looked at
SHARE = 0.92  # of them that must end a repeated gram: one token of its own breaks GRAM of them


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
