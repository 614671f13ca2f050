"""A draft model is a small model that guesses the next tokens of a large model's reply (Leviathan et al.
2023, "Fast Inference from Transformers via Speculative Decoding"). The large model checks the guesses
(drafts.py), so the reply stays the same. Both models must have the same vocabulary: a token id that both
models have stands for the same text in both.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import NamedTuple

import numpy as np

from ..backends.base import Backend, KVCache, Step
from ..errors import UsageError
from ..models.config.model import Model, Tokenizer
from .draft_length import Acceptance, DraftLength

# The draft model gives each guess a probability. Guesses are counted in groups of similar probability.
# CONFIDENCES are the upper ends of the groups, and CONFIDENCE_PRIOR is, for each group, the share of right
# guesses that is assumed at first.
CONFIDENCES = (0.3, 0.5, 0.7, 0.9, 2.0)
CONFIDENCE_PRIOR = (0.2, 0.4, 0.55, 0.75, 0.9)
# the maximum number of the chat's tokens that the draft model reads between two decode steps of a reply
PIECE = 256
# If the guesses do not save time, the draft model rests for a number of tokens before it guesses again. The
# number of tokens is SHORTEST_REST at first; each further rest is twice as long, up to LONGEST_REST.
SHORTEST_REST, LONGEST_REST = 8, 256
WEIGHT = 0.1  # the weight of a new measurement in the average time of the draft model's decode step


class ModelDraft(NamedTuple):
    """Guessed tokens, and the draft model's probability of each token. is_worth: True if a check of the
    tokens is expected to save time."""

    tokens: list[int]
    confidences: list[float]
    is_worth: bool


class DraftModel:
    """A draft model with one KV cache. All replies of an engine share the draft model, and its cache follows
    the reply that was written last."""

    def __init__(self, backend: Backend, context: int, vocabulary: int):
        """context: the maximum number of tokens that the draft model can read. vocabulary: the number of
        tokens that both models have; the draft model reads and guesses only token ids below this number."""
        self._backend, self._context, self._vocabulary = backend, context, vocabulary
        self._cache: KVCache = backend.new_cache()
        self._read: list[int] = []  # the token ids in the draft model's KV cache
        # _rest: the number of tokens until the next guess; _pause: the number of tokens of the newest rest
        self._rest = self._pause = 0
        self.acceptance = Acceptance(CONFIDENCES, CONFIDENCE_PRIOR)
        # the average seconds of a decode step of the draft model; 0 before its first decode step
        self.seconds = 0.0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the draft model's weights and of its KV cache."""
        return self._backend.nbytes + self._cache.nbytes

    def draft(self, tokens: Sequence[int], longest: int, length: DraftLength) -> ModelDraft:
        """Return guesses at the tokens after `tokens`. While checks save no time, most calls return no guess;
        now and then a call returns a single guess that the engine does not check: the next token of the reply
        shows whether the guess was right.

        tokens: the prompt and the reply so far. longest: the maximum number of guesses.
        """
        chain = length.chain(self.seconds)
        is_worth = chain.is_worth(self.acceptance.mean)
        if is_worth:
            self._pause = 0
        elif self._is_resting():
            return ModelDraft([], [], False)
        guesses, confidences = list[int](), list[float]()
        for token, confidence in islice(self._guesses(tokens, longest), longest):
            share = self.acceptance.share(confidence)
            if guesses and not chain.takes(share):
                break
            guesses.append(token)
            confidences.append(confidence)
            chain.add(share)
            if not is_worth or not chain.goes_on(self.acceptance.mean):
                break
        return ModelDraft(guesses, confidences, is_worth)

    def _is_resting(self) -> bool:
        if self._rest > 0:
            self._rest -= 1
            return True
        self._pause = min(max(2 * self._pause, SHORTEST_REST), LONGEST_REST)
        self._rest = self._pause
        return False

    def _guesses(self, tokens: Sequence[int], longest: int) -> Iterator[tuple[int, float]]:
        """Yield the likeliest next token and its probability, then the tokens after it. Yield nothing while
        the draft model has not yet read all of `tokens`, if `tokens` and the draft do not fit the draft
        model's context, or if the draft model lacks one of `tokens`."""
        step = self._follow(tokens) if len(tokens) + longest <= self._context else None
        while step is not None:
            logits = step.logits[: self._vocabulary]
            token = int(np.argmax(logits))
            yield token, 1 / float(np.exp(logits - logits[token]).sum())
            step = self._decode(token)

    def _follow(self, tokens: Sequence[int]) -> Step | None:
        """Make the draft model's cache hold `tokens`, and return the step after the last token. One call
        reads at most PIECE tokens that are not in the cache. Return None if the draft model lacks one of
        them, or if the cache still lacks some of `tokens` after this call; the next call reads more."""
        same = _common(self._read, tokens[:-1])
        if same < len(self._read):
            if self._cache.trim(len(self._read) - same):
                same = self._cache.offset
            else:
                self._cache, same = self._backend.new_cache(), 0
            del self._read[same:]
        missing = list(tokens[same : same + PIECE])
        if max(missing) >= self._vocabulary:
            return None
        step = self._decode(missing[0]) if len(missing) == 1 else self._prefill(missing)
        return step if len(self._read) == len(tokens) else None

    def _prefill(self, tokens: list[int]) -> Step:
        step = self._backend.prefill(tokens, self._cache)
        self._read += tokens
        return step

    def _decode(self, token: int) -> Step:
        before = perf_counter()
        step = self._backend.decode(token, self._cache)
        self._read.append(token)
        spent = perf_counter() - before
        self.seconds += (WEIGHT if self.seconds else 1.0) * (spent - self.seconds)
        return step


def _common(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of two sequences."""
    length = min(len(some), len(others))
    if some[:length] == list(others[:length]):
        return length
    return next(i for i in range(length) if some[i] != others[i])


def check_vocabulary(large: Model, small: Model) -> None:
    """Raise UsageError if the same token id stands for different texts in the two models."""
    count = min(large.tokenizer.vocab_size, small.tokenizer.vocab_size)
    for token in range(count):
        texts = _text(large.tokenizer, token), _text(small.tokenizer, token)
        if texts[0] != texts[1]:
            raise UsageError(
                f"the draft model {small.name} has other tokens than {large.name}: number {token} is "
                f"{texts[1]!r} and not {texts[0]!r}. Choose a small model of the same family."
            )


def _text(tokenizer: Tokenizer, token: int) -> str:
    special = next((text for text, i in tokenizer.special_tokens.items() if i == token), None)
    return special or tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")
