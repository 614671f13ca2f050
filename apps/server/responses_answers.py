"""This module defines the answers of POST /v1/responses as structs."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from .openai_answers import ReplyId
from .responses_bodies import ReasoningOptions
from .responses_tools import FunctionChoice, ResponseTool, TextOptions

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Nothing = Annotated[list[Any], Meta(max_length=0)]


class AnswerText(Struct, tag_field="type", tag="output_text"):
    """A part of an output item, with the text of the answer."""

    text: str
    annotations: Nothing = []
    logprobs: Nothing = []


class ThoughtText(Struct, tag_field="type", tag="reasoning_text"):
    """A part of an output item, with the text of the thought."""

    text: str


class AnswerItem(Struct, tag_field="type", tag="message"):
    """An output item with the answer of the model."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: Sequence[AnswerText]


class ThoughtItem(Struct, tag_field="type", tag="reasoning"):
    """An output item with the whole thought of a model that thinks before its answer. summary: always
    empty."""

    id: str
    status: Status
    summary: Nothing
    content: Sequence[ThoughtText]


class CallItem(Struct, tag_field="type", tag="function_call"):
    """An output item with a tool call. call_id: the id that the client repeats in its `function_call_output`.
    arguments: the arguments as JSON text. namespace: the name of the function's group, if the function
    belongs to a group."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


OutputItem = ThoughtItem | AnswerItem | CallItem


class CachedTokens(Struct):
    """Details about the input tokens. cached_tokens: the number of input tokens that were in a KV cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ThoughtTokens(Struct):
    """Details about the output tokens. reasoning_tokens: the number of output tokens of the thought, with its
    tags."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """The numbers of tokens of a response. max_output_tokens: the longest response that the context had room
    for; this field is present only if the request allowed a longer response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ThoughtTokens
    total_tokens: int
    max_output_tokens: int | UnsetType = UNSET


class ResponseFailure(Struct):
    """The reason why a response failed."""

    code: str
    message: str


class WhyIncomplete(Struct):
    """The reason why a response is incomplete. reason: the response reached the maximum number of its tokens
    (max_output_tokens, the server's own maximum, or the end of the context), or it only repeated itself."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(Struct, kw_only=True):
    """A response. id: the id that POST /v1/ratings takes. A field with the name of a request field has the
    request's value or the default; temperature and top_p are the values that the server used."""

    id: ReplyId
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: Sequence[OutputItem] = ()
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: WhyIncomplete | None = None
    instructions: str | None
    metadata: Mapping[str, str]
    max_output_tokens: int | None
    temperature: float
    top_p: float
    reasoning: ReasoningOptions
    text: TextOptions
    tools: Sequence[ResponseTool]
    tool_choice: FunctionChoice
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None


class InputTokens(Struct, kw_only=True):
    """The answer of input_tokens. input_tokens: the number of prompt tokens, with the tokens of the chat
    template and of the earlier responses."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


# The fields that several events have. Only the events themselves have a tag.


class _WholeEvent(Struct):
    sequence_number: int
    response: ResponseAnswer


class _ItemEvent(Struct):
    sequence_number: int
    output_index: int
    item: OutputItem


class _CallEvent(Struct):
    sequence_number: int
    item_id: str
    output_index: int


class _TextEvent(Struct):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int


class ResponseCreated(_WholeEvent, tag_field="type", tag="response.created"):
    """The first event of a response."""


class ResponseInProgress(_WholeEvent, tag_field="type", tag="response.in_progress"):
    """The second event of a response."""


class ResponseCompleted(_WholeEvent, tag_field="type", tag="response.completed"):
    """The last event of a complete response."""


class ResponseIncomplete(_WholeEvent, tag_field="type", tag="response.incomplete"):
    """The last event of a response that reached a limit."""


class ResponseFailed(_WholeEvent, tag_field="type", tag="response.failed"):
    """The last event of a response that failed."""


class StreamError(Struct, tag_field="type", tag="error"):
    """The last event of a stream that failed, if the response's model was not open when the request came."""

    code: str | None
    message: str
    param: str | None
    sequence_number: int = 0


class ItemAdded(_ItemEvent, tag_field="type", tag="response.output_item.added"):
    """The event at the beginning of an output item."""


class ItemDone(_ItemEvent, tag_field="type", tag="response.output_item.done"):
    """The event at the end of an output item."""


class PartAdded(_TextEvent, tag_field="type", tag="response.content_part.added"):
    """The event at the beginning of the text of an output item."""

    part: ThoughtText | AnswerText


class PartDone(_TextEvent, tag_field="type", tag="response.content_part.done"):
    """The event at the end of the text of an output item."""

    part: ThoughtText | AnswerText


class AnswerDelta(_TextEvent, tag_field="type", tag="response.output_text.delta"):
    """The event with the next piece of the answer's text."""

    delta: str
    logprobs: Nothing = []


class AnswerDone(_TextEvent, tag_field="type", tag="response.output_text.done"):
    """The event with the whole text of the answer."""

    text: str
    logprobs: Nothing = []


class ReasoningDelta(_TextEvent, tag_field="type", tag="response.reasoning_text.delta"):
    """The event with the next piece of the thought's text."""

    delta: str


class ReasoningDone(_TextEvent, tag_field="type", tag="response.reasoning_text.done"):
    """The event with the whole text of the thought."""

    text: str


class ArgumentsDelta(_CallEvent, tag_field="type", tag="response.function_call_arguments.delta"):
    """The event with the next piece of a tool call's arguments."""

    delta: str


class ArgumentsDone(_CallEvent, tag_field="type", tag="response.function_call_arguments.done"):
    """The event with the whole arguments of a tool call."""

    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | StreamError
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | AnswerDelta
    | AnswerDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
