"""Finds chats whose questions are like a text, though their words differ.

Vectors are those of the rating index (embedding.py): the questions of this model's replies are stored with
them. Other messages, of imported chats or of another model, are read when they are compared.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..backends.base import Backend, original_model
from ..errors import UsageError
from ..models.model import Model
from ..store import Store
from ..store.chats import SessionRow
from ..store.messages import Question
from .embedding import Whitening, read_question, whitening_of

LEAST_LIKE = 0.15  # similarity under which two texts have nothing in common: unrelated ones are near 0
MOST_READ = 1000  # messages without a stored vector that one search reads, of the chats used last


@dataclass(frozen=True)
class LikeChat:
    """A chat, and that message of it which is most like the text. similarity: at most 1."""

    session: SessionRow
    message_id: int
    content: str
    similarity: float


@dataclass(frozen=True)
class LikeChats:
    """The chats that were found, the most like first. unread: messages that were not compared."""

    found: list[LikeChat]
    unread: int = 0


def chats_like(
    store: Store,
    model: Model,
    backend: Backend,
    text: str,
    limit: int = 10,
    progress: Callable[[int], None] = lambda _: None,
) -> LikeChats:
    """The chats most like a text, by their most similar message of the user. progress(messages read).

    UsageError for an empty text.
    """
    reader = _Reader(store, model, backend)
    wanted = reader.vector(text)
    if wanted is None:
        raise UsageError("the text to compare with is empty; give some words.")
    found, unread = list[LikeChat](), 0
    for chat in store.chats.all():
        best: LikeChat | None = None
        for question in store.messages.questions(chat.id, model.fingerprint):
            vector = reader.stored_vector(question)
            if vector is None and reader.count >= MOST_READ:
                unread += 1
                continue
            if vector is None:
                vector = reader.vector(question.content)
                progress(reader.count)
            like = float(vector @ wanted) if vector is not None else 0.0
            if like >= (best.similarity if best else LEAST_LIKE):
                best = LikeChat(chat, question.message_id, question.content, like)
        found += [best] if best else []
    return LikeChats(sorted(found, key=lambda row: -row.similarity)[:limit], unread)


class _Reader:
    """Reads texts with the untouched model, each text once. count: of them."""

    def __init__(self, store: Store, model: Model, backend: Backend):
        self._model, self._backend = model, backend
        self._whitening: Whitening = whitening_of(store, model, backend)
        self._known: dict[str, np.ndarray | None] = {}

    @property
    def count(self) -> int:
        return len(self._known) - 1  # without the text to compare with

    def stored_vector(self, question: Question) -> np.ndarray | None:
        """The unit vector of a question that was read before; None if it was not."""
        if question.state is not None and len(question.state) == self._model.shape.hidden_size:
            return self._whitening(question.state)
        return self._known.get(question.content)

    def vector(self, text: str) -> np.ndarray | None:
        """The unit vector of a text; None if it is empty."""
        with original_model(self._backend):
            state = read_question(self._backend, self._model.tokenizer, text)
        self._known[text] = None if state is None else self._whitening(state)
        return self._known[text]
