"""Request bodies: typed, and strict. A field that is not listed here is refused by its name.

A field that is null counts as not given.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ruvmlx.engine.tools import MOST_TOOLS

from .errors import ApiError
from .tool_bodies import Bias, EarlierCall, OfferedTool, ResponseFormat, TokenId, ToolChoice

B = TypeVar("B")

Text = Annotated[str, Meta(min_length=1)]
Words = Annotated[str, Meta(pattern=r"\S")]
Stop = Text | Annotated[list[Text], Meta(max_length=16)]
Off = Annotated[bool, Meta(extra_json_schema={"const": False}, description="Only false is supported.")]


_TEXT = {"type": "string", "pattern": "\\S"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
MOST_PROMPTS = 32


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A piece of a message's text."""

    text: str


Content = str | Annotated[list[TextPart], Meta(min_length=1)]


class SystemTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """Instructions for the whole conversation."""

    content: Content


class DeveloperTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="developer"):
    """The newer name of a system message."""

    content: Content


class UserTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """A message of the user."""

    content: Content


class AssistantTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """An earlier reply of the model: its text, its calls, or both. reasoning_content: its thought; the
    model's template decides whether it is read again. All others: what clients send back of a reply that they
    have just read; accepted, they change nothing.
    """

    content: Content | None = None
    tool_calls: Annotated[list[EarlierCall], Meta(min_length=1)] | None = None
    reasoning_content: str | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    provider_specific_fields: dict[str, Any] | None = None  # of litellm


class ToolTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """What a call returned. tool_call_id: of a call in an earlier message."""

    content: Content
    tool_call_id: str


ChatMessage = SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_usage: end the stream with a chunk that has the usage and no choices."""

    include_usage: bool | None = None


class ReplyBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and text completions have in common."""

    model: Annotated[str, Meta(description="NAME or NAME@ADAPTER, as GET /v1/models lists them.")]
    adapter: Annotated[
        str | None, Meta(description="The adapter that writes; none: the untouched model.")
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=16, description="Replies to write.")] | None = None
    stop: Stop | None = None
    seed: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=2**53,
                description="The same seed, the same reply; the reply with index i draws with seed + i.",
            ),
        ]
        | None
    ) = None
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1, description="0 is all.")] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Bias], Meta(description="By token id: what its logit gets.")] | None
    ) = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    user: Annotated[str | None, Meta(description="KV caches are not shared between users.")] = None


class ChatBody(ReplyBody, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20, description="Needs logprobs: true.")] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[OfferedTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | None, Meta(description="Needs tools; auto without it.")] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Needs tools. false: at most one call.")] = (
        None
    )
    store: Off | None = None


class CompletionBody(ReplyBody, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions. The prompt goes to the model without its chat template."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="One text, several texts, token ids, or several lists of token ids."),
    ]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: Off | None = None


class EmbeddingBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings."""

    model: str
    input: Annotated[
        Words | Annotated[list[Words], Meta(min_length=1, max_length=2048)],
        Meta(description="One text or several. A text may have at most 8,192 tokens."),
    ]
    encoding_format: Literal["float", "base64"] | None = None


class RatingBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/ratings: a rating, or the text that the reply should have been."""

    id: Annotated[str, Meta(description="The completion's id; of n completions, the choice's reply_id.")]
    rating: (
        Annotated[
            Literal["up", "down", "1", "2", "3", "4", "5", 1, 2, 3, 4, 5],
            Meta(description="up, down, or 1 to 5."),
        ]
        | None
    ) = None
    preferred: Annotated[str | None, Meta(description="The text that the reply should have been.")] = None
    note: Annotated[str | None, Meta(description="Why; kept with the rating.")] = None


# What the structs cannot say, for the OpenAPI document; the endpoints check it.
SEVERAL = {"type": "array", "minItems": 1, "maxItems": MOST_PROMPTS}
PROMPTS = [_TEXT, _IDS, {**SEVERAL, "items": _TEXT}, {**SEVERAL, "items": _IDS}]
ONE_OF_TWO = [
    {
        "required": ["rating"],
        "properties": {"rating": {"not": {"type": "null"}}, "preferred": {"type": "null"}},
    },
    {
        "required": ["preferred"],
        "properties": {"rating": {"type": "null"}, "preferred": _TEXT, "note": {"type": "null"}},
    },
]
EXACT: dict[str, dict[str, Any]] = {
    "CompletionBody": {"properties": {"prompt": {"anyOf": PROMPTS}}},
    "RatingBody": {"anyOf": ONE_OF_TWO},
}

_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_FLOAT = "got `float`"
_TOOL_TYPE = re.compile(r"tools\[\d+\](\.tools\[\d+\])?\.type")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`", re.DOTALL)


def decode(data: bytes, kind: type[B]) -> B:
    """A body as its type; ApiError, 400, that names the first field which is wrong."""
    decoder = _DECODERS.setdefault(kind, msgspec.json.Decoder(kind))
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        if _FLOAT in str(error):
            return _with_whole_floats(data, kind)
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {_short(str(error))}.", code="invalid_json") from None


def _with_whole_floats(data: bytes, kind: type[B]) -> B:
    """In JSON, 2.0 is a whole number, too."""
    try:
        return msgspec.convert(_whole(msgspec.json.decode(data)), kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {name: _whole(item) for name, item in value.items()} if isinstance(value, dict) else value


def _refusal(message: str) -> ApiError:
    what, _, place = message.partition(" - at `")
    inside = place.rpartition(" in `")[2]  # of a wrong key: "key` in `$.logit_bias`"
    path = inside.removesuffix("`").removeprefix("$").removeprefix(".")
    if found := _UNKNOWN.search(what):
        param = _join(path, found["field"])
        return ApiError(
            400, f"{param}: this server does not support this field.", param, "unsupported_parameter"
        )
    if found := _MISSING.search(what):
        param = _join(path, found["field"])
        return ApiError(400, f"{param}: this field is required.", param, "missing_required_parameter")
    reason = _short(what[:1].lower() + what[1:])
    if _TOOL_TYPE.fullmatch(path):
        reason += "; only functions that the client runs are supported, so leave this tool out"
    return ApiError(400, f"{path or 'the body'}: {reason}.", path or None, "invalid_value")


def _join(path: str, field: str) -> str:
    return _short(f"{path}.{field}" if path else field)


def _short(text: str) -> str:
    """Printable and short: names in a body may be anything."""
    text = "".join(c if c.isprintable() else "?" for c in text.rstrip("."))
    return text if len(text) <= 200 else f"{text[:200]}..."


def refuse_true(value: bool | None, field: str) -> None:
    """ApiError for a switch that can only be off."""
    if value:
        raise ApiError(400, f"{field}: this server supports only false.", field, "unsupported_value")


def text_of(content: Content) -> str:
    """A message's text; parts are joined."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
