"""Tools in a chat: what a reply may call, the calls in its text, and how both are stored.

The message of a reply that calls tools has the text without the calls; its `calls` are JSON:

    [{"id": "a1B2c3D4e", "name": "forecast", "arguments": {"city": "Rome"}}]

The result of a call is a message with the role "tool", whose `calls` have that one call.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..engine import Chunk, GenerationRequest
from ..engine.tools import Prepared, prepare, tool_form
from ..models.config.model import Message, Model, Tokenizer, Tools
from ..models.text.tool_calls import CallParser, ParsedCall, TextPiece, parse

RESULT_SHARE = 4  # a result may take 1 / RESULT_SHARE of the context
MOST_CHARACTERS = 16  # of a token, about


@dataclass(frozen=True)
class ToolOffer:
    """What a reply may call. tools: as the engine takes them. function: the one that the reply must call; "":
    it may call any, or none. is_over: it may call none any more, but the prompt still has the tools."""

    tools: Tools = ()
    function: str = ""
    is_over: bool = False


@dataclass(frozen=True)
class ToolResult:
    """text: what the model reads."""

    call: ParsedCall
    text: str


NO_TOOLS = ToolOffer()


def tool_prompt(model: Model, messages: Sequence[Message], offer: ToolOffer) -> Prepared | None:
    """The conversation in the form in which the model takes tools; None if it has none."""
    if not offer.tools and not any(message.tool_calls or message.role == "tool" for message in messages):
        return None
    return prepare(model, messages, offer.tools, "none" if offer.is_over else "auto", offer.function)


def offered_text(offer: ToolOffer) -> str:
    """About what the tools add to a prompt."""
    return json.dumps(list(offer.tools), ensure_ascii=False) if offer.tools else ""


def split_calls(tokenizer: Tokenizer, request: GenerationRequest, text: str) -> tuple[str, list[ParsedCall]]:
    """(the reply without its calls, the calls). A reply with a call whose arguments are no object of JSON is
    text."""
    if not request.shows_calls:
        return text, []
    answer, calls = parse(text, tool_form(tokenizer).dialect, _names(request))
    if not calls or not all(map(_has_object, calls)):
        return text, []
    return answer, [replace(call, id=_id_of(request, place)) for place, call in enumerate(calls)]


def _id_of(request: GenerationRequest, place: int) -> str:
    """Return the id of a call in a reply. The reply may be parsed more than once; the id stays the same."""
    return hashlib.sha256(f"{request.request_id} {place}".encode()).hexdigest()[:9]


def _names(request: GenerationRequest) -> list[str]:
    return [str(tool["function"]["name"]) for tool in request.tools]


def _has_object(call: ParsedCall) -> bool:
    try:
        return isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        return False


def without_calls(
    tokenizer: Tokenizer, request: GenerationRequest, chunks: Iterable[Chunk]
) -> Iterator[Chunk]:
    """The chunks of a reply without the text of its calls; the response has the calls."""
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
    rows = [{"id": c.id, "name": c.name, "arguments": json.loads(c.arguments)} for c in calls]
    return json.dumps(rows) if rows else ""


def calls_of_json(text: str) -> tuple[ParsedCall, ...]:
    """The calls of a stored message."""
    rows = json.loads(text) if text else []
    return tuple(ParsedCall(row["id"], row["name"], _as_json(row["arguments"])) for row in rows)


def _as_json(arguments: object) -> str:
    """JSON without lone surrogates, which no tokenizer takes."""
    return json.dumps(arguments, ensure_ascii=False).encode("utf-8", "ignore").decode()


def readable_result(text: str, context: int, count_tokens: Callable[[str], int]) -> str:
    """The result, or one line in place of one that would take too much of the context."""
    room = context // RESULT_SHARE
    is_huge = len(text) > MOST_CHARACTERS * room  # to count its tokens would take seconds
    if not is_huge and count_tokens(text) <= room:
        return text
    return f"(The result is too long: {len(text):,} characters. At most {room:,} tokens are read.)"
