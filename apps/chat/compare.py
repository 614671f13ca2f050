"""A comparison: one question, answered with and without what was learned; choosing one is a rating.

Which is which is told only afterwards. Both replies stay in the chat, side by side as any others are.
"""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ruvmlx.engine.types import Chunk
from ruvmlx.errors import NotFound, UsageError

from .contract import ChatRuntime, learned

SIDES = ("without what was learned", "with what was learned")
_shuffle = random.SystemRandom()


@dataclass(frozen=True)
class Candidate:
    message: int
    learned: bool

    @property
    def made(self) -> str:
        return SIDES[self.learned]


def order() -> list[bool]:
    """Whether the first, and the second, is made with what was learned."""
    sides = [True, False]
    _shuffle.shuffle(sides)
    return sides


def check(runtime: ChatRuntime, session: str, text: str) -> None:
    """Is there something to compare? NotFound says what is missing."""
    known = learned(runtime)
    if known is None or known.adapter_version == 0:
        raise NotFound("nothing was learned yet, so both replies would be the same model's; rate some first")
    if not text and not any(turn.role == "user" for turn in runtime.chats.turns(session)):
        raise NotFound("there is no question yet; /compare and a question asks one")


def writing(
    session: str, text: str, first: bool, with_learned: bool, how: Callable[[threading.Event], dict[str, Any]]
) -> Callable[[ChatRuntime, threading.Event], Iterator[Chunk]]:
    """What streams one side. A new question is asked by the first; text "" is the last one again."""

    def begin(runtime: ChatRuntime, cancel: threading.Event) -> Iterator[Chunk]:
        if first and text:
            return runtime.chats.say(session, text, **how(cancel), untouched=not with_learned)
        return runtime.chats.again(session, **how(cancel), untouched=not with_learned)

    return begin


def candidate(runtime: ChatRuntime, session: str, with_learned: bool) -> Candidate:
    """The side that has just been written."""
    message = runtime.chats.turns(session)[-1].id
    assert message is not None
    return Candidate(message, with_learned)


def choice(argument: str, candidates: list[Candidate]) -> Candidate:
    """ "1" or "2" -> that side."""
    if len(candidates) < 2:
        raise NotFound("there are no two replies to choose from; /compare writes them")
    if argument not in ("1", "2"):
        raise UsageError(f"choose 1 or 2, got {argument[:20]!r}")
    return candidates[int(argument) - 1]


def told(chosen: Candidate) -> str:
    return f"You chose the reply {chosen.made}; it is rated up"
