"""This module builds the turns of a conversation (one role's text and tool calls) from the messages that
coding agents send."""

from collections.abc import Mapping, Sequence
from typing import Any

from ruvmlx.models.config.model import Message


def add_turn(turns: list[Message], role: str, content: str, calls: Sequence[Mapping[str, Any]] = ()) -> None:
    """Append a turn to the conversation. If the last turn has the same role, add the text and the calls to
    the last turn, because many chat templates need roles that alternate."""
    if turns and turns[-1].role == role:
        last = turns.pop()
        content = "\n\n".join(filter(None, (last.content, content)))
        calls = (*last.tool_calls, *calls)
    turns.append(Message(role, content, tuple(calls)))
