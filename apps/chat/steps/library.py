"""Commands for saved chats: list, open, start, rename, copy, delete, export, import."""

from ruvmlx.errors import NotFound
from ruvmlx.runtime import Runtime

from .. import chat_files
from ..state import ChatState, Outcome, told


def list_chats(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    return Outcome("\n".join(chat_files.lines(runtime, argument)))


def open_chat(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    return _opened(runtime, chat_files.find(runtime, argument))


def new_chat(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return Outcome("New chat.", opens=runtime.chats.new_chat(state.system))


def title(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    said = chat_files.rename(runtime, state.session, argument)
    return Outcome(said, flash=said)


def fork(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Copy the chat, up to the selected reply if there is one."""
    said = "This is the copy; the original chat is unchanged"
    copied = runtime.store.chats.fork(state.session, state.selected)
    return Outcome(f"{said}.", flash=said, opens=copied)


def delete(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    runtime.deleted_chats.soft_delete(state.session)
    state.deleted.append(state.session)
    return Outcome(
        "Deleted. /restore brings it back until you quit. This is a new chat.",
        flash="Deleted · /restore brings it back until you quit",
        seconds=10,
        opens=runtime.chats.new_chat(state.system),
    )


def restore(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Bring back the chat that was deleted last."""
    if not state.deleted:
        raise NotFound("no chat was deleted since this start")
    runtime.deleted_chats.restore(state.deleted[-1])
    return _opened(runtime, state.deleted.pop())


def export(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    return told(chat_files.export(runtime, state.session, argument, state.options.files))


def import_file(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    return _opened(runtime, chat_files.import_file(runtime, argument, state.options.files))


def _opened(runtime: Runtime, session: str) -> Outcome:
    return Outcome(f"Chat: {chat_files.title(runtime, session)}", opens=session, retell=True)
