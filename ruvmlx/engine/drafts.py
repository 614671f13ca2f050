"""This module decodes a reply faster if its next tokens can be guessed. The reply stays the same.

`DraftedSteps` guesses the next tokens (a draft): from the constraint, from the chat's earlier text, or with a
draft model. The backend computes the decode steps after all guessed tokens in one call. If the reply
continues with a guessed token, the engine uses the decode step that was computed after this token. The engine
drops the steps that were computed from a wrong guess on. The decode steps of a check are bit-identical to
decode steps that are computed one at a time, and the sampler draws each token as it does without a draft.
Because of this, drafts change neither greedy nor sampled replies, and neither penalties, constraints nor
traces. (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", make drafts with
a small model.)"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol, cast

from ..backends.base import Backend, Drafting, HeadAdapter, KVCache, Step
from .constraint import Matcher
from .draft_length import Acceptance, Certainty, DraftLength
from .draft_model import DraftModel
from .prompt_lookup import GRAM, PromptLookup


@dataclass
class DraftCounts:
    """Counts of guessed tokens. drafted: the tokens that were checked. accepted: the checked tokens with
    which the reply then continued."""

    drafted: int = 0
    accepted: int = 0


class _Guess(NamedTuple):
    """The guessed tokens, for each token a number (sign) that shows how sure the guess is, and the object
    that counts how many guesses with these signs were right."""

    tokens: Sequence[int]
    signs: Sequence[float]
    acceptance: Acceptance


class _Decoder(Drafting, Backend, Protocol):
    """A backend that can check drafts."""


class DraftedSteps:
    """DraftedSteps computes the decode steps of one reply, and computes steps ahead of time for guessed
    tokens."""

    def __init__(
        self,
        backend: _Decoder,
        length: DraftLength,
        lookup: PromptLookup,
        rule: Matcher | None,
        model: DraftModel | None = None,
        prompt: Sequence[int] = (),
    ):
        """length: the rule for the number of drafted tokens, which all replies share. lookup: finds the
        newest tokens among the chat's earlier tokens. rule: the constraint of the reply; None: no constraint.
        model: the draft model, which guesses if the lookup gives no draft whose check saves time. prompt: the
        tokens before the reply."""
        self._backend, self._length, self._lookup, self._rule = backend, length, lookup, rule
        self._model, self._tokens = model, list(prompt) if model else []
        self._acceptance = Acceptance()
        self._guesses: list[_Guess] = []  # the guesses at the tokens after the reply's last token
        self._checked: deque[tuple[int, Step]] = (
            deque()
        )  # checked drafted tokens with which the reply can still continue, each with the step after it
        self.counts = DraftCounts()

    @property
    def is_ahead(self) -> bool:
        """Return True if the decode step of the reply's newest token was computed already, as part of a check
        of a draft."""
        return bool(self._checked)

    def add(self, token: int) -> None:
        """Receive the next token of the reply. Drop the steps that were computed ahead if the token differs
        from the drafted token."""
        if self._checked and self._checked[0][0] != token:
            self._checked.clear()
        self._count(token)
        self._lookup.add(token)
        if self._model:
            self._tokens.append(token)

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
        """Return the guessed next tokens whose check is expected to save time; [] if there are none."""
        longest, self._guesses = self._backend.longest_draft, []
        if self._rule is not None and (forced := self._rule.forced_tokens()[:longest]):
            return forced[: self._length.choose(GRAM, len(forced), Certainty())]
        return self._look_up(longest) or self._ask_model(longest)

    def _look_up(self, longest: int) -> list[int]:
        found = self._lookup.draft(longest)
        if found is None:
            return []
        signs = [found.match + i for i in range(len(found.tokens))]
        self._guesses.append(_Guess(found.tokens, signs, self._acceptance))
        return found.tokens[: self._length.choose(found.match, len(found.tokens), self._acceptance)]

    def _ask_model(self, longest: int) -> list[int]:
        if self._model is None:
            return []
        draft = self._model.draft(self._tokens, longest, self._length)
        if draft.tokens:
            self._guesses.append(_Guess(draft.tokens, draft.confidences, self._model.acceptance))
        return draft.tokens if draft.is_worth else []

    def _count(self, token: int) -> None:
        """Count, for each guess, whether its first token equals `token`. While the steps of a draft are
        computed ahead, keep the other tokens of each right guess, so that the next call counts the next
        token."""
        still_right = []
        for guess in self._guesses:
            is_right = guess.tokens[0] == token
            guess.acceptance.count(guess.signs[0], is_right)
            if is_right and self._checked and len(guess.tokens) > 1:
                still_right.append(_Guess(guess.tokens[1:], guess.signs[1:], guess.acceptance))
        self._guesses = still_right


class DraftParts(Protocol):
    """The attributes of an engine that drafts need. draft_length: None if the engine drafts no tokens.
    draft_model: None if drafts come only from the chat's own text and from the constraint."""

    backend: Backend
    draft_length: DraftLength | None
    draft_model: DraftModel | None


def new_drafts(
    engine: DraftParts, prompt: Sequence[int], predicted: Sequence[int], rule: Matcher | None
) -> DraftedSteps | None:
    """Return the object that computes the decode steps of a reply to this prompt. Return None if drafts are
    off, or if the backend cannot check drafts.

    predicted: tokens that the caller expects in the reply
    rule: the constraint of the reply
    """
    backend, length, model = engine.backend, engine.draft_length, engine.draft_model
    if length is None or not isinstance(backend, Drafting):
        return None
    lookup = PromptLookup(prompt, predicted)
    return DraftedSteps(cast(_Decoder, backend), length, lookup, rule, model, prompt)
