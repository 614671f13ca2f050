"""This module handles tools in a chat: the tools that a reply can call, the tool calls in the reply's text,
and the form in which the store keeps the tool calls.

If a reply calls tools, its message has the text without the calls. The `calls` of the message are JSON:

    [{"id": "a1B2c3D4e", "name": "forecast", "arguments": {"city": "Rome"}}]

The result of a call is a message with the role "tool". The `calls` of this message hold the one call that the
result answers.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..engine import Chunk, GenerationRequest
from ..engine.tools import Prepared, prepare, tool_form
from ..models.config.model import Message, Model, Tokenizer, Tools
from ..models.text.tool_calls import CallParser, ParsedCall, TextPiece, parse

RESULT_SHARE = 4  # the result of a tool can take 1 / RESULT_SHARE of the context
MOST_CHARACTERS = 16  # about the maximum number of characters of a token


@dataclass(frozen=True)
class ToolOffer:
    """The tools that a reply can call. tools: the definitions of the tools, in the form that the engine
    takes. function: the function that the reply must call; "": the reply can call any tool, or none. is_over:
    True if the reply can no longer call tools, although the prompt still has the tools' definitions."""

    tools: Tools = ()
    function: str = ""
    is_over: bool = False


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool call. text: the text that the model reads."""

    call: ParsedCall
    text: str


NO_TOOLS = ToolOffer()


def tool_prompt(model: Model, messages: Sequence[Message], offer: ToolOffer) -> Prepared | None:
    """Return the conversation with the tools in the form that the model's chat template expects. Return None
    if the conversation has neither tools nor tool calls."""
    if not offer.tools and not any(message.tool_calls or message.role == "tool" for message in messages):
        return None
    return prepare(model, messages, offer.tools, "none" if offer.is_over else "auto", offer.function)


def offered_text(offer: ToolOffer) -> str:
    """Return approximately the text that the tools add to a prompt."""
    return json.dumps(list(offer.tools), ensure_ascii=False) if offer.tools else ""


def split_calls(tokenizer: Tokenizer, request: GenerationRequest, text: str) -> tuple[str, list[ParsedCall]]:
    """Return the reply without its calls, and the calls. If the arguments of a call are not a JSON object,
    the whole reply is text."""
    if not request.shows_calls:
        return text, []
    answer, calls = parse(text, tool_form(tokenizer).dialect, _names(request))
    if not calls or not all(map(_has_object, calls)):
        return text, []
    return answer, [replace(call, id=_id_of(request, place)) for place, call in enumerate(calls)]


def _id_of(request: GenerationRequest, place: int) -> str:
    """Return the id of a call in a reply. The id is the same at each parse of the reply."""
    return hashlib.sha256(f"{request.request_id} {place}".encode()).hexdigest()[:9]


def _names(request: GenerationRequest) -> list[str]:
    return [str(tool["function"]["name"]) for tool in request.tools]


def _has_object(call: ParsedCall) -> bool:
    try:
        found = json.loads(call.arguments)
        json.dumps(found, allow_nan=False)  # raises ValueError for NaN and 1e999, which no JSON text can have
        return isinstance(found, dict)
    except (ValueError, RecursionError):
        return False


def without_calls(
    tokenizer: Tokenizer, request: GenerationRequest, chunks: Iterable[Chunk]
) -> Iterator[Chunk]:
    """Yield the chunks of a reply without the text of its tool calls. The response in the last chunk has the
    calls."""
    if not request.shows_calls:
        yield from chunks
        return
    parser = CallParser(tool_form(tokenizer).dialect, _names(request))
    for chunk in chunks:
        pieces = parser.add(chunk.text) + (parser.end() if chunk.response else [])
        text, response = (
            "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)),
            chunk.response,
        )
        if response is not None:
            answer, calls = split_calls(tokenizer, request, response.text)
            response = replace(response, text=answer, calls=tuple(calls))
        yield replace(chunk, text=text, response=response)


def calls_to_json(calls: Sequence[ParsedCall]) -> str:
    """Return the calls as JSON for the store. Raise ValueError for a number that JSON does not have."""
    rows = [{"id": c.id, "name": c.name, "arguments": json.loads(c.arguments)} for c in calls]
    return json.dumps(rows, allow_nan=False) if rows else ""


def calls_of_json(text: str) -> tuple[ParsedCall, ...]:
    """Return the calls of a stored message."""
    rows = json.loads(text) if text else []
    return tuple(ParsedCall(row["id"], row["name"], _as_json(row["arguments"])) for row in rows)


def _as_json(arguments: object) -> str:
    """Return the arguments as JSON. The function removes lone surrogates from the arguments, because no
    tokenizer accepts them."""
    return json.dumps(arguments, ensure_ascii=False).encode("utf-8", "ignore").decode()


def readable_result(text: str, context: int, count_tokens: Callable[[str], int]) -> str:
    """Return the result of a tool. If the result would take too much of the context, return one line that
    tells the model that the result is too long."""
    room = context // RESULT_SHARE
    is_huge = len(text) > MOST_CHARACTERS * room  # a count of the tokens of a huge text would take seconds
    if not is_huge and count_tokens(text) <= room:
        return text
    return f"(The result is too long: {len(text):,} characters. At most {room:,} tokens are read.)"
