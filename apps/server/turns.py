"""This module builds the turns of a conversation (one role's text and tool calls) from the messages that
coding agents send."""

import itertools
from collections.abc import Sequence

from ruvmlx.models.config.model import Message


def join_turns(messages: Sequence[Message]) -> list[Message]:
    """Return the turns of a conversation. Neighbouring messages of one role become one turn, because many
    chat templates need roles that alternate. Each result of a tool stays a separate turn."""
    turns: list[Message] = []
    for role, group in itertools.groupby(messages, lambda message: message.role):
        same = list(group)
        if role == "tool" or len(same) == 1:
            turns += same
        else:
            text = "\n\n".join(message.content for message in same if message.content)
            turns.append(Message(role, text, tuple(call for one in same for call in one.tool_calls)))
    return turns
