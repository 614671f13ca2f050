"""The messages that are shown last: what commands act on in plain mode."""

from ruvmlx.errors import NotFound
from ruvmlx.runtime import Runtime, Turn

from ..state import ChatState


def shown_reply(runtime: Runtime, state: ChatState, verb: str) -> Turn:
    """The last reply of the open chat's branch; NotFound if there is none. verb: what is done to it."""
    return _last(runtime, state, "assistant", f"reply to {verb}")


def shown_question(runtime: Runtime, state: ChatState) -> Turn:
    return _last(runtime, state, "user", "question to edit")


def _last(runtime: Runtime, state: ChatState, role: str, what: str) -> Turn:
    turns = runtime.chats.turns(state.session)
    found = next((turn for turn in reversed(turns) if turn.role == role), None)
    if found is None:
        raise NotFound(f"there is no {what} yet")
    return found
