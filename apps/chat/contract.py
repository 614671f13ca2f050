"""What the chat apps need of a runtime. `ruvmlx.runtime.Runtime` is one; so are the tests' scripted fakes.

A runtime belongs to the thread that opened it: every call comes from there. Only the `cancel` events may be
set from elsewhere.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ruvmlx.engine.types import Chunk, Sampling
from ruvmlx.errors import NotFound
from ruvmlx.platform.memory import MemoryUse
from ruvmlx.runtime import LearningState, LearnStatus, RatingResult, Turn
from ruvmlx.store import NamedRow, Store


class HasShape(Protocol):
    @property
    def max_context(self) -> int: ...


class HasName(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def format(self) -> str: ...

    @property
    def bits(self) -> float: ...

    @property
    def parameters(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def config(self) -> HasShape: ...


class HasKernels(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def kernels(self) -> str: ...

    @property
    def caveat(self) -> str: ...


class ChatRuntime(Protocol):
    @property
    def model(self) -> HasName: ...

    @property
    def backend(self) -> HasKernels: ...

    @property
    def store(self) -> Store:
        """The user's chats: they are listed, searched, named, copied there."""

    @property
    def last_reply_id(self) -> str | None:
        """The newest reply, after `say`."""

    def new_chat(self, system: str | None = None) -> str:
        """A new session's id."""

    def last_chat(self) -> str | None:
        """The session used last."""

    def find_chat(self, beginning: str) -> str:
        """A session's id, from a unique beginning of it. NotFound where there is none."""

    def set_system(self, session_id: str, system: str | None) -> None:
        """Holds from the next reply on."""

    def turns(self, session_id: str) -> list[Turn]:
        """The system prompt too, if there is one."""

    def say(
        self,
        session_id: str,
        text: str,
        *,
        sampling: Sampling | None,
        max_new_tokens: int,
        cancel: threading.Event,
        instead_of: int | None = None,
        untouched: bool = False,
    ) -> Iterator[Chunk]:
        """Commits the user's turn, streams the reply, commits it. The last chunk has the response.

        `sampling` None: as the model and the user's settings have it. `instead_of`: a message of the user
        that is put in other words. `untouched`: without what was learned. `rate`, `undo` and what only looks
        may be called between two chunks: the reply goes on as it began.
        """

    def again(
        self,
        session_id: str,
        *,
        sampling: Sampling | None,
        max_new_tokens: int,
        cancel: threading.Event,
        message: int | None = None,
        untouched: bool = False,
    ) -> Iterator[Chunk]:
        """The same for another reply beside `message`, or beside the last one."""

    def go_on(
        self,
        session_id: str,
        *,
        sampling: Sampling | None,
        max_new_tokens: int,
        cancel: threading.Event,
        message: int | None = None,
    ) -> Iterator[Chunk]:
        """The same for the rest of a reply that was cut. The response has the whole text."""

    def prefer(self, session_id: str, message: int) -> RatingResult:
        """Show this reply of several in its place, and rate it up."""

    def flip(self, session_id: str, step: int, message: int | None = None) -> int:
        """Show the next alternative of a message, or of the last one; its id."""

    def asked_before(self) -> list[str]:
        """What the user wrote in all chats, the newest first."""

    def put_away(self, session_id: str) -> None:
        """Delete a chat, unless it is brought back before the runtime is closed."""

    def bring_back(self, session_id: str) -> None: ...

    def settle(self, cancel: threading.Event | None = None) -> None:
        """Work that a later rating needs, done while the user reads; `cancel` ends it early."""

    def rate(self, reply_id: str, rating: str, note: str = "") -> RatingResult: ...

    def undo(self) -> LearnStatus:
        """Takes the last rating back, bit for bit. NotFound when there is none."""

    def rollback(self, version: int) -> LearnStatus:
        """Use an earlier version of the adapter again; 0 is the untouched model."""

    def learning(self) -> LearningState:
        """All that is shown of what was learned. NotFound when it runs without an adapter."""

    def held(self) -> MemoryUse:
        """What the process holds of the machine's memory, and for what."""

    def notice(self, reply_id: str, what: str) -> bool:
        """The user "copied" a reply. True if it is heeded: `implicit_feedback` is off by default."""

    def background_due(self) -> bool:
        """Is there something to `consolidate`?"""

    def consolidate(
        self, progress: Callable[[int, int, float], None] | None, cancel: threading.Event
    ) -> dict[str, Any]:
        """Train on the ratings, until it is done or cancelled; then it goes on at the next call.

        progress(steps done, steps, loss). "promoted" and "reason" say what came of it.
        """

    def kv_due(self) -> bool:
        """Is there something to `review_kv`?"""

    def review_kv(self, cancel: threading.Event) -> dict[str, Any]:
        """Measure what KV policies cost. "measured": replies; "changed": the policy; "reason": why."""

    def status(self) -> LearnStatus:
        """NotFound when it runs without an adapter."""

    @property
    def adapter_label(self) -> str | None:
        """Name and version of the adapter in use, "default@3"; None without one."""

    def use_adapter(self, name: str | None) -> None:
        """Go on with another adapter, or without one. Not while a reply is being written."""

    def adapters(self) -> list[NamedRow]:
        """Those of this model that have learned something."""

    def check_chat(self, session_id: str) -> None:
        """UsageError or UnsupportedModel where the model cannot read what was said."""

    def hand_over(self) -> frozenset[str]:
        """The chats that were put away: `close` leaves them to another runtime, which takes them over."""

    def take_over(self, put_away: frozenset[str]) -> None: ...

    def close(self) -> None: ...


OpenRuntime = Callable[[], ChatRuntime]


@dataclass(frozen=True)
class ChatOptions:
    """What the command line chose. `session` is "new", "continue" (the last one) or an id's beginning."""

    session: str = "new"
    sampling: Sampling | None = None  # None: the model's own
    max_new_tokens: int = 1024
    system: str | None = None
    learn_when_idle: bool = True  # the app alone, as what follows: the plain mode has no idle time
    theme: str = "auto"
    motion: bool = True
    keys: str = ""  # as in "again=ctrl+t,chats=f3"


def start_session(runtime: ChatRuntime, options: ChatOptions) -> str:
    """The session to chat in; "continue" without an earlier chat begins one."""
    earlier = runtime.last_chat() if options.session == "continue" else options.session
    if options.session == "new" or earlier is None:
        return runtime.new_chat(options.system)
    if options.session != "continue":
        earlier = runtime.find_chat(earlier)
    if options.system:
        runtime.set_system(earlier, options.system)
    return earlier


def swap_adapter(runtime: ChatRuntime, name: str) -> None:
    """What `/adapter NAME` does; "" only looks."""
    if name:
        runtime.use_adapter(None if name == "none" else name)


def learned(runtime: ChatRuntime) -> LearnStatus | None:
    """What was learned so far; None without an adapter."""
    try:
        return runtime.status()
    except NotFound:
        return None
