"""This module has the data that the app shows about a runtime. The runtime's thread collects the data, and
the app's thread draws the data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ruvmlx.chats.conversations import ALL_READ, ChatRoom
from ruvmlx.errors import NotFound
from ruvmlx.runtime import LearnStatus, Runtime, Turn
from ruvmlx.text import backend_words, one_line

from .mentions import without_files
from .options import ChatOptions, start_place


def learn_status(runtime: Runtime) -> LearnStatus | None:
    """Return the state of learning, or None if the runtime uses no adapter."""
    try:
        return runtime.status()
    except NotFound:
        return None


@dataclass(frozen=True)
class RatingPlace:
    """The place of the newest rating or preference. question: the question of the rated reply; "" if the
    reply was deleted. elsewhere: where the reply is if it is not in the open chat, such as "in another chat";
    "" if it is in the open chat."""

    question: str
    elsewhere: str

    @classmethod
    def of(cls, runtime: Runtime, session: str, reply_id: str) -> "RatingPlace":
        """Return the place of a rated reply. session: the id of the open chat."""
        messages = runtime.store.messages
        question = without_files(runtime.store.replies.get(reply_id).prompt)[0]
        if place := messages.place_of(reply_id):
            return cls(question, "" if place[0] == session else "in another chat")
        # `generate` and other programs get replies that are in no chat
        return cls(
            question, "in a deleted chat" if messages.is_in_deleted_chat(reply_id) else "outside the chats"
        )


# The app reads this number of messages, the newest of a chat, when it opens the chat. Soon after, the app
# reads all messages with the class `Standing`.
OPENED_MESSAGES = 40


@dataclass(frozen=True)
class Standing:
    """The state of learning, the messages on a chat's current branch, and the ratings of the replies on all
    branches, as the store has them. Another process can write ratings and make another branch the current
    one.

    room: the messages that the model does not read, because its context has no room for them or because a
    summary replaces them. newest: the id of the reply whose rating or preference an undo takes back, or None.
    reasons: reply id -> why its rating is bad, a key of `REASONS`. preferred: id of a reply that the user
    prefers -> the kind of the preference (store/preferences.py).
    """

    learned: LearnStatus | None
    ratings: dict[str, str | None]  # reply id -> rating (None: not rated), for all branches
    room: ChatRoom = ALL_READ
    turns: Sequence[Turn] = ()
    newest: str | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    preferred: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, runtime: Runtime, session: str, max_new_tokens: int) -> "Standing":
        """Return the state of the chat `session`. max_new_tokens: the maximum number of tokens of a reply in
        this chat."""
        turns = runtime.chats.turns(session)
        ratings = runtime.store.ratings.of_chat(session)
        ratings |= runtime.learning.ratings_in_use(ratings)
        room = runtime.chats.room(session, turns, max_new_tokens)
        newest, learner = runtime.newest_feedback(), runtime.learner
        given = learner.history.reasons.in_force() if learner else []
        reasons = {reply_id: reason for reply_id, reason, _ in given if ratings.get(reply_id)}
        preferred = {better: kind for better, _, kind in runtime.store.preferences.of_chat(session)}
        return cls(learn_status(runtime), ratings, room, turns, newest, reasons, preferred)

    @property
    def version(self) -> int:
        return self.learned.adapter_version if self.learned else 0


@dataclass(frozen=True)
class Opened:
    """The data of a chat that the app has just opened, and of the runtime that the chat uses."""

    session: str  # the id of the chat
    message: int | None  # the id of the message to show first; None: the end of the chat
    turns: list[Turn]
    are_newest: bool  # True: `turns` has only the newest messages; False: `turns` has all messages
    model: str
    backend: str
    caveat: str  # a line for the user about a limit of the open model (backends/base.py), or ""
    max_context: int
    learned: LearnStatus | None
    said: list[str]  # the user's earlier messages in all chats, the newest first

    @classmethod
    def of(cls, runtime: Runtime, options: ChatOptions) -> "Opened":
        session, message = start_place(runtime, options)
        turns = runtime.chats.turns(session, OPENED_MESSAGES if message is None else None)
        return cls(
            session=session,
            message=message,
            turns=turns,
            are_newest=message is None and len(turns) >= OPENED_MESSAGES,
            model=one_line(runtime.model.name),
            backend=backend_words(runtime.backend.name, runtime.backend.kernels),
            caveat=one_line(runtime.backend.caveat),
            max_context=runtime.model.context,
            learned=learn_status(runtime),
            said=[without_files(text)[0] for text in runtime.chats.asked_before()],
        )
