"""This module guesses the next tokens of a reply. If the newest tokens occurred in the chat before, the
module guesses the tokens that followed at the earlier place (Saxena 2023, "Prompt Lookup Decoding"). A guess
is often right for many tokens, for example if the reply edits code or quotes a text of the chat.
"""

from collections.abc import Sequence
from typing import NamedTuple

GRAM = 2  # tokens: the shortest match
LONGEST_MATCH = 32  # tokens: the maximum length of a match; a longer match gives no better guess


class Draft(NamedTuple):
    """Guessed tokens.

    tokens: the guessed next tokens, in order
    match: the number of the chat's newest tokens that equal the tokens before the place from which the guess
        was copied, from GRAM to LONGEST_MATCH
    """

    tokens: list[int]
    match: int


class PromptLookup:
    """A prompt lookup finds the newest tokens of one chat among the chat's earlier tokens."""

    def __init__(self, tokens: Sequence[int] = (), predicted: Sequence[int] = ()):
        """tokens: the prompt. predicted: a text that the caller expects in the reply."""
        # The predicted text comes first, because the newest match is used: a match in the chat is preferred
        # to a match in the predicted text.
        self._tokens = [*predicted, *tokens]
        # n-gram -> index of the token after its newest occurrence
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = GRAM  # `_ends` has the n-grams that end before the token with this index
        self._source = -1  # index of the earlier token with which the draft starts; -1: unknown

    def add(self, token: int) -> None:
        """Append the next token of the chat."""
        is_followed = 0 <= self._source < len(self._tokens) and self._tokens[self._source] == token
        self._tokens.append(token)
        self._source = self._source + 1 if is_followed else -1

    def draft(self, n: int) -> Draft | None:
        """Return a draft: a guess of the next n tokens. Return None if the newest GRAM tokens did not occur
        before, or if n is 0."""
        tokens, end = self._tokens, len(self._tokens)
        self._index()
        if self._source < 0:
            self._source = self._ends.get(tuple(tokens[-GRAM:]), -1)
        if self._source < 0 or n < 1:
            return None
        # If fewer than n tokens follow the earlier place, the draft repeats these tokens.
        period = end - self._source
        guess = [tokens[self._source + i % period] for i in range(n)]
        return Draft(guess, self._match(self._source))

    def _index(self) -> None:
        for i in range(self._indexed, len(self._tokens)):
            self._ends[tuple(self._tokens[i - GRAM : i])] = i
        self._indexed = max(self._indexed, len(self._tokens))

    def _match(self, source: int) -> int:
        """Return the number of tokens before the index `source` that equal the chat's newest tokens, at most
        LONGEST_MATCH."""
        tokens, n = self._tokens, 0
        while n < min(LONGEST_MATCH, source) and tokens[source - 1 - n] == tokens[-1 - n]:
            n += 1
        return n
