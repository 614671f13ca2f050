"""This module remembers tool calls as the model wrote them, and restores them when a client sends them back.

A client can send the arguments of an earlier tool call in another order than the model wrote them. For
example, Claude Code puts the arguments that have a default value first. Without this module, the new prompt
would differ from the prompt in the KV cache, although both prompts mean the same.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ruvmlx.models.config.model import Message
from ruvmlx.models.text.tool_calls import ParsedCall

# the maximum number of remembered calls, and of characters of their arguments; the oldest calls are dropped
MAX_CALLS, MAX_LETTERS = 4096, 1 << 22


@dataclass
class WrittenCalls:
    """A mapping from the id of a tool call to its arguments, as the JSON text that the model wrote. Only one
    thread can use an object of this class."""

    _arguments: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def add(self, made: ParsedCall) -> None:
        self._arguments[made.id] = made.arguments
        letters = sum(map(len, self._arguments.values()))
        while len(self._arguments) > MAX_CALLS or letters > MAX_LETTERS:
            letters -= len(self._arguments.popitem(last=False)[1])

    def restore_message(self, message: Message) -> Message:
        """Return the message with the arguments of its tool calls in the order in which the model wrote them.
        A tool call that the model did not write, or whose arguments were changed, stays as it is."""
        if not message.tool_calls:
            return message
        return replace(message, tool_calls=tuple(map(self._restore_call, message.tool_calls)))

    def _restore_call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        known, given = self._arguments.get(str(call.get("id"))), call["function"]["arguments"]
        if known is None or not isinstance(given, dict):
            return call
        try:
            written = msgspec.json.decode(known)
        except (msgspec.DecodeError, RecursionError):
            return call
        return {**call, "function": {**call["function"], "arguments": written}} if written == given else call
