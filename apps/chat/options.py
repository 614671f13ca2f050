"""This module has the options of a chat from the command line. The module also finds the session (the saved
chat) that the options select."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ruvmlx.engine.types import Sampling
from ruvmlx.runtime import Runtime
from ruvmlx.settings import settings_file

from .user_files import HERE, UserFiles


def save_theme(value: str) -> None:
    settings_file.save("theme", value)


@dataclass(frozen=True)
class ChatOptions:
    """The options of a chat. session: "new", "continue" (the last chat) or the beginning of a chat's id."""

    session: str = "new"
    sampling: Sampling | None = None  # None: the values of the settings, or else of the model
    max_new_tokens: int = 1024
    system: str | None = None  # the system prompt with which a new chat begins
    # True if `system` also replaces the system prompt of an earlier chat ("": removes it)
    replaces_system: bool = False
    # Only the app uses the options learn_when_idle, theme, motion and keys. Plain mode cannot learn in idle
    # time.
    learn_when_idle: bool = True
    theme: str = "auto"
    motion: bool = True
    keys: str = ""  # the user's own keys, for example "again=f7,chats=f9"
    best_of: int | str | None = None  # number of replies to a question, or "auto"; None: as in the settings
    # words of the message to show first; if `session` is "new", the message can be in any chat
    find: str = ""
    message: int | None = None  # the id of the message to show first; None: the end of the chat
    files: UserFiles = HERE
    # True if the adapter that the user chooses in the chat is that of the next start
    keeps_adapter: bool = True
    tools: bool = True  # False if the user must not turn on tool servers
    # a function that copies a text to the clipboard of the user's machine
    copies: Callable[[str], bool] | None = None
    # a function that saves the value of the setting `theme` on the user's machine
    saves_theme: Callable[[str], None] = save_theme

    def for_reply(self, cancel: threading.Event) -> dict[str, Any]:
        """Return keyword arguments for `Conversations.say` and the other methods of `Conversations` that let
        the model write. cancel: an event; once it is set, the reply ends."""
        return {"sampling": self.sampling, "max_new_tokens": self.max_new_tokens, "cancel": cancel}

    def for_answer(self, cancel: threading.Event) -> dict[str, Any]:
        """Return keyword arguments for methods that can write several replies to one question: the arguments
        of `for_reply`, and `best_of` if the options have it."""
        return self.for_reply(cancel) | ({"best_of": self.best_of} if self.best_of else {})


def start_place(runtime: Runtime, options: ChatOptions) -> tuple[str, int | None]:
    """Return (session, message): the id of the chat to open, and the id of the message to show first. The
    second id is None for the end of the chat."""
    if not options.find:
        session, message = start_session(runtime, options), options.message
    else:
        within = None if options.session == "new" else start_session(runtime, options)
        session, message = runtime.chats.find_message(options.find, within)
    if message is not None:
        runtime.chats.show_message(session, message)
    return session, message


def start_session(runtime: Runtime, options: ChatOptions) -> str:
    """Return the id of the chat that the options select. Begin a new chat if the options say "new", or if
    they say "continue" and no chat exists yet. An earlier chat keeps its own system prompt, unless the
    options replace this prompt."""
    earlier = runtime.chats.last_chat() if options.session == "continue" else options.session
    if options.session == "new" or earlier is None:
        return runtime.chats.new_chat(options.system)
    if options.session != "continue":
        earlier = runtime.chats.find_chat(earlier)
    if options.replaces_system:
        runtime.chats.set_system(earlier, options.system)
    return earlier
