"""This module describes tool calls and their results as lines for the user."""

import json
from typing import Any

from ruvmlx.models.text.tool_calls import ParsedCall
from ruvmlx.runtime import Turn
from ruvmlx.text import one_line, sanitize

MOST_LINES = 8  # the maximum number of lines of a tool's result that the user sees
MOST_CHARACTERS = 1000  # the maximum number of characters of a tool's result that the user sees
TEACHES_NOTHING = "ratings of an answer with a tool's result teach nothing"


def call_lines(call: ParsedCall) -> list[str]:
    """Return lines that describe a tool call: the tool's name, then a line for each argument."""
    arguments: dict[str, Any] = json.loads(call.arguments)
    rows = [
        f"  {one_line(key)}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for key, value in arguments.items()
    ]
    return sanitize("\n".join([call.name, *rows])).split("\n")


def call_line(call: ParsedCall) -> str:
    """Return a tool call as one line: "forecast city: Rome"."""
    return one_line(" ".join(line.strip() for line in call_lines(call)))


def result_lines(turn: Turn) -> list[str]:
    """Return the lines of a tool call and its result, for plain mode. turn: the message with the result."""
    called = "".join(f" {call_line(call)}" for call in turn.calls)
    return [f"Tool:{called}", *(f"  {line}" for line in short_lines(turn.content))]


def short_lines(result: str) -> list[str]:
    """Return the first lines of a tool's result, and a line with the number of characters that are left
    out."""
    text = sanitize(result)
    lines = text[:MOST_CHARACTERS].rstrip().split("\n")[:MOST_LINES]
    rest = len(text) - sum(map(len, lines)) - len(lines)
    return [*lines, f"… {rest:,} more characters"] if rest > 0 else lines
