"""This module reads the reference text: a few everyday questions with answers, and some prose
(reference_text.json). Learning must leave a model's predictions on the reference text nearly unchanged.
reference_questions.json has more questions, which the model answers itself (reference_replies.py)."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from ..backends.base import PAUSED, Backend, KVCache
from ..models.config.model import Message, Tokenizer
from ..pausing import Pause


def texts() -> list[tuple[str, str]]:
    """Return the (question, answer) pairs of the reference text. Prose has an empty question."""
    return _load("reference_text.json")


def questions() -> list[str]:
    """Return the everyday questions that the model answers in reference_replies.py."""
    return _load("reference_questions.json")


def _load(name: str) -> list[Any]:
    return json.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def digest() -> str:
    """Return a hash of the reference text. A stored calibration with another hash is not used."""
    return hashlib.sha256(json.dumps(texts()).encode()).hexdigest()[:16]


@dataclass
class Reading:
    """The texts of the reference text that a model has read so far. A text's index in `texts()` is its key in
    `states` and `tokens`.

    states: for each text of T tokens, [T + 1, D], the hidden states that predict the tokens, and the state at
        the end of the text
    tokens: for each text, its T tokens
    """

    states: dict[int, np.ndarray] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    _begun: dict[int, "_BegunText"] = field(default_factory=dict)

    def read(
        self, index: int, backend: Backend, tokenizer: Tokenizer, max_context: int,
        pause: Pause | None, *, stops_inside: bool = True,
    ) -> None:  # fmt: skip
        """Let the backend's model, with its current LoRA, read one text that it has not read before.

        pause: a function that can raise an exception to stop; the next call with the same text and the same
            LoRA continues after the last complete part of PAUSED tokens
        stops_inside: False to call `pause` only between two parts, so that each call completes a part
        """
        if index in self.states:
            return
        if index not in self._begun:
            ids, first = encode_pair(tokenizer, *texts()[index], max_context)
            self._begun[index] = _BegunText(ids, first, backend.new_cache())
        text = self._begun[index]
        text.read(backend, pause, stops_inside)
        self.states[index] = np.concatenate(text.states)[text.first - 1 :]
        self.tokens[index] = text.ids[text.first :]
        del self._begun[index]

    @property
    def read_texts(self) -> np.ndarray:
        """The indices of the texts that were read, ascending. Answers come before prose."""
        return np.array(sorted(self.states), np.int32)

    def concatenate(self) -> "ReadTexts":
        """Return all texts that were read as one object, in the order of `texts()`."""
        parts = [(i, bool(texts()[i][0]), self.states[i], self.tokens[i]) for i in sorted(self.states)]
        return ReadTexts(
            np.concatenate([states[:-1] for _, _, states, _ in parts]),
            np.asarray([token for *_, tokens in parts for token in tokens], np.int32),
            np.concatenate([states[-1:] for _, _, states, _ in parts]),
            np.array([is_answer for _, is_answer, _, _ in parts]),
            sum(len(tokens) for _, is_answer, _, tokens in parts if is_answer),
        )


@dataclass
class _BegunText:
    """A text that a model reads in parts. ids: the text's tokens. first: the index of the first token whose
    prediction is needed. cache: the KV cache of the tokens that were read. states: the hidden states of the
    parts that were read."""

    ids: list[int]
    first: int
    cache: KVCache
    states: list[np.ndarray] = field(default_factory=list)

    def read(self, backend: Backend, pause: Pause | None, stops_inside: bool) -> None:
        """Read the remaining tokens. The arguments are those of `Reading.read`."""
        while rest := self.ids[self.cache.offset :]:
            if pause is None:
                self.states.append(backend.hidden_states(rest, None, self.cache))
            else:
                inside = self._pause_inside(pause) if stops_inside else None
                self.states.append(backend.hidden_states(rest[:PAUSED], inside, self.cache))
                pause()

    def _pause_inside(self, pause: Pause) -> Pause:
        """Return a function that calls `pause` only until the next part is complete. If `pause` raised an
        exception after the part was complete, the cache would have the part, and `states` would not."""
        begun = self.cache.offset
        return lambda: pause() if self.cache.offset == begun else None


@dataclass(frozen=True)
class ReadTexts:
    """The hidden states of E texts of the reference text, which have T tokens together.

    states: [T, D], the hidden states that predict the tokens `following`
    following: [T], the token that follows each state in its text
    ends: [E, D], the state at each text's end
    is_answer: [E], True if the text is an answer, False if it is prose
    answers: the number of states in answers; these states come first, and the states in prose follow

    The states at the texts' ends are in an array of their own, because the KL is not measured at the ends:
    the length of a reply is a matter of taste.
    """

    states: np.ndarray
    following: np.ndarray
    ends: np.ndarray
    is_answer: np.ndarray
    answers: int


def read(
    backend: Backend,
    tokenizer: Tokenizer,
    max_context: int,
    pause: Pause | None = None,
    which: Sequence[int] | np.ndarray | None = None,
) -> ReadTexts:
    """Let the backend's model, with its current LoRA, read texts of the reference text, and return their
    hidden states. which: the indices of the texts in `texts()`; None for all texts."""
    reading = Reading()
    for index in range(len(texts())) if which is None else which:
        reading.read(int(index), backend, tokenizer, max_context, pause)
    return reading.concatenate()


def encode_pair(tokenizer: Tokenizer, question: str, answer: str, limit: int) -> tuple[list[int], int]:
    """Return the tokens of a question with its answer, at most `limit` tokens, and the index of the answer's
    first token. If the question alone is too long, this index is half of `limit`. For prose, which has no
    question, this index is 1."""
    if not question:
        return tokenizer.encode(answer)[:limit], 1
    prompt = tokenizer.encode_chat([Message("user", question)])
    tokens = prompt + tokenizer.encode(answer, add_bos=False)
    return tokens[:limit], min(len(prompt), limit // 2)
