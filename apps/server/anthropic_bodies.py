"""This module defines the request bodies of Anthropic's endpoints. If a body has a field that the server does
not know, the server refuses the request, as for the bodies in bodies.py."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ruvmlx.engine.agent_headers import without_agent_headers
from ruvmlx.models.config.model import Message
from ruvmlx.models.text.thinking import join_thought

from .bodies import Off, ReplyBody, Text, refuse_true
from .chat_requests import schema_form
from .errors import ApiError
from .prompts import ReplyForm, ToolUse, function_tool
from .tool_bodies import FunctionName, JsonSchema, NamedSchema
from .turns import join_turns


class CacheMark(Struct, forbid_unknown_fields=True):
    """A mark that asks the server to cache the prompt up to the block with the mark. The mark changes
    nothing, because the server also caches prompts that have no mark."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class TextBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A piece of text of a message. The server puts an empty line between two pieces of text of the same
    message."""

    text: str
    cache_control: CacheMark | None = None
    citations: None = None


class PlainSource(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """The text of a document."""

    data: str
    media_type: Literal["text/plain"]


class BlocksSource(Struct, forbid_unknown_fields=True, tag_field="type", tag="content"):
    """The text of a document, as one text or as text blocks."""

    content: str | list[TextBlock]


class NoCitations(Struct, forbid_unknown_fields=True):
    """The field `citations` of a document. The server supports only `enabled: false`."""

    enabled: Off


class DocumentBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="document"):
    """A document of plain text. The model reads its title, its context and its text as a part of the
    message's text."""

    source: PlainSource | BlocksSource
    title: str | None = None
    context: str | None = None
    citations: NoCitations | None = None
    cache_control: CacheMark | None = None


class ThoughtBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """The thought of the model (its reasoning before the answer) in an earlier reply. The chat template
    decides whether the model reads this thought again."""

    thinking: str
    signature: str | None = None


class CallBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """A tool call of the model in an earlier reply."""

    id: Text
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheMark | None = None


class ResultBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """The result of a tool call. is_error: if true, the call failed, and the model reads "Error: " before the
    result."""

    tool_use_id: str
    content: str | list[TextBlock | DocumentBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheMark | None = None


class ClientTool(Struct, forbid_unknown_fields=True):
    """A tool that the client runs. strict: if strict is true, and the model must call a tool or the answer
    must fit a schema, a keyword of `input_schema` that the server does not support is an error."""

    name: FunctionName
    input_schema: JsonSchema
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheMark | None = None


class CallsAuto(Struct, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    """If `tool_choice` has this type, the model decides whether it calls a tool. disable_parallel_tool_use:
    if true, the model makes at most one call."""

    disable_parallel_tool_use: bool | None = None


class CallsAny(Struct, forbid_unknown_fields=True, tag_field="type", tag="any"):
    """If `tool_choice` has this type, the model must call one of the tools."""

    disable_parallel_tool_use: bool | None = None


class CallsOne(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool"):
    """If `tool_choice` has this type, the model must call the tool `name`."""

    name: str
    disable_parallel_tool_use: bool | None = None


class CallsNone(Struct, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """If `tool_choice` has this type, the model calls no tool."""


class AskedTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """A turn of the conversation with a message of the user, the results of tool calls, or both."""

    content: str | Annotated[list[TextBlock | DocumentBlock | ResultBlock], Meta(min_length=1)]


class InstructedTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """Instructions between two messages. If the chat template allows system text only at the beginning, the
    server adds the instructions to a neighbouring message, or makes them a message of the user."""

    content: str | Annotated[list[TextBlock], Meta(min_length=1)]


class AnsweredTurn(Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """A turn of the conversation with an earlier reply of the model."""

    content: str | Annotated[list[TextBlock | ThoughtBlock | CallBlock], Meta(min_length=1)]


class ThinkingOn(Struct, forbid_unknown_fields=True, tag_field="type", tag="enabled"):
    """If the field `thinking` has this type, the model thinks before its answer, if it can think.
    budget_tokens: must be less than max_tokens, which limits the thought and the answer together. The server
    does not limit the thought alone."""

    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]


class ThinkingAdaptive(Struct, forbid_unknown_fields=True, tag_field="type", tag="adaptive"):
    """If the field `thinking` has this type, the chat template decides whether the model thinks before its
    answer."""


class ThinkingOff(Struct, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    """If the field `thinking` has this type, the model answers without a thought, if its chat template offers
    this choice."""


class SchemaOutput(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """If `output_config.format` has this type, a reply without tool calls must be JSON that fits the schema.
    A keyword of the schema that the server does not support is an error."""

    schema: JsonSchema


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The options for the form of the answer. format: the JSON schema that the answer must fit."""

    format: SchemaOutput | None = None


class CountBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    model: Annotated[str, Meta(description="NAME or NAME@ADAPTER, as GET /v1/models lists them.")]
    messages: Annotated[list[AskedTurn | AnsweredTurn | InstructedTurn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    thinking: ThinkingOn | ThinkingAdaptive | ThinkingOff | None = None
    tools: list[ClientTool] | None = None
    tool_choice: CallsAuto | CallsAny | CallsOne | CallsNone | None = None
    cache_control: CacheMark | None = None
    output_config: OutputConfig | None = None
    adapter: Annotated[
        str | None, Meta(description="The adapter that writes; none: the untouched model.")
    ] = None


class MessagesBody(CountBody, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[Text], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1, description="0 is all.")] | None = None


def reply_body(body: MessagesBody) -> ReplyBody:
    """Return the options for the reply as a ReplyBody, which has the fields that the endpoints for replies
    share."""
    return ReplyBody(
        model=body.model,
        adapter=body.adapter,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )


def conversation(body: CountBody, tag: str | None) -> list[Message]:
    """Return the conversation as a list of `Message`, which is the form that the engine reads. Turns of the
    same role that follow each other become one turn, but each tool result stays a separate turn. tag: the tag
    that begins a thought; None: the model does not think before its answer."""
    system = _instructions(body.system or "")
    found = [Message("system", system)] if system else []
    # id of a tool call -> name of the tool, for the tool calls in the turns before this turn
    names: dict[str, str] = {}
    for i, turn in enumerate(body.messages):
        blocks: Sequence[Any] = (
            turn.content if not isinstance(turn.content, str) else [TextBlock(turn.content)]
        )
        if isinstance(turn, AnsweredTurn):
            calls = [block for block in blocks if isinstance(block, CallBlock)]
            names |= {block.id: block.name for block in calls}
            found.append(Message("assistant", _text(blocks, tag), tuple(_call(block) for block in calls)))
        elif isinstance(turn, InstructedTurn):
            found.append(Message("system", _instructions(turn.content)))
        else:
            _add_asked(found, blocks, f"messages[{i}]", names)
    turns = join_turns(found)
    if turns[-1].tool_calls:
        message = "messages: the last one has calls whose results are missing."
        raise ApiError(400, message, "messages", "invalid_combination")
    return turns


def _instructions(system: str | Sequence[TextBlock]) -> str:
    blocks = [TextBlock(system)] if isinstance(system, str) else system
    return "\n\n".join(filter(None, (without_agent_headers(block.text) for block in blocks)))


def _add_asked(turns: list[Message], blocks: Sequence[Any], where: str, names: Mapping[str, str]) -> None:
    """Append the content of a user's message to the turns. Each tool result becomes a separate turn. The text
    blocks of the message together become the last turn."""
    _refuse_citations(blocks, f"{where}.content")
    for i, block in enumerate(blocks):
        if isinstance(block, ResultBlock):
            if block.tool_use_id not in names:
                field = f"{where}.content[{i}].tool_use_id"
                message = f"{field}: no message before this one has a call with this id."
                raise ApiError(400, message, field, "invalid_combination")
            turns.append(_result(block, names[block.tool_use_id]))
    texts = [block for block in blocks if isinstance(block, TextBlock | DocumentBlock)]
    if texts:
        turns.append(Message("user", _text(texts, None)))


def _result(block: ResultBlock, name: str) -> Message:
    content = block.content or ""
    text = content if isinstance(content, str) else _text(content, None)
    return Message("tool", f"Error: {text}" if block.is_error else text, (), block.tool_use_id, name)


def _call(block: CallBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def tools_of_body(body: CountBody) -> ToolUse:
    """Return the tools of the request, and whether the model must call one of them."""
    choice = body.tool_choice
    if choice is not None and not body.tools:
        raise ApiError(400, "tool_choice: needs tools.", "tool_choice", "invalid_combination")
    tools = [
        function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in body.tools or ()
    ]
    parallel = not getattr(choice, "disable_parallel_tool_use", None)
    match choice:
        case CallsOne(name=name):
            return ToolUse(tools, "required", name, parallel)
        case CallsAny():
            return ToolUse(tools, "required", "", parallel)
        case CallsNone():
            return ToolUse(tools, "none")
    return ToolUse(tools, "auto", "", parallel)


def form_of(body: CountBody) -> ReplyForm | None:
    """Return the JSON schema that a reply without tool calls must fit. Return None if the reply can be any
    text."""
    if body.output_config is None or body.output_config.format is None:
        return None
    named = NamedSchema("answer", body.output_config.format.schema, strict=True)
    return schema_form(named, "output_config.format.schema")


def _text(blocks: Sequence[TextBlock | DocumentBlock | ThoughtBlock | CallBlock], tag: str | None) -> str:
    answer = "\n\n".join(_words(block) for block in blocks if isinstance(block, TextBlock | DocumentBlock))
    thought = "\n\n".join(block.thinking for block in blocks if isinstance(block, ThoughtBlock))
    return join_thought(thought, answer, tag) if thought and tag else answer


def _words(block: TextBlock | DocumentBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    source = block.source
    text = source.data if isinstance(source, PlainSource) else source.content
    whole = text if isinstance(text, str) else _text(text, None)
    return "\n\n".join(filter(None, (block.title, block.context, whole)))


def _refuse_citations(blocks: Sequence[Any], where: str) -> None:
    """Raise ApiError if the field `citations.enabled` of a document is true."""
    for i, block in enumerate(blocks):
        if isinstance(block, DocumentBlock) and block.citations is not None:
            refuse_true(block.citations.enabled, f"{where}[{i}].citations.enabled")
        elif isinstance(block, ResultBlock) and isinstance(block.content, list):
            _refuse_citations(block.content, f"{where}[{i}].content")


def wants_thought(body: CountBody, tag: str | None, ignored: list[str]) -> bool | None:
    """Return True if the model must think before its answer, False if it must not, and None if the chat
    template decides. If the body asks for a thought and the model cannot think before its answer, the field
    `thinking` changes nothing, and its name is added to `ignored`. Raise ApiError if `budget_tokens` is not
    below `max_tokens`.
    """
    match body.thinking:
        case ThinkingOn(budget_tokens=budget):
            if isinstance(body, MessagesBody) and budget >= body.max_tokens:
                message = "thinking.budget_tokens: must be below max_tokens."
                raise ApiError(400, message, "thinking.budget_tokens", "invalid_combination")
            if tag is None:
                ignored.append("thinking")
                return None
            return True
        case ThinkingOff():
            return False
    return None
