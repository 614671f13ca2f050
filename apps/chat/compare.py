"""A comparison: one question, answered with and without what was learned.

`/compare` is blind: the user learns which is which only after a choice, and the choice is a preference.
`/effect` names the sides, draws both replies with one seed, and asks nothing. Both replies stay in the chat
as alternatives in one place.
"""

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ruvmlx.engine.types import Chunk
from ruvmlx.errors import NotFound, UsageError
from ruvmlx.host.serving import BeginReply
from ruvmlx.models.text.thinking import split
from ruvmlx.runtime import Runtime

from .options import ChatOptions
from .view_model import learn_status

SIDES = ("without what was learned", "with what was learned")
_shuffle = random.SystemRandom()


@dataclass(frozen=True)
class Candidate:
    """One of the two replies. message: its id; learned: whether it was written with what was learned."""

    message: int
    learned: bool

    @property
    def made(self) -> str:
        return SIDES[self.learned]


def order() -> list[bool]:
    """Whether the first and the second reply are written with what was learned, in random order."""
    sides = [True, False]
    _shuffle.shuffle(sides)
    return sides


def draw_seed() -> int:
    """A seed for both replies, so that they differ only by what was learned."""
    return _shuffle.randrange(1 << 31)


def check(runtime: Runtime, session: str, text: str) -> None:
    """Raise NotFound if there is nothing to compare; the message says what is missing."""
    known = learn_status(runtime)
    if known is None or known.adapter_version == 0:
        raise NotFound("nothing was learned yet, so there is nothing to compare; rate some replies first")
    if not text and not any(turn.role == "user" for turn in runtime.chats.turns(session)):
        raise NotFound("there is no question yet; type /compare and a question")


def writing(
    session: str, text: str, first: bool, with_learned: bool, options: ChatOptions, seed: int | None = None
) -> BeginReply:
    """Streams one side. The first side asks `text` as a new question; "" repeats the last question."""

    def begin(runtime: Runtime, cancel: threading.Event) -> Iterator[Chunk]:
        how = options.for_reply(cancel) | {"untouched": not with_learned}
        if seed is not None:
            how["sampling"] = replace(options.sampling or runtime.sampling(), seed=seed)
        if first and text:
            return runtime.chats.say(session, text, **how)
        return runtime.chats.again(session, **how)

    return begin


def candidate(runtime: Runtime, session: str, with_learned: bool) -> Candidate:
    """The reply that has just been written."""
    message = runtime.chats.turns(session)[-1].id
    assert message is not None
    return Candidate(message, with_learned)


def choice(argument: str, candidates: list[Candidate]) -> tuple[Candidate, Candidate]:
    """ "1" or "2" -> that reply, and the other one."""
    if len(candidates) < 2:
        raise NotFound("there are no two replies to choose from; /compare writes two")
    if argument not in ("1", "2"):
        raise UsageError(f"choose 1 or 2, got {argument[:20]!r}")
    return candidates[int(argument) - 1], candidates[2 - int(argument)]


def lengths(without: str, with_it: str) -> str:
    """ "160 words without, 64 with what was learned"."""
    if without == with_it:
        return "Both replies are the same."
    before, after = (f"{len(split(text).answer.split()):,}" for text in (without, with_it))
    return f"{before} words without, {after} with what was learned."


def told(chosen: Candidate) -> str:
    return f"the reply {chosen.made}"
