"""This module defines as typed structs the bodies of POST /v1/chat/completions, completions, embeddings,
rerank and ratings. If a body has a field that is neither in a struct nor in request_fields.py, the server
refuses the request with an error that names the field.

An optional field with the value null has the same meaning as a missing field.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ruvmlx.engine.tools import MOST_TOOLS

from .errors import ApiError
from .tool_bodies import (
    Bias,
    EarlierCall,
    JsonSchema,
    OfferedTool,
    ResponseFormat,
    TokenId,
    ToolChoice,
)

Text = Annotated[str, Meta(min_length=1)]
Words = Annotated[str, Meta(pattern=r"\S")]
Stop = Text | Annotated[list[Text], Meta(max_length=16)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Off = Annotated[bool, Meta(extra_json_schema={"const": False}, description="Only false is supported.")]


_TEXT = {"type": "string", "pattern": "\\S"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
MOST_PROMPTS = 32
LAST_N = 64  # repeat_penalty applies to this number of last tokens by default, as in llama.cpp and ollama


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A piece of the text of a message."""

    text: str


Content = str | Annotated[list[TextPart], Meta(min_length=1)]


class SystemTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """A turn with instructions for the whole conversation."""

    content: Content


class DeveloperTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="developer"):
    """A turn with instructions. "developer" is OpenAI's newer name of the role "system"."""

    content: Content


class UserTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """A turn with a message of the user."""

    content: Content


class AssistantTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """A turn with an earlier reply of the model: its text, its tool calls, or both. reasoning_content: the
    thought of the reply; the chat template decides whether the model reads the thought again. Clients send an
    earlier reply back with the fields from `refusal` to `provider_specific_fields`, so the server accepts and
    ignores these fields; the first four fields must be null or empty."""

    content: Content | None = None
    tool_calls: Annotated[list[EarlierCall], Meta(min_length=1)] | None = None
    reasoning_content: str | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    # the client program litellm sends this field with each earlier reply
    provider_specific_fields: dict[str, Any] | None = None


class ToolTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """A turn with the result of a tool call. tool_call_id: the id of the tool call in an earlier turn."""

    content: Content
    tool_call_id: str


ChatMessage = SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn


class StreamOptions(Struct, forbid_unknown_fields=True):
    """The options of a streamed answer. include_usage: if true, the last chunk of the stream has the token
    counts (usage) and no choices."""

    include_usage: bool | None = None


class ReplyBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that the bodies of chat completions and text completions share. repeat_penalty: llama.cpp's
    and ollama's name for repetition_penalty. repeat_last_n: the number of last reply tokens to which
    repeat_penalty applies; 0: no tokens, -1: all tokens, null: 64 tokens."""

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
                ge=-(2**63),
                le=2**63 - 1,
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
    repetition_penalty: (
        Annotated[float, Meta(ge=0.1, le=2, description="A factor for the reply's own tokens; 1 is off.")]
        | None
    ) = None
    repetition_window: (
        Annotated[int, Meta(ge=0, le=2**31 - 1, description="Tokens that it counts; 0: the whole reply.")]
        | None
    ) = None
    repeat_penalty: Annotated[float, Meta(ge=0.1, le=2, description="1 is off.")] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Bias], Meta(description="By token id: what its logit gets.")] | None
    ) = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    user: Annotated[str | None, Meta(description="KV caches are not shared between users.")] = None


class Prediction(Struct, forbid_unknown_fields=True, tag_field="type", tag="content"):
    """A text that the client expects in the reply, for example the file that the model edits."""

    content: Content


class ChatBody(ReplyBody, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20, description="Needs logprobs: true.")] | None = None
    response_format: ResponseFormat | None = None
    json_schema: Annotated[
        JsonSchema | None, Meta(description="llama.cpp's name of a response_format without `strict`.")
    ] = None
    tools: Annotated[list[OfferedTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | None, Meta(description="Needs tools; auto without it.")] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Needs tools. false: at most one call.")] = (
        None
    )
    reasoning_effort: Annotated[
        Effort | None, Meta(description="none: the model answers at once; all others: it thinks first.")
    ] = None
    prediction: Annotated[
        Prediction | None, Meta(description="It only saves time: the reply is the same without it.")
    ] = None
    chat_template_kwargs: (
        Annotated[
            dict[str, Any],
            Meta(max_length=16, description="Variables for the model's chat template; at most 16,384 bytes."),
        ]
        | None
    ) = None


class CompletionBody(ReplyBody, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions. The model reads the prompt without a chat template. suffix: the text
    after the reply, for a model that has tokens for infilling."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="One text, several texts, token ids, or several lists of token ids."),
    ]
    suffix: str | None = None
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
    dimensions: Annotated[int | None, Meta(description="Only the number that the model has.")] = None


class RankedDocument(Struct, forbid_unknown_fields=True):
    """A text that the server ranks by its similarity to the query."""

    text: Words


class RerankBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/rerank. return_documents: if true, the answer repeats the ranked texts."""

    model: str
    query: Words
    documents: Annotated[
        list[Words | RankedDocument],
        Meta(min_length=1, max_length=1000, description="Each may have at most 8,192 tokens."),
    ]
    top_n: Annotated[int, Meta(ge=1, description="How many to return; null: all.")] | None = None
    return_documents: bool | None = None


class RatingBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/ratings: a rating of a reply, or a text that the user prefers to the reply."""

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


# The OpenAPI document has the following rules for bodies, because the structs cannot express these rules. The
# endpoints check the rules.
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
# the number of dimensions depends on the model, so the document has no number
_NO_NUMBER = {"anyOf": [{"type": "null"}]}
EXACT: dict[str, dict[str, Any]] = {
    "CompletionBody": {"properties": {"prompt": {"anyOf": PROMPTS}}},
    "EmbeddingBody": {"properties": {"dimensions": _NO_NUMBER}},
    "OllamaEmbedBody": {"properties": {"dimensions": _NO_NUMBER}},
    "RatingBody": {"anyOf": ONE_OF_TWO},
}


def refuse_true(value: bool | None, field: str) -> None:
    """Raise ApiError if the field `field` is true, because the server supports only false."""
    if value:
        raise ApiError(400, f"{field}: this server supports only false.", field, "unsupported_value")


def repetition_of(body: ReplyBody) -> tuple[float | None, int | None]:
    """Return the repetition penalty, and the number of last reply tokens to which the penalty applies. The
    number 0 means all tokens. A value is None if the body does not set the value. The settings or the model's
    recommended values then decide. Raise ApiError if the body has repeat_penalty together with
    repetition_penalty or repetition_window."""
    if body.repeat_penalty is None:
        return body.repetition_penalty, body.repetition_window
    for name in ("repetition_penalty", "repetition_window"):
        if getattr(body, name) is not None:
            message = f"repeat_penalty: {name} is given, too; give one of them."
            raise ApiError(400, message, "repeat_penalty", "invalid_combination")
    last = LAST_N if body.repeat_last_n is None else body.repeat_last_n
    return (1.0, 0) if last == 0 else (body.repeat_penalty, max(0, last))


def text_of(content: Content) -> str:
    """Return the text of a message. If the message has several text parts, join their texts without a
    separator."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
