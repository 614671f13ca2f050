"""The runtime that the chat apps use, and what the command line chose.

A runtime belongs to the thread that opened it: every call comes from there. Only the `cancel` events may be
set from elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ruvmlx.engine.types import Sampling
from ruvmlx.errors import NotFound
from ruvmlx.runtime import LearnStatus, Runtime

ChatRuntime = Runtime
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
    earlier = runtime.chats.last_chat() if options.session == "continue" else options.session
    if options.session == "new" or earlier is None:
        return runtime.chats.new_chat(options.system)
    if options.session != "continue":
        earlier = runtime.chats.find_chat(earlier)
    if options.system:
        runtime.chats.set_system(earlier, options.system)
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
