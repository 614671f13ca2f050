"""This module finds tool calls (a model's calls of functions) in a reply's text, which can arrive whole or in
pieces.

    parser = CallParser(dialect, names)
    for text in stream:
        parser.add(text)      # -> [TextPiece("Let me see."), CallBegun(0, "a1B2c3D4e", "weather"), ...]
    parser.end()              # -> the last pieces, made of the text that the parser has held back

Models write tool calls in these forms (dialects):

    LLAMA      {"name": "weather", "parameters": {...}}      the whole reply, perhaps after <|python_tag|>
    MISTRAL    [TOOL_CALLS][{"name": "weather", "arguments": {...}}, ...]
    MISTRAL11  [TOOL_CALLS]weather[ARGS]{...}                perhaps with [CALL_ID]abcdefgh1 before [ARGS]
    HERMES     <tool_call>{"name": "weather", "arguments": {...}}</tool_call>         also Qwen's form

A mark is a text such as [TOOL_CALLS] that begins or ends tool calls. Small models often leave the marks out,
so with the dialects LLAMA and HERMES, a JSON object of a call at the beginning of a reply is a tool call
without marks, if it names a tool of the request. A JSON object without marks can stand in a code fence of
Markdown (```json).

Some marks are special tokens. If a request has tools, the engine writes marks that are special tokens into
the reply's text (`shown_marks`). Text that begins like a tool call but is none stays text of the answer. If
the reply ends inside a tool call, the call has the arguments up to the reply's end, which can be incomplete
JSON. The parser removes spaces beside tool calls, and parses no tool calls inside a thought.
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
_FENCE = "```"
_FENCED = re.compile(r"```(?:json|tool_call|tool_code)?[ \t]*\n\s*(?=\{)")
_FENCE_BEGUN = re.compile(r"`{1,2}|```[a-z_]{0,9}[ \t]*(\n\s*)?")
# the maximum number of characters between the mark that begins a call and the call's arguments
_LONGEST_HEAD = 256


@dataclass(frozen=True)
class TextPiece:
    """A piece of the answer's text, which is not a part of a tool call."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The beginning of a tool call. index: the call's number in the reply. id: a new random id. name: the
    function's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """The next piece of a tool call's arguments. index: the call's number in the reply. All pieces of one
    complete call, joined, are the JSON text of the arguments."""

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
    """The form in which a model writes tool calls.

    begin: the mark before the tool calls
    key: the key of the arguments in the JSON object of a call
    end: the mark after each tool call
    named: True if the function's name is before the JSON object, which is then the arguments
    bare: True if a reply can begin with the JSON object of a tool call without a mark
    between: the characters that are allowed between the JSON objects of two calls
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
    """Return {id: text} of the marks that are special tokens of this tokenizer. The engine must write these
    tokens into the reply's text, because the parser finds tool calls by the marks."""
    return {i: text for text, i in tokenizer.special_tokens.items() if text in _MARKS}


def new_call_id() -> str:
    """Return a random id of nine letters and digits, because Mistral's templates require this form."""
    return "".join(secrets.choice(_ID) for _ in range(9))


class CallParser:
    """A parser that splits a stream of a reply's text into the answer and the tool calls."""

    def __init__(self, dialect: Dialect, names: Iterable[str] = ()):
        """names: the names of the request's tools; a JSON object without a mark that has another name is
        text. If `names` is empty, each name is accepted."""
        self._dialect, self._names = dialect, frozenset(names)
        self._state: Callable[[], bool] = self._in_beginning
        self._text = ""  # text that the parser has received and not parsed yet
        # spaces at the end of the text so far; the parser drops these spaces if a tool call follows
        self._space = ""
        self._mark = ""  # the mark before a possible call; it becomes text of the answer if no call follows
        self._thought_end, self._call_end = "", dialect.end
        self._call: CallObject | None = None
        self._span: JSONSpan | None = None  # finds the end of the arguments after a function's name
        self._bare = False  # True if the current call has no mark
        self._after_call = False  # True if a call has ended and no text has followed
        self._out: list[Piece] = []
        self.calls = 0  # the number of tool calls that have begun in the reply

    def add(self, text: str) -> list[Piece]:
        """Add the next text of the reply. Return the new pieces, which later text cannot change."""
        self._text += text
        while self._text and self._state():
            pass
        return self._take_pieces()

    def end(self, is_cut: bool = False) -> list[Piece]:
        """End the reply and return the last pieces. An incomplete mark at the end, after a tool call, is
        removed. is_cut: True if a limit ended the reply; then a mark is also removed together with the
        beginning of a call that has no name yet, and so are two or more characters of a mark."""
        if is_cut and self._mark.startswith(self._dialect.begin):
            self._mark, self._text, self._call = "", "", None
        elif is_cut and len(begun := self._text.strip(SPACE)) > 1 and self._dialect.begin.startswith(begun):
            self._text = ""
        if self._call is not None and self._call.begun:
            self._out.append(ArgumentsPiece(self.calls - 1, self._call.arguments(is_cut=True)))
        marks = self._dialect.begin, self._call_end
        if self._after_call and any(mark.startswith(self._text) for mark in marks):
            self._text = ""
        unused = self._call.raw if self._call is not None and not self._call.begun else ""
        self._show(self._mark + unused + self._text)
        if not self.calls:
            self._out.append(TextPiece(self._space))
        self._text = self._space = ""
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        """Return the pieces that the parser found since the last call. Join neighbouring pieces of text, and
        leave out empty pieces."""
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
        """Add text to the answer. Hold back the spaces at the end of the text, because they are removed if a
        tool call follows."""
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

    # States of the parser: each method reads from _text, and returns False if it needs more text
    # -------------------

    def _in_beginning(self) -> bool:
        """Choose the next state by the beginning of the text: a thought, a JSON object without a mark, or
        other text."""
        begun = self._text.lstrip(SPACE)
        opening = next((tag for tag in THOUGHT_TAGS if begun.startswith(tag)), "")
        if opening:
            self._thought_end = THOUGHT_TAGS[opening]
            self._state = self._in_thought
        elif not begun or any(tag.startswith(begun) for tag in THOUGHT_TAGS):
            return False
        elif self._dialect.bare and (fence := _FENCED.match(begun)):
            self._mark, self._text = self._text[: -len(begun)] + fence[0], begun[fence.end() :]
            self._bare, self._call_end, self._state = True, _FENCE, self._in_object
        elif self._dialect.bare and _FENCE_BEGUN.fullmatch(begun) and len(begun) < _LONGEST_HEAD:
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
        self._call_end = self._dialect.end
        self._state = self._in_name if self._dialect.named else self._in_object
        return True

    def _in_name(self) -> bool:
        """Read the name in weather[ARGS]{...}, weather[CALL_ID]abcdefgh1[ARGS]{...} or weather{...}."""
        head, brace, rest = self._text.partition("{")
        if len(head) > _LONGEST_HEAD:
            return self._no_call()
        if not brace:
            return False
        if head.strip(SPACE) in ("", "["):  # older Mistral models write a list of objects after the mark
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
        """Read the JSON object of a call, or the characters between two objects."""
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
        if call.is_over:
            self._call = None
        return True

    def _in_between(self) -> bool:
        rest, end = self._text.lstrip(self._dialect.between), self._call_end
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
        """Add the mark to the answer and continue in the state for text, because no tool call follows the
        mark."""
        self._show(self._mark)
        self._mark, self._call, self._state = "", None, self._in_text
        return True


def _overlap(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that are equal to the beginning of `mark`."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)


def parse(text: str, dialect: Dialect, names: Iterable[str] = ()) -> tuple[str, list[ParsedCall]]:
    """Split a whole reply into the answer and the tool calls."""
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
