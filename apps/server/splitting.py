"""Splits a reply's text into the thought, the answer and the calls of tools, whole or as a stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ruvmlx.models.text.tool_calls import ArgumentsPiece, CallBegun, CallParser, ParsedCall, Piece, TextPiece

from .thoughts import ThoughtStream

CallPiece = CallBegun | ArgumentsPiece


class Calls:
    """Splits one reply's answer into text and calls."""

    def __init__(self, parser: CallParser, most: int | None = None):
        """most: calls behind these, and text behind them, are left out."""
        self._parser, self._most = parser, most
        self._over = False

    def add(self, text: str) -> list[Piece]:
        """More of the answer; returns what can be told of it so far."""
        return self._keep_allowed(self._parser.add(text))

    def end(self) -> list[Piece]:
        """The reply is over: what was held back."""
        return self._keep_allowed(self._parser.end())

    def _keep_allowed(self, pieces: Sequence[Piece]) -> list[Piece]:
        kept: list[Piece] = []
        for piece in pieces:
            self._over = self._over or (isinstance(piece, CallBegun) and piece.index == self._most)
            if not self._over:
                kept.append(piece)
        return kept


NewCalls = Callable[[], Calls] | None  # for each reply one; None: all of an answer is text


@dataclass
class SplitPart:
    """A piece of a reply: first the thought, then the text, then the calls."""

    thought: str = ""
    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class SplitText:
    """The parts of one reply, as its text arrives."""

    def __init__(self, raw: bool, new_calls: NewCalls):
        """raw: the thought is part of the answer."""
        self._thoughts = ThoughtStream(split=not raw)
        self._calls = new_calls() if new_calls is not None else None

    def feed(self, text: str, ends: bool) -> list[SplitPart]:
        """Add text; returns what is now known, at least one part. ends: it was the last text."""
        thought, answer = self._thoughts.feed(text)
        if ends:
            held = self._thoughts.flush()
            thought, answer = thought + held[0], answer + held[1]
        if self._calls is None:
            return [SplitPart(thought, answer)]
        pieces = self._calls.add(answer)
        if ends:
            pieces += self._calls.end()
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
    """Whole calls of their pieces."""
    heads = [piece for piece in pieces if isinstance(piece, CallBegun)]
    arguments = {head.index: "" for head in heads}
    for piece in pieces:
        if isinstance(piece, ArgumentsPiece):
            arguments[piece.index] += piece.text
    return [ParsedCall(head.id, head.name, arguments[head.index]) for head in heads]
