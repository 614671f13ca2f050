"""This module compares two replies to one question: one with the adapter (what the model learned from
ratings) and one without the adapter.

`/compare` is blind: the app says only after the user's choice which reply used the adapter, and the model
learns from the choice. `/effect` says at once which reply used the adapter, uses one random seed for both
replies, and asks for no choice. Both replies stay in the chat as branches (alternatives to each other).
"""

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ruvmlx.engine.types import Chunk
from ruvmlx.errors import NotFound, UsageError
from ruvmlx.host.serving import BeginReply
from ruvmlx.models.text.thinking import split
from ruvmlx.models.text.tool_calls import ParsedCall
from ruvmlx.runtime import Runtime
from ruvmlx.text import count

from .options import ChatOptions
from .view_model import learn_status

SIDES = ("without what was learned", "with what was learned")
_shuffle = random.SystemRandom()


@dataclass(frozen=True)
class Candidate:
    """One of the two replies of a comparison. message: the id of the reply's message. learned: True if the
    model used the adapter for the reply. text, calls: the text and the tool calls of the message."""

    message: int
    learned: bool
    text: str
    calls: tuple[ParsedCall, ...] = ()

    def is_like(self, other: "Candidate") -> bool:
        """Return True if both replies have the same words and the same tool calls."""
        calls = [[(call.name, call.arguments) for call in one.calls] for one in (self, other)]
        return self.text == other.text and calls[0] == calls[1]


def order() -> list[bool]:
    """Return the random order in which the two replies are written: [True, False] or [False, True]. True
    stands for the reply with the adapter."""
    sides = [True, False]
    _shuffle.shuffle(sides)
    return sides


def draw_seed() -> int:
    """Return a random seed for both replies of a comparison. With the same seed, a difference between the
    replies comes from the adapter, and not from the random choice of tokens."""
    return _shuffle.randrange(1 << 31)


def check(runtime: Runtime, session: str, text: str) -> None:
    """Raise NotFound if no adapter with a learned version is in use, or if there is no question. text: the
    question of the comparison; "" for the last question of the chat."""
    known = learn_status(runtime)
    if known is None or known.adapter_version == 0:
        raise NotFound("nothing was learned yet, so there is nothing to compare; rate some replies first")
    if not text and not any(turn.role == "user" for turn in runtime.chats.turns(session)):
        raise NotFound("there is no question yet; type /compare and a question")


def writing(
    session: str, text: str, first: bool, with_learned: bool, options: ChatOptions, seed: int | None = None
) -> BeginReply:
    """Return a function that streams one of the two replies.

    text: a new question, or "" for the last question of the chat. first: True for the reply that is written
    first; this reply adds the new question to the chat. with_learned: True if the model uses the adapter for
    this reply. seed: the random seed of the reply; None: the seed of the options.

    The model in use writes both replies. The function names the adapter, because the selector of `--model
    auto` and the router make a choice only for a request that names no adapter. With the setting `best_of`,
    too, each side is one reply: the untouched model writes one, and the progress of several would tell the
    user which side used the adapter.
    """

    def begin(runtime: Runtime, cancel: threading.Event) -> Iterator[Chunk]:
        how = options.for_reply(cancel) | {"untouched": not with_learned, "best_of": 1}
        if with_learned and runtime.learner is not None:
            how["adapter_id"] = runtime.learner.history.name
        if seed is not None:
            how["sampling"] = replace(options.sampling or runtime.writer.sampling(), seed=seed)
        if first and text:
            return runtime.chats.say(session, text, **how)
        return runtime.chats.again(session, **how)

    return begin


def shown_reply_id(runtime: Runtime, session: str, text: str) -> int | None:
    """Return the message id of the reply that the chat shows before a comparison, to show it again after the
    comparison. Return None if the comparison has a new question (`text`), or if the last message is no
    reply."""
    turns = runtime.chats.turns(session)
    return turns[-1].id if turns and not text and turns[-1].role == "assistant" else None


def show_again(runtime: Runtime, session: str, message: int | None) -> None:
    """Make the reply `message` the end of the chat again. None: change nothing."""
    if message is not None:
        runtime.store.messages.set_head(session, message)


def candidate(runtime: Runtime, session: str, with_learned: bool) -> Candidate:
    """Return the newest reply of the chat as a candidate, for the user's choice."""
    newest = runtime.chats.turns(session)[-1]
    assert newest.id is not None
    return Candidate(newest.id, with_learned, newest.content, newest.calls)


@dataclass(frozen=True)
class ReplyComparison:
    """The two replies of a comparison. end: the id of the chat's last message after the comparison."""

    candidates: list[Candidate] = field(default_factory=list)
    end: int | None = None

    @classmethod
    def at_end(cls, runtime: Runtime, session: str, candidates: list[Candidate]) -> "ReplyComparison":
        return cls(candidates, last_message_id(runtime, session))

    def choice(self, argument: str, runtime: Runtime, session: str) -> tuple[Candidate, Candidate]:
        """Return the chosen reply and the other reply. argument: "1" or "2". Raise NotFound if there are no
        two replies, or if the chat went on after them."""
        if len(self.candidates) < 2:
            raise NotFound(
                "/choose is for the two replies of /compare; of other replies, the one from which you go on "
                "is preferred"
            )
        if last_message_id(runtime, session) != self.end:
            raise NotFound("the chat went on after the two replies; /compare writes two new ones")
        if argument not in ("1", "2"):
            raise UsageError(f"choose 1 or 2, got {argument[:20]!r}")
        return self.candidates[int(argument) - 1], self.candidates[2 - int(argument)]


def last_message_id(runtime: Runtime, session: str) -> int | None:
    return next((turn.id for turn in reversed(runtime.chats.turns(session))), None)


def lengths(without: str, with_it: str) -> str:
    """Return a sentence with the lengths of two replies: "160 words without, 64 with what was learned.". If
    the replies are equal, the sentence only says that they are the same."""
    if without == with_it:
        return "Both replies are the same."
    before, after = (len(split(text).answer.split()) for text in (without, with_it))
    return f"{count(before, 'word')} without, {after:,} with what was learned."


def choice_text(chosen: Candidate) -> str:
    return "the reply with what was learned" if chosen.learned else "the original model's reply"
