"""This module has the steps for saved chats. The steps list, open, start, rename, copy, delete, export and
import chats."""

from dataclasses import replace

from ruvmlx.chats import soft_delete
from ruvmlx.errors import UsageError
from ruvmlx.runtime import Runtime

from .. import chat_files
from ..state import ChatState, Outcome, text_outcome


def list_chats(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    state.listed_chats = [entry.id for entry in chat_files.entries(runtime)]
    listed = chat_files.entries(runtime, argument)
    state.found_messages = {entry.id: entry.message for entry in listed if entry.message is not None}
    return Outcome("\n".join(chat_files.lines(runtime, listed, argument)))


def open_chat(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Open a saved chat. If the last /chats was a search, show the message that this search found in the
    chat."""
    session = chat_files.find(runtime, argument, state.listed_chats)
    message = state.found_messages.get(session)
    if message is not None:
        runtime.chats.show_message(session, message)
    return replace(_open_chat(runtime, session), message=message)


def new_chat(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return Outcome("New chat.", opens=runtime.chats.new_chat(state.users_system))


def title(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    said = chat_files.rename(runtime, state.session, argument)
    return Outcome(said, flash=said)


def pin(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Pin the open chat, so that lists show it first. If the chat is pinned, unpin it."""
    said = chat_files.pin(runtime, state.session)
    return Outcome(said, flash=said)


def folder(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Put the open chat into the named folder of the list of chats. The name "none" takes the chat out of its
    folder. Without a name, list the folders."""
    return text_outcome(chat_files.put_in_folder(runtime, state.session, argument))


def fork(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Copy the open chat, and open the copy, which has the same options. If a reply is selected, the copy
    ends with this reply."""
    said = "This is the copy; the original chat is unchanged"
    copied = runtime.store.chats.fork(state.session, state.selected)
    state.changed_options[copied] = state.options
    return Outcome(f"{said}.", flash=said, opens=copied)


def delete(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Delete the open chat. For a day, /restore can bring the chat back. With the argument "now", delete the
    chat permanently."""
    if argument not in ("", "now"):
        raise UsageError(f"/delete takes no word, or the word now (for good); got {argument[:40]!r}")
    if argument:
        gone = runtime.erase_chat(state.session)
        left = "" if gone else f" {soft_delete.why_words_are_left(runtime.store)}"
        kept = f"The chat is deleted for good; what its ratings taught stays learned.{left}"
        opens = runtime.chats.new_chat(state.users_system)
        return Outcome(f"{kept} This is a new chat.", flash=kept, opens=opens)
    runtime.store.chats.soft_delete(state.session)
    return Outcome(
        "Deleted; for a day, /restore brings it back. This is a new chat.",
        flash="Deleted · for a day, /restore brings it back",
        seconds=10,
        opens=runtime.chats.new_chat(state.users_system),
    )


def restore(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Restore the chat that the user deleted last."""
    return _open_chat(runtime, chat_files.restore_newest(runtime), "This chat is back")


def export(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    return text_outcome(chat_files.export(runtime, state.session, argument, state.options.files))


def import_file(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    found = chat_files.import_file(runtime, argument, state.options.files)
    said = "" if found.is_new else "Nothing was imported: this chat was there already"
    return _open_chat(runtime, found.session_id, said)


def _open_chat(runtime: Runtime, session: str, said: str = "") -> Outcome:
    words = f"Chat: {chat_files.title(runtime, session)}" + (f" ({said.lower()})" if said else "")
    return Outcome(words, flash=said, opens=session, retell=True)
