"""Guesses the next tokens of a reply: the newest tokens stood in the chat before, and the reply goes on as
the chat did there (Saxena 2023, "Prompt Lookup Decoding"). Code that is edited and text that is quoted repeat
their source for long stretches.
"""

from collections.abc import Sequence
from typing import NamedTuple

GRAM = 2  # tokens: the shortest match
LONGEST_MATCH = 32  # tokens: a longer match says no more


class Draft(NamedTuple):
    """Guessed tokens.

    tokens: the tokens that may come next, in order
    match: the number of newest tokens that stood before these tokens, from GRAM to LONGEST_MATCH
    """

    tokens: list[int]
    match: int


class PromptLookup:
    """Finds the newest tokens of one chat in its earlier tokens."""

    def __init__(self, tokens: Sequence[int] = (), predicted: Sequence[int] = ()):
        """tokens: the prompt. predicted: a text that the caller expects in the reply."""
        # The predicted text comes first: the chat's own newer tokens win where both match.
        self._tokens = [*predicted, *tokens]
        self._ends: dict[tuple[int, ...], int] = {}  # gram -> index of the token after its newest occurrence
        self._indexed = GRAM  # the grams before this index are in `_ends`
        self._source = -1  # index of the token that the draft starts with; -1: unknown

    def add(self, token: int) -> None:
        """Append the next token of the chat."""
        is_followed = 0 <= self._source < len(self._tokens) and self._tokens[self._source] == token
        self._tokens.append(token)
        self._source = self._source + 1 if is_followed else -1

    def draft(self, n: int) -> Draft | None:
        """Return at most n tokens that may come next. None: the newest GRAM tokens did not stand before."""
        tokens, end = self._tokens, len(self._tokens)
        self._index()
        if self._source < 0:
            self._source = self._ends.get(tuple(tokens[-GRAM:]), -1)
        if self._source < 0 or n < 1:
            return None
        # Text that repeats itself can be shorter than the draft: then the draft goes round.
        period = end - self._source
        guess = [tokens[self._source + i % period] for i in range(n)]
        return Draft(guess, self._match(self._source))

    def _index(self) -> None:
        for i in range(self._indexed, len(self._tokens)):
            self._ends[tuple(self._tokens[i - GRAM : i])] = i
        self._indexed = max(self._indexed, len(self._tokens))

    def _match(self, source: int) -> int:
        """Return how many tokens before `source` equal the newest tokens."""
        tokens, n = self._tokens, 0
        while n < min(LONGEST_MATCH, source) and tokens[source - 1 - n] == tokens[-1 - n]:
            n += 1
        return n
