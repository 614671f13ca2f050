"""Tool calls in a reply's text: parsers for streams and whole replies, for the forms in which models write
calls.

    parser = CallParser(dialect, names)
    for text in stream:
        parser.add(text)      # -> [TextPiece("Let me see."), CallBegun(0, "a1B2c3D4e", "weather"), ...]
    parser.end()              # what was held back

    LLAMA      {"name": "weather", "parameters": {...}}      the whole reply, perhaps after <|python_tag|>
    MISTRAL    [TOOL_CALLS][{"name": "weather", "arguments": {...}}, ...]
    MISTRAL11  [TOOL_CALLS]weather[ARGS]{...}                perhaps with [CALL_ID]abcdefgh1 before [ARGS]
    HERMES     <tool_call>{"name": "weather", "arguments": {...}}</tool_call>         Qwen's, too

LLAMA and HERMES: without marks, a reply that begins with such an object is a call if the name is a tool's.
Small models leave the marks out.

Marks that are special tokens are in the text, because the engine shows them if a request has tools
(`shown_marks`). Text that only looks like a call stays text. A call that is cut off ends where the text ends.
Spaces beside calls are removed. Nothing is parsed inside a thought.
"""

import re
import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..config.model import Tokenizer
from .call_json import SPACE, CallObject, JSONSpan
from .typed_text import THOUGHT_TAGS

_ID = string.ascii_letters + string.digits
_NAME = re.compile(r"[\w.-]+")
_LONGEST_HEAD = 256  # the maximum number of characters between a mark and the arguments


@dataclass(frozen=True)
class TextPiece:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call begins. index: its number in the reply. id: made here. name: the function's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """The next piece of a call's arguments. All pieces together are JSON."""

    index: int
    text: str


Piece = TextPiece | CallBegun | ArgumentsPiece


@dataclass(frozen=True)
class ParsedCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class Dialect:
    """How a model writes calls.

    begin: the mark before calls
    key: the key of the arguments
    end: the mark after each call
    named: whether the name stands before the arguments instead of inside the object
    bare: whether the mark may be missing if the answer begins with an object that has the name of a tool
    between: characters that may stand between two objects
    """

    name: str
    begin: str
    key: str = "arguments"
    end: str = ""
    named: bool = False
    bare: bool = False
    between: str = SPACE


LLAMA = Dialect("llama", "<|python_tag|>", "parameters", bare=True, between=SPACE + ";,")
MISTRAL = Dialect("mistral", "[TOOL_CALLS]", between=SPACE + "[,]")
MISTRAL11 = Dialect("mistral11", "[TOOL_CALLS]", named=True, between=SPACE + "[,]")
HERMES = Dialect("hermes", "<tool_call>", end="</tool_call>", bare=True)
DIALECTS = (LLAMA, MISTRAL, MISTRAL11, HERMES)
ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_MARKS = (ARGS, CALL_ID, *(mark for d in DIALECTS for mark in (d.begin, d.end) if mark))


def shown_marks(tokenizer: Tokenizer) -> dict[int, str]:
    """Return {id: text} of the marks of calls that are special tokens. Without them a call could not be told
    from text."""
    return {i: text for text, i in tokenizer.special_tokens.items() if text in _MARKS}


def new_call_id() -> str:
    """Return nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(_ID) for _ in range(9))


class CallParser:
    """Splits a reply's text into its answer and its calls while it arrives."""

    def __init__(self, dialect: Dialect, names: Iterable[str] = ()):
        """names: the names of the tools; a bare object with another name is text."""
        self._dialect, self._names = dialect, frozenset(names)
        self._state: Callable[[], bool] = self._in_beginning
        self._text = ""  # text that arrived and was not parsed yet
        self._space = ""  # space after the answer so far; shown only if more text follows
        self._mark = ""  # what was read of a call before it began, in case it is not a call
        self._thought_end = ""
        self._call: CallObject | None = None
        self._span: JSONSpan | None = None  # the arguments after a name
        self._bare = False  # whether the current call has no mark
        self._after_call = False  # whether no text came after the last call
        self._out: list[Piece] = []
        self.calls = 0  # the number of calls that have begun

    def add(self, text: str) -> list[Piece]:
        """Add text of the reply. Returns the pieces that are certain so far."""
        self._text += text
        while self._text and self._state():
            pass
        return self._take_pieces()

    def end(self) -> list[Piece]:
        """End the reply. Returns the text that was held back. A mark after a call that the end of the reply
        cut off is removed."""
        marks = self._dialect.begin, self._dialect.end
        if self._after_call and any(mark.startswith(self._text) for mark in marks):
            self._text = ""
        unused = self._call.raw if self._call is not None and not self._call.begun else ""
        self._show(self._mark + unused + self._text)
        if not self.calls:
            self._out.append(TextPiece(self._space))
        self._text = self._space = ""
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        """Return the pieces. Neighbouring pieces of text are joined, empty ones are left out."""
        found, self._out = self._out, []
        joined: list[Piece] = []
        for piece in found:
            last = joined[-1] if joined else None
            if isinstance(piece, TextPiece) and isinstance(last, TextPiece):
                joined[-1] = TextPiece(last.text + piece.text)
            elif isinstance(piece, CallBegun) or piece.text:
                joined.append(piece)
        return joined

    def _show(self, text: str) -> None:
        """Add text of the answer. Spaces at its end are held back."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip(SPACE)
        bare = text.rstrip(SPACE)
        self._space = text[len(bare) :]
        self._after_call = self._after_call and not bare
        self._out.append(TextPiece(bare))

    def _show_first(self, n: int) -> None:
        self._show(self._text[:n])
        self._text = self._text[n:]

    # States: each reads from _text, and returns False if it needs more text ------------------------

    def _in_beginning(self) -> bool:
        """Read a thought, a bare call, or text."""
        begun = self._text.lstrip(SPACE)
        opening = next((tag for tag in THOUGHT_TAGS if begun.startswith(tag)), "")
        if opening:
            self._thought_end = THOUGHT_TAGS[opening]
            self._state = self._in_thought
        elif not begun or any(tag.startswith(begun) for tag in THOUGHT_TAGS):
            return False
        else:
            self._bare = self._dialect.bare and begun[0] == "{"
            self._state = self._in_object if self._bare else self._in_text
        return True

    def _in_thought(self) -> bool:
        at = self._text.find(self._thought_end)
        if at < 0:
            self._show_first(len(self._text) - _overlap(self._text, self._thought_end))
            return False
        self._show_first(at + len(self._thought_end))
        self._state = self._in_beginning if self._dialect.bare else self._in_text
        return True

    def _in_text(self) -> bool:
        mark = self._dialect.begin
        at = self._text.find(mark)
        if at < 0:
            self._show_first(len(self._text) - _overlap(self._text, mark))
            return False
        self._show_first(at)
        self._text, self._mark, self._bare = self._text[len(mark) :], mark, False
        self._state = self._in_name if self._dialect.named else self._in_object
        return True

    def _in_name(self) -> bool:
        """weather[ARGS]{...}, weather[CALL_ID]abcdefgh1[ARGS]{...} or weather{...}"""
        head, brace, rest = self._text.partition("{")
        if len(head) > _LONGEST_HEAD:
            return self._no_call()
        if not brace:
            return False
        if head.strip(SPACE) in ("", "["):  # the older form: a list of objects
            self._state = self._in_object
            return True
        name = head.partition(CALL_ID)[0].partition(ARGS)[0].strip(SPACE)
        if not _NAME.fullmatch(name):
            return self._no_call()
        self._begin(name)
        self._text, self._span, self._state = brace + rest, JSONSpan(), self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        assert self._span is not None
        n = self._span.feed(self._text)
        self._out.append(ArgumentsPiece(self.calls - 1, self._text[:n]))
        self._text = self._text[n:]
        if self._span.over:
            self._state = self._in_text
        return True

    def _in_object(self) -> bool:
        """Read an object, or the characters between two objects."""
        call = self._call
        if call is None:
            return self._in_between()
        self._text = call.feed(self._text)
        unknown = self._bare and self._names and call.name is not None and call.name not in self._names
        if not call.begun and (call.bad or unknown):
            self._mark, self._text = self._mark + call.raw[:1], call.raw[1:] + self._text
            return self._no_call()
        if not call.begun and call.name is not None:
            self._begin(call.name)
            call.begun = True
        if call.begun:
            self._out.append(ArgumentsPiece(self.calls - 1, call.arguments()))
        if call.over:
            self._call = None
        return True

    def _in_between(self) -> bool:
        rest, end = self._text.lstrip(self._dialect.between), self._dialect.end
        if self._mark or self._bare:
            self._mark += self._text[: len(self._text) - len(rest)]
        self._text = rest
        if not rest or (end.startswith(rest) and end != rest):
            return False
        if rest[0] == "{":
            self._call = CallObject()
        elif end and rest.startswith(end) and not self._mark.strip(SPACE):
            self._mark, self._text, self._state = "", rest.removeprefix(end), self._in_text
        else:
            return self._no_call()
        return True

    # Calls ------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        self._mark = self._space = ""
        self._after_call = True
        self._out.append(CallBegun(self.calls, new_call_id(), name))
        self.calls += 1

    def _no_call(self) -> bool:
        """Treat what was read as text."""
        self._show(self._mark)
        self._mark, self._call, self._state = "", None, self._in_text
        return True


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` with which `mark` begins."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)


def parse(text: str, dialect: Dialect, names: Iterable[str] = ()) -> tuple[str, list[ParsedCall]]:
    """Split a whole reply into its answer and its calls."""
    parser = CallParser(dialect, names)
    answer, heads, arguments = "", list[CallBegun](), dict[int, str]()
    for piece in [*parser.add(text), *parser.end()]:
        if isinstance(piece, TextPiece):
            answer += piece.text
        elif isinstance(piece, CallBegun):
            heads.append(piece)
        else:
            arguments[piece.index] = arguments.get(piece.index, "") + piece.text
    return answer, [ParsedCall(head.id, head.name, arguments.get(head.index, "")) for head in heads]
