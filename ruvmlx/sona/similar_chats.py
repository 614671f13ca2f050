"""This module finds chats with questions that have a similar meaning to a text, even if the words differ.

The module compares vectors of questions (embedding.py), as the rating index does. The store has the pooled
hidden states of the questions that this model has answered and embedded. The model reads all other messages,
for example of imported chats, during the search.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..backends.base import Backend, original_model
from ..errors import UsageError
from ..models.config.model import Model
from ..store import Store
from ..store.chats import SessionRow
from ..store.messages import Question
from .embedding import Whitening, read_question, whitening_of

LEAST_LIKE = 0.15  # the minimum similarity of a chat in the result; unrelated texts have a similarity near 0
MOST_READ = 1000  # the maximum number of messages that the model reads in one search; newest chats come first


@dataclass(frozen=True)
class LikeChat:
    """A chat that was found, and its message that is most similar to the text.

    message_id, content: the id and the text of that message
    similarity: the similarity of that message and the text, at most 1
    """

    session: SessionRow
    message_id: int
    content: str
    similarity: float


@dataclass(frozen=True)
class LikeChats:
    """The chats that were found, the most similar first. unread: the number of messages that were not
    compared, because the model had already read MOST_READ messages."""

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
    """Return at most `limit` chats that are most similar to a text, with a similarity of at least LEAST_LIKE.
    The similarity of a chat is the similarity of the user's most similar message in the chat. Raises
    UsageError if the text is empty.

    progress: a function that gets the number of different messages that the model has read so far
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
    """A reader that computes vectors of texts with the original model. `count` is the number of messages that
    the model has read."""

    def __init__(self, store: Store, model: Model, backend: Backend):
        self._model, self._backend = model, backend
        self._whitening: Whitening = whitening_of(store, model, backend)
        self._known: dict[str, np.ndarray | None] = {}

    @property
    def count(self) -> int:
        return len(self._known) - 1  # the search text is not counted

    def stored_vector(self, question: Question) -> np.ndarray | None:
        """Return the unit vector of a question from the store, or from this search if the model has read the
        question in this search; else None."""
        if question.state is not None and len(question.state) == self._model.shape.hidden_size:
            return self._whitening(question.state)
        return self._known.get(question.content)

    def vector(self, text: str) -> np.ndarray | None:
        """Let the model read a text, and return its unit vector; None if the text is empty."""
        with original_model(self._backend):
            state = read_question(self._backend, self._model.tokenizer, text)
        self._known[text] = None if state is None else self._whitening(state)
        return self._known[text]
