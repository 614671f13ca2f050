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

from ..backends.base import Backend
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

    def read(
        self, index: int, backend: Backend, tokenizer: Tokenizer, max_context: int, pause: Pause | None
    ) -> None:
        """Let the backend's model, with its current LoRA, read one text that it has not read before. `pause`
        can raise an exception to stop; the next call then reads the text from its beginning."""
        if index in self.states:
            return
        ids, first = encode_pair(tokenizer, *texts()[index], max_context)
        self.states[index] = backend.hidden_states(ids, pause)[first - 1 :]
        self.tokens[index] = ids[first:]

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
    first token. For prose, which has no question, this index is 1."""
    if not question:
        return tokenizer.encode(answer)[:limit], 1
    prompt = tokenizer.encode_chat([Message("user", question)])
    tokens = prompt + tokenizer.encode(answer, add_bos=False)
    return tokens[:limit], min(len(prompt), limit // 2)
