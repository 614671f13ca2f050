"""Makes the turns of a conversation from what agents send."""

from collections.abc import Mapping, Sequence
from typing import Any

from ruvmlx.models.config.model import Message


def add_turn(turns: list[Message], role: str, content: str, calls: Sequence[Mapping[str, Any]] = ()) -> None:
    """Append a turn, or add to the last one of the same role: many templates want roles to alternate."""
    if turns and turns[-1].role == role:
        last = turns.pop()
        content = "\n\n".join(filter(None, (last.content, content)))
        calls = (*last.tool_calls, *calls)
    turns.append(Message(role, content, tuple(calls)))
