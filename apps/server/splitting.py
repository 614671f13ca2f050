"""This module splits the text of a reply into the thought (the reasoning before the answer), the answer and
the tool calls. The caller passes the whole text, or the text piece by piece as it arrives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ruvmlx.models.text.tool_calls import ArgumentsPiece, CallBegun, CallParser, ParsedCall, Piece, TextPiece

from .thoughts import ThoughtStream

CallPiece = CallBegun | ArgumentsPiece


class Calls:
    """An object of this class splits the answer of one reply into text and tool calls."""

    def __init__(self, parser: CallParser, most: int | None = None):
        """most: the maximum number of tool calls of the reply; later calls, and the text after them, are
        dropped."""
        self._parser, self._most = parser, most
        self._over = False

    def add(self, text: str) -> list[Piece]:
        """Add text of the answer. Return the pieces of text and tool calls that no later text can change."""
        return self._keep_allowed(self._parser.add(text))

    def end(self, is_cut: bool) -> list[Piece]:
        """End the reply. Return the pieces that were held back because later text could have changed them.
        is_cut: True if a limit ended the reply."""
        return self._keep_allowed(self._parser.end(is_cut))

    def _keep_allowed(self, pieces: Sequence[Piece]) -> list[Piece]:
        kept: list[Piece] = []
        for piece in pieces:
            self._over = self._over or (isinstance(piece, CallBegun) and piece.index == self._most)
            if not self._over:
                kept.append(piece)
        return kept


NewCalls = Callable[[], Calls] | None  # a function that makes a parser for each reply; None: no tool calls


@dataclass
class SplitPart:
    """A piece of a reply. The piece's thought comes first, then its text, then its tool calls."""

    thought: str = ""
    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class SplitText:
    """An object of this class splits the text of one reply into thought, answer and tool calls while the text
    arrives."""

    def __init__(self, raw: bool, new_calls: NewCalls):
        """raw: True if the thought stays in the answer's text. new_calls: a function that makes the parser of
        tool calls, or None."""
        self._thoughts = ThoughtStream(split=not raw)
        self._calls = new_calls() if new_calls is not None else None

    def feed(self, text: str, ends: bool, is_cut: bool = False) -> list[SplitPart]:
        """Add text of the reply. Return the new parts. The list has at least one part, which can be empty.
        ends: True if this is the last text. is_cut: True if a limit ended the reply."""
        thought, answer = self._thoughts.feed(text)
        if ends:
            held = self._thoughts.flush()
            thought, answer = thought + held[0], answer + held[1]
        if self._calls is None:
            return [SplitPart(thought, answer)]
        pieces = self._calls.add(answer)
        if ends:
            pieces += self._calls.end(is_cut)
        parts = [SplitPart(thought)]
        for piece in pieces:
            if not isinstance(piece, TextPiece):
                parts[-1].calls.append(piece)
            elif parts[-1].calls:
                parts.append(SplitPart(text=piece.text))
            else:
                parts[-1].text += piece.text
        return parts


def joined_calls(pieces: Sequence[CallPiece]) -> list[ParsedCall]:
    """Join the pieces of tool calls into whole calls."""
    heads = [piece for piece in pieces if isinstance(piece, CallBegun)]
    arguments = {head.index: "" for head in heads}
    for piece in pieces:
        if isinstance(piece, ArgumentsPiece):
            arguments[piece.index] += piece.text
    return [ParsedCall(head.id, head.name, arguments[head.index]) for head in heads]


def arguments_of(made: ParsedCall) -> dict[str, Any] | None:
    """Return the arguments of a tool call as an object, or None if the model wrote no JSON object."""
    try:
        return msgspec.json.decode(made.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def without_json(made: ParsedCall) -> dict[str, Any]:
    """Return an object with the arguments as the model wrote them, for a tool call whose arguments are no
    JSON object. The pages of Anthropic's API advise this form, and a tool refuses it."""
    return {"INVALID_JSON": made.arguments}
