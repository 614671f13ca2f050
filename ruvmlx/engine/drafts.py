"""This module decodes a reply faster if its next tokens can be guessed. The reply stays the same.

`DraftedSteps` guesses the next tokens from the chat (a draft). The backend computes the decode steps after
all guessed tokens in one call. If the reply continues with a guessed token, the engine uses the decode step
that was computed after this token. The engine drops the steps after wrong guesses. The steps are
bit-identical to single steps, and the sampler draws each token as it does without a draft. Because of this,
drafts change neither greedy nor sampled replies, and neither penalties, constraints nor traces. (Leviathan et
al. 2023, "Fast Inference from Transformers via Speculative Decoding", make drafts with a small model.)
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, cast

from ..backends.base import Backend, Drafting, HeadAdapter, KVCache, Step
from .constraint import Matcher
from .draft_length import Acceptance, Certainty, DraftLength
from .prompt_lookup import GRAM, Draft, PromptLookup


@dataclass
class DraftCounts:
    """Counts of guessed tokens. drafted: the tokens that were checked. accepted: the checked tokens that are
    in the reply."""

    drafted: int = 0
    accepted: int = 0


class _Decoder(Drafting, Backend, Protocol):
    """A backend that can check drafts."""


class DraftedSteps:
    """DraftedSteps computes the decode steps of one reply, and computes some of these steps ahead for guessed
    tokens."""

    def __init__(self, backend: _Decoder, length: DraftLength, lookup: PromptLookup, rule: Matcher | None):
        """length: the rule that all replies share. lookup, rule: the chat's tokens and the constraint of the
        reply."""
        self._backend, self._length, self._lookup, self._rule = backend, length, lookup, rule
        self._acceptance = Acceptance()
        self._guess: Draft | None = None  # the guess at the tokens after the last token
        self._checked: deque[tuple[int, Step]] = (
            deque()
        )  # drafted tokens that can still be right, each with its step
        self.counts = DraftCounts()

    @property
    def is_ahead(self) -> bool:
        """Return True if the step of the newest token is computed already."""
        return bool(self._checked)

    def add(self, token: int) -> None:
        """Take the next token of the reply."""
        if self._checked and self._checked[0][0] != token:
            self._checked.clear()
        self._count(token)
        self._lookup.add(token)

    def step(self, token: int, cache: KVCache, adapter: HeadAdapter | None) -> Step:
        """Return the step after the newest token, which `add` has received."""
        if self._checked:
            self._backend.accept(cache)
            self.counts.accepted += 1
            return self._checked.popleft()[1]
        draft = self._draft()
        before = perf_counter()
        if draft:
            step, *ahead = self._backend.decode_drafted(token, draft, cache, adapter)
        else:
            step, ahead = self._backend.decode(token, cache, adapter), []
        self._length.measure(len(ahead), perf_counter() - before)
        self._checked.extend(zip(draft, ahead, strict=False))
        self.counts.drafted += len(ahead)
        return step

    def _draft(self) -> list[int]:
        """Return the tokens that are worth a check now."""
        longest = self._backend.longest_draft
        if self._rule is not None and (forced := self._rule.forced_tokens()[:longest]):
            self._guess = None
            return forced[: self._length.choose(GRAM, len(forced), Certainty())]
        guess = self._guess = self._lookup.draft(longest)
        if guess is None:
            return []
        return guess.tokens[: self._length.choose(guess.match, len(guess.tokens), self._acceptance)]

    def _count(self, token: int) -> None:
        """Count whether the first token of the guess was right. While all guessed tokens are right, count the
        next guessed tokens too."""
        guess = self._guess
        if guess is not None:
            is_right = guess.tokens[0] == token
            self._acceptance.count(guess.match, is_right)
            more = guess.tokens[1:] if is_right and self._checked else []
            self._guess = Draft(more, guess.match + 1) if more else None


def new_drafts(
    backend: Backend,
    length: DraftLength | None,
    prompt: Sequence[int],
    predicted: Sequence[int] = (),
    rule: Matcher | None = None,
) -> DraftedSteps | None:
    """Return the decode steps of a reply to this prompt. Return None if drafts are off, or if the backend
    cannot check drafts.

    predicted: tokens that the caller expects in the reply
    rule: the constraint of the reply
    """
    if length is None or not isinstance(backend, Drafting):
        return None
    return DraftedSteps(cast(_Decoder, backend), length, PromptLookup(prompt, predicted), rule)
