"""The command line's options for a chat, and the session that they select."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ruvmlx.engine.types import Sampling
from ruvmlx.runtime import Runtime

from .user_files import HERE, UserFiles


@dataclass(frozen=True)
class ChatOptions:
    """`session` is "new", "continue" (the last one) or an id's beginning."""

    session: str = "new"
    sampling: Sampling | None = None  # None: the model's own
    max_new_tokens: int = 1024
    system: str | None = None
    # The app alone uses these; the plain mode has no idle time.
    learn_when_idle: bool = True
    theme: str = "auto"
    motion: bool = True
    keys: str = ""  # as in "again=ctrl+t,chats=f3"
    best_of: int | str | None = None  # as /best says; None: the setting
    find: str = ""  # begin at the newest message with these words, of the session, or with "new" of all chats
    message: int | None = None  # begin at this message
    files: UserFiles = HERE
    tools: bool = True  # False: tool servers cannot be turned on
    copies: Callable[[str], bool] | None = None  # fills the clipboard of another machine

    def for_reply(self, cancel: threading.Event) -> dict[str, Any]:
        """Keyword arguments for `Conversations.say` and similar methods. cancel: ends the reply."""
        return {"sampling": self.sampling, "max_new_tokens": self.max_new_tokens, "cancel": cancel}

    def for_answer(self, cancel: threading.Event) -> dict[str, Any]:
        """`for_reply`, for methods that can write several replies to one question."""
        return self.for_reply(cancel) | ({"best_of": self.best_of} if self.best_of else {})


def start_place(runtime: Runtime, options: ChatOptions) -> tuple[str, int | None]:
    """(session, message) to begin at; the message is None for the chat's end."""
    if not options.find:
        session, message = start_session(runtime, options), options.message
    else:
        within = None if options.session == "new" else start_session(runtime, options)
        session, message = runtime.chats.find_message(options.find, within)
    if message is not None:
        runtime.chats.show_message(session, message)
    return session, message


def start_session(runtime: Runtime, options: ChatOptions) -> str:
    """The id of the session to chat in; "continue" without an earlier chat begins a new one."""
    earlier = runtime.chats.last_chat() if options.session == "continue" else options.session
    if options.session == "new" or earlier is None:
        return runtime.chats.new_chat(options.system)
    if options.session != "continue":
        earlier = runtime.chats.find_chat(earlier)
    if options.system is not None:  # "": remove it
        runtime.chats.set_system(earlier, options.system)
    return earlier
