"""What POST /v1/responses answers, as structs."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from .openai_answers import ReplyId
from .responses_bodies import ReasoningOptions
from .responses_tools import FunctionChoice, ResponseTool, TextOptions

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Nothing = Annotated[list[Any], Meta(max_length=0)]


class AnswerText(Struct, tag_field="type", tag="output_text"):
    """The answer's text."""

    text: str
    annotations: Nothing = []
    logprobs: Nothing = []


class ThoughtText(Struct, tag_field="type", tag="reasoning_text"):
    """The thought's text."""

    text: str


class AnswerItem(Struct, tag_field="type", tag="message"):
    """The answer."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: Sequence[AnswerText]


class ThoughtItem(Struct, tag_field="type", tag="reasoning"):
    """The thought of a model that thinks first, whole: there is no summary of it."""

    id: str
    status: Status
    summary: Nothing
    content: Sequence[ThoughtText]


class CallItem(Struct, tag_field="type", tag="function_call"):
    """A call of a function. call_id: what `function_call_output` gives back. arguments: JSON. namespace: of a
    function of a group."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


OutputItem = ThoughtItem | AnswerItem | CallItem


class CachedTokens(Struct):
    """cached_tokens: of the input, those that were in a KV cache already."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ThoughtTokens(Struct):
    """reasoning_tokens: of the output, those of the thought, its tags included."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Tokens of a response. max_output_tokens: the longest one that there was room for; only where the
    request allowed a longer one."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ThoughtTokens
    total_tokens: int
    max_output_tokens: int | UnsetType = UNSET


class ResponseFailure(Struct):
    """Why a response failed."""

    code: str
    message: str


class WhyIncomplete(Struct):
    """max_output_tokens: it, or the context, was full."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(Struct, kw_only=True):
    """A response. id: what POST /v1/ratings takes. Fields of the request have the values in force."""

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


class ResponseCreated(Struct, tag_field="type", tag="response.created"):
    """The first event."""

    sequence_number: int
    response: ResponseAnswer


class ResponseInProgress(Struct, tag_field="type", tag="response.in_progress"):
    """The second event."""

    sequence_number: int
    response: ResponseAnswer


class ResponseCompleted(Struct, tag_field="type", tag="response.completed"):
    """The last event."""

    sequence_number: int
    response: ResponseAnswer


class ResponseIncomplete(Struct, tag_field="type", tag="response.incomplete"):
    """The last event of a response that a limit ended."""

    sequence_number: int
    response: ResponseAnswer


class ResponseFailed(Struct, tag_field="type", tag="response.failed"):
    """The last event of a response that failed."""

    sequence_number: int
    response: ResponseAnswer


class StreamError(Struct, tag_field="type", tag="error"):
    """The only event of a response whose model could not be opened."""

    code: str | None
    message: str
    param: str | None
    sequence_number: int = 0


class ItemAdded(Struct, tag_field="type", tag="response.output_item.added"):
    """An item begins."""

    sequence_number: int
    output_index: int
    item: OutputItem


class ItemDone(Struct, tag_field="type", tag="response.output_item.done"):
    """An item is complete."""

    sequence_number: int
    output_index: int
    item: OutputItem


class PartAdded(Struct, tag_field="type", tag="response.content_part.added"):
    """An item's text begins."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: ThoughtText | AnswerText


class PartDone(Struct, tag_field="type", tag="response.content_part.done"):
    """An item's text is complete."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: ThoughtText | AnswerText


class AnswerDelta(Struct, tag_field="type", tag="response.output_text.delta"):
    """More of the answer."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: Nothing = []


class AnswerDone(Struct, tag_field="type", tag="response.output_text.done"):
    """All of the answer."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: Nothing = []


class ReasoningDelta(Struct, tag_field="type", tag="response.reasoning_text.delta"):
    """More of the thought."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(Struct, tag_field="type", tag="response.reasoning_text.done"):
    """All of the thought."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(Struct, tag_field="type", tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Struct, tag_field="type", tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

    sequence_number: int
    item_id: str
    output_index: int
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
