"""This module finds the last reply and the last question of the open chat. In plain mode, commands such as
/rate and /edit act on this reply or question."""

from ruvmlx.errors import NotFound
from ruvmlx.runtime import Runtime, Turn

from ..state import ChatState


def shown_reply(runtime: Runtime, state: ChatState, verb: str) -> Turn:
    """Return the last reply on the shown branch of the open chat. Raise NotFound if there is no reply.

    verb: the verb for the error message, for example "rate" in "no reply to rate".
    """
    return _last(runtime, state, "assistant", f"reply to {verb}")


def shown_question(runtime: Runtime, state: ChatState) -> Turn:
    return _last(runtime, state, "user", "question to edit")


def _last(runtime: Runtime, state: ChatState, role: str, what: str) -> Turn:
    turns = runtime.chats.turns(state.session)
    found = next((turn for turn in reversed(turns) if turn.role == role), None)
    if found is None:
        raise NotFound(f"there is no {what} yet")
    return found
