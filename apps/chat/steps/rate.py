"""Commands about ratings: rate, undo, roll back to an earlier version, and show what was learned."""

from ruvmlx.errors import NotFound
from ruvmlx.runtime import Runtime

from .. import describe
from ..arguments import parse_rating, parse_version
from ..overview import Overview, spoken_lines
from ..state import ChatState, Outcome


def rate(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Rate the newest reply."""
    rating, note = parse_rating(argument)
    reply = runtime.last_reply_id or _last_stored(runtime, state)
    return Outcome(describe.effect_words(runtime.rate(reply, rating, note)))


def _last_stored(runtime: Runtime, state: ChatState) -> str:
    """The chat's newest reply, from an earlier run."""
    replies = [turn.reply_id for turn in runtime.chats.turns(state.session) if turn.reply_id]
    if not replies:
        raise NotFound("there is no reply to rate yet")
    return replies[-1]


def undo(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    said = describe.undone(runtime.undo())
    return Outcome(said, flash=said, learned=True)


def rollback(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    said = describe.rolled_back(runtime.rollback(parse_version(argument)))
    return Outcome(said, flash=said, learned=True)


def learning(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    view = Overview.of(runtime).later(state.sensors.read())
    return Outcome("\n".join(spoken_lines(view, state.kv)))
