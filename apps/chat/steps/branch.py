"""This module keeps a chat on the branch that the user sees. Another terminal or program can continue the
same chat at the same time: the store's current branch then ends with messages that this user does not see."""

from ruvmlx.errors import NotFound
from ruvmlx.runtime import Runtime, Turn

from .write import is_shown


def return_to(runtime: Runtime, session: str, message: int) -> None:
    """Make a message, the last one on the user's screen, the end of the current branch, if another program
    has added messages after it or has made another branch the current one. If another program has deleted the
    chat, do nothing: the next reply then raises NotFound."""
    try:
        turns = runtime.chats.turns(session)
    except NotFound:
        return
    at = next((i for i, turn in enumerate(turns) if turn.id == message), None)
    if at is None or any(is_shown(turn) for turn in turns[at + 1 :]):
        runtime.store.messages.set_head(session, message)


def turns_with(runtime: Runtime, session: str, reply_id: str) -> list[Turn]:
    """Return the messages of the branch with a reply that has just been written, and make this branch the
    current one. If the chat has no such reply, return the messages of the current branch."""
    turns = runtime.chats.turns(session)
    if any(turn.reply_id == reply_id for turn in turns[-1:]):
        return turns
    place = runtime.store.messages.place_of(reply_id)
    if place is None or place[0] != session:
        return turns
    runtime.store.messages.set_head(session, place[1])
    return runtime.chats.turns(session)
