"""Decodes a reply faster where its next tokens can be guessed. The reply stays the same.

`DraftedSteps` guesses the next tokens from the chat. The backend computes the steps after all of them in one
call. Each step that the reply goes on with is handed out; the others are dropped. The steps have the bits of
single steps, and each token is drawn as without a draft. So greedy replies, sampled replies, penalties,
constraints and traces do not change. (Leviathan et al. 2023, "Fast Inference from Transformers via
Speculative Decoding", drafts with a small model.)
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
    """drafted: tokens that were checked. accepted: those of them that the reply has."""

    drafted: int = 0
    accepted: int = 0


class _Decoder(Drafting, Backend, Protocol):
    """A backend that checks drafts."""


class DraftedSteps:
    """The decode steps of one reply."""

    def __init__(self, backend: _Decoder, length: DraftLength, lookup: PromptLookup, rule: Matcher | None):
        """length: shared by all replies. lookup, rule: the prompt and the constraint of the reply."""
        self._backend, self._length, self._lookup, self._rule = backend, length, lookup, rule
        self._acceptance = Acceptance()
        self._guess: Draft | None = None  # the guess at the tokens after the last one
        self._checked: deque[tuple[int, Step]] = (
            deque()
        )  # drafted tokens that are right so far, and their steps
        self.counts = DraftCounts()

    @property
    def is_ahead(self) -> bool:
        """Is the step of the newest token computed already?"""
        return bool(self._checked)

    def add(self, token: int) -> None:
        """The reply goes on with this token."""
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
        """Count whether the guess was right: its first token, then the next ones while all are right."""
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
    """Return the steps of a reply to this prompt. None: drafts are off, or the backend cannot check them.

    predicted: tokens that the caller expects in the reply
    rule: the constraint of the reply
    """
    if length is None or not isinstance(backend, Drafting):
        return None
    return DraftedSteps(cast(_Decoder, backend), length, PromptLookup(prompt, predicted), rule)
