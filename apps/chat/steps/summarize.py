"""This module has the step of /summarize. The model writes notes on the oldest messages of the chat, and then
reads the notes in place of these messages."""

from ruvmlx.errors import UsageError
from ruvmlx.runtime import Runtime

from .. import describe
from ..state import ChatState, Outcome


def summarize(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Let the model write the notes on the oldest messages. With the argument "off", drop the notes, so that
    the model reads the messages again, as far as its context has room."""
    session, limit = state.session, state.options.max_new_tokens
    if argument not in ("", "off"):
        raise UsageError(f"/summarize takes no word, or the word off; got {argument[:40]!r}")
    if argument:
        if not runtime.chats.summaries.of(session).text:
            return Outcome("There are no notes in this chat: the model reads the messages themselves.")
        runtime.chats.summaries.forget(session)
        return Outcome("The model reads the messages themselves again, as far as its context has room.")
    return Outcome(
        reply=lambda runtime, cancel: runtime.chats.summaries.write(session, cancel, limit),
        then=_tell_of_notes,
    )


def _tell_of_notes(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return Outcome(describe.summary(runtime.chats.summaries.of(state.session), is_printed=True))
