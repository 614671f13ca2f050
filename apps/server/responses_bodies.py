"""This module defines the body of POST /v1/responses. If a body has a field that the server does not know,
the server refuses the request, as for the bodies in bodies.py."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ruvmlx.engine.agent_headers import without_agent_headers
from ruvmlx.engine.tools import MOST_TOOLS
from ruvmlx.models.config.model import Message
from ruvmlx.models.text.thinking import join_thought

from .bodies import Effort, Off, ReplyBody, refuse_true
from .chat_requests import earlier_call, thought_of
from .errors import ApiError
from .responses_tools import FunctionChoice, ResponseTool, TextOptions, full_name
from .tool_bodies import FunctionName
from .turns import join_turns


class InputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """A piece of the text of a message."""

    text: str


class OutputText(Struct, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """A piece of the text of an earlier reply of the model."""

    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Meta(max_length=0)] | None = None


class ReasoningText(Struct, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    """The model's thought in an earlier reply."""

    text: str


Parts = Annotated[list[InputText | OutputText | ReasoningText], Meta(min_length=1)]


ItemType = Literal["message", "reasoning", "function_call", "function_call_output", "item_reference"]


class InputItem(Struct, forbid_unknown_fields=True):
    """An item of the conversation. An item has one of five types: a message (role, content), the thought of
    an earlier reply (content), an earlier tool call (call_id, name, namespace, arguments), the result of a
    tool call (call_id, output), or the name of an output item of a stored response (id). The chat template
    decides whether the model reads a thought again. Only the name of a stored item uses the field `id`. In
    the other four types, the fields `id`, `status` and `phase` do not change the reply."""

    type: ItemType | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: FunctionName | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Annotated[list[Any], Meta(max_length=0)] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def kind(self) -> str:
        """The item's type; an item without a type is a message."""
        return self.type or "message"


# These are the fields that an item of each type must have, and the fields that the item can have besides the
# fields of `_ANY`.
_NEEDED = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "item_reference": ("id",),
}
_ALLOWED = {"message": ("phase",), "reasoning": ("content", "summary"), "function_call": ("namespace",)}
_ANY = ("type", "id", "status")


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """The options for the thought. effort: with "none", the model answers without a thought; with another
    value, the model thinks before its answer, if the model can think."""

    effort: Effort | None = None


class ResponsesBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses."""

    model: Annotated[str, Meta(description="NAME or NAME@ADAPTER, as GET /v1/models lists them.")]
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    adapter: Annotated[
        str | None, Meta(description="The adapter that writes; none: the untouched model.")
    ] = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Comes back in the answer.")] = None
    user: Annotated[str | None, Meta(description="KV caches are not shared between users.")] = None
    store: Annotated[bool | None, Meta(description="false: the response is not kept for later requests.")] = (
        None
    )
    background: Off | None = None
    previous_response_id: Annotated[
        str | None, Meta(description="A stored response that this one goes on from.")
    ] = None
    truncation: Literal["disabled"] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: at most one call.")] = None


def reply_body(body: ResponsesBody) -> ReplyBody:
    """Return the options for the reply as a ReplyBody, which has the fields that the endpoints for replies
    share."""
    refuse_true(body.background, "background")
    return ReplyBody(
        model=body.model,
        adapter=body.adapter,
        temperature=body.temperature,
        top_p=body.top_p,
        user=body.user,
    )


def items_of(body: ResponsesBody) -> list[InputItem]:
    """Return the input of the body as a list of items. If the input is a plain text, it becomes one message
    of the user."""
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def conversation(body: ResponsesBody, tag: str | None, before: Sequence[InputItem] = ()) -> list[Message]:
    """Return the conversation as a list of `Message`, which is the form that the engine reads. Turns of the
    same role that follow each other become one turn, but each tool result stays a separate turn. tag: the tag
    that begins a thought; None: the model does not think before its answer. before: the items of the earlier
    responses that this response continues."""
    instructions = without_agent_headers(body.instructions or "")
    found = [Message("system", instructions)] if instructions else []
    names: dict[str, str] = {}  # id of a tool call -> name of its function
    thought = ""
    for at, item in enumerate([*before, *items_of(body)], -len(before)):
        check_item(item, f"input[{at}]")
        if item.kind == "reasoning":
            thought = _joined_parts(item.content)
        elif item.kind == "function_call_output":
            found.append(_result(item, f"input[{at}]", names))
            thought = ""
        else:
            _add_said(found, item, thought if tag else "", tag or "", names)
            thought = ""
    return join_turns(found)


def _add_said(turns: list[Message], item: InputItem, thought: str, tag: str, names: dict[str, str]) -> None:
    """Append a message or a tool call to the turns. thought: the model's thought before the message or the
    call."""
    role = "system" if item.role in ("system", "developer") else item.role or "assistant"
    content, calls = _joined_parts(item.content), []
    if item.kind == "function_call":
        call_id, name = str(item.call_id), full_name(item.namespace, str(item.name))
        names[call_id] = name
        calls = [earlier_call(call_id, name, str(item.arguments))]
    if role == "assistant" and thought:
        content = join_thought(thought, content, tag)
    turns.append(Message(role, content, tuple(calls)))


def _result(item: InputItem, place: str, names: dict[str, str]) -> Message:
    if item.call_id not in names:
        field = f"{place}.call_id"
        message = f"{field}: no item before this one is a call with this id."
        raise ApiError(400, message, field, "invalid_combination")
    return Message("tool", _joined_parts(item.output), (), item.call_id, names[item.call_id])


def check_item(item: InputItem, place: str) -> None:
    """Raise ApiError if the item has a field that its type cannot have, or if a field is missing that its
    type needs."""
    needed = _NEEDED[item.kind]
    for name in item.__struct_fields__:
        given = getattr(item, name) is not None
        if name in needed and not given:
            message = f"{place}.{name}: an item of type {item.kind} needs this field."
            raise ApiError(400, message, f"{place}.{name}", "invalid_combination")
        if given and name not in (*needed, *_ALLOWED.get(item.kind, ()), *_ANY):
            message = f"{place}.{name}: an item of type {item.kind} does not have this field."
            raise ApiError(400, message, f"{place}.{name}", "invalid_combination")


def _joined_parts(content: str | Sequence[InputText | OutputText | ReasoningText] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def wants_thought(body: ResponsesBody, tag: str | None, ignored: list[str]) -> bool | None:
    """Return the result of `thought_of` for the field `reasoning.effort`: whether the model must think before
    its answer."""
    return thought_of(body.reasoning.effort if body.reasoning else None, tag, "reasoning.effort", ignored)
