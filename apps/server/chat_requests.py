"""This module turns a body of POST /v1/chat/completions into the types that the engine reads: the
conversation, the tools, and the form that the reply must have."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ruvmlx.engine.agent_headers import without_agent_headers
from ruvmlx.engine.grammar import Constraint
from ruvmlx.errors import UsageError
from ruvmlx.models.config.model import Message
from ruvmlx.models.text.thinking import join_thought

from .bodies import AssistantTurn, ChatBody, ChatMessage, ToolTurn, UserTurn, text_of
from .errors import ApiError, api_error
from .prompts import ReplyForm, ToolUse
from .tool_bodies import ChosenTool, EarlierCall, NamedSchema, ObjectFormat, SchemaFormat

# limits of the client's variables for the chat template: bytes of JSON, levels of nesting
MOST_TEMPLATE_BYTES, MOST_TEMPLATE_LEVELS = 16_384, 16
TEMPLATE_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
)


def messages_of(messages: Sequence[ChatMessage], tag: str | None) -> list[Message]:
    """Return the conversation as a list of `Message`, which is the form that the engine reads. tag: the tag
    that begins a thought; None: the model does not think before its answer. Raise ApiError if a tool result
    does not belong to an earlier tool call, or if an assistant's message has neither content nor tool
    calls."""
    names: dict[str, str] = {}  # id of a tool call -> name of its function
    return [_message(turn, f"messages[{i}]", names, tag) for i, turn in enumerate(messages)]


def _message(turn: ChatMessage, where: str, names: dict[str, str], tag: str | None) -> Message:
    match turn:
        case AssistantTurn():
            if turn.content is None and turn.tool_calls is None:
                field = f"{where}.content"
                message = f"{field}: an assistant's message needs content or tool_calls."
                raise ApiError(400, message, field, "invalid_combination")
            calls = [_call(made) for made in turn.tool_calls or ()]
            names |= {made.id: made.function.name for made in turn.tool_calls or ()}
            text, thought = text_of(turn.content or ""), turn.reasoning_content
            return Message(
                "assistant", join_thought(thought, text, tag) if thought and tag else text, tuple(calls)
            )
        case ToolTurn():
            if turn.tool_call_id not in names:
                field = f"{where}.tool_call_id"
                message = f"{field}: no message before this one has a call with this id."
                raise ApiError(400, message, field, "invalid_combination")
            return Message("tool", text_of(turn.content), (), turn.tool_call_id, names[turn.tool_call_id])
        case UserTurn():
            return Message("user", text_of(turn.content))
    return Message("system", without_agent_headers(text_of(turn.content)))


def _call(made: EarlierCall) -> dict[str, Any]:
    return earlier_call(made.id, made.function.name, made.function.arguments)


def earlier_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return an earlier tool call in the form that chat templates read. If the arguments are not a JSON
    object, they stay the text that the client sent. A model can write arguments that are no JSON object, and
    clients send them back as text, so the model reads the same text again."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = None
    function = {"name": name, "arguments": found if isinstance(found, dict) else arguments}
    return {"id": id, "type": "function", "function": function}


def tools_of(body: ChatBody) -> ToolUse:
    """Return the tools of the request, and whether the model must call one of them."""
    for field in ("tool_choice", "parallel_tool_calls"):
        if getattr(body, field) is not None and not body.tools:
            raise ApiError(400, f"{field}: needs tools.", field, "invalid_combination")
    tools = [msgspec.to_builtins(tool) for tool in body.tools or ()]
    parallel = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, ChosenTool):
        return ToolUse(tools, "required", body.tool_choice.function.name, parallel)
    return ToolUse(tools, body.tool_choice or "auto", "", parallel)


def thought_of(effort: str | None, tag: str | None, field: str, ignored: list[str]) -> bool | None:
    """Return True if the model must think before its answer, False if it must not, and None if the chat
    template decides. If the effort asks for a thought and the model cannot think before its answer, the
    effort changes nothing, and the name `field` is added to `ignored`."""
    if effort is None or effort == "none":
        return None if effort is None else False
    if tag is None:
        ignored.append(field)
        return None
    return True


def thinking_of(body: ChatBody, tag: str | None, ignored: list[str]) -> bool | None:
    """Return True if the model must think before its answer, False if it must not, and None if the chat
    template decides. The request makes this choice in the field `reasoning_effort`, or in the chat template's
    variable `enable_thinking`."""
    thinking = thought_of(body.reasoning_effort, tag, "reasoning_effort", ignored)
    switch = (body.chat_template_kwargs or {}).get("enable_thinking")
    if switch is None:
        return thinking
    where = "chat_template_kwargs.enable_thinking"
    if not isinstance(switch, bool):
        raise ApiError(400, f"{where}: true or false was expected.", where)
    if thinking not in (None, switch):
        message = f"{where}: reasoning_effort says something else; give one of them."
        raise ApiError(400, message, where, "invalid_combination")
    return switch


def template_values(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the client's variables for the chat template. Raise ApiError if the variables are too large or
    too deeply nested, or if the server itself sets one of these variables."""
    values = dict(given or {})
    values.pop("enable_thinking", None)  # `thinking_of` handles this variable
    taken = next((name for name in values if name in TEMPLATE_NAMES), None)
    if taken is not None:
        where = f"chat_template_kwargs.{taken}"
        raise ApiError(400, f"{where}: the server gives the template this itself.", where)
    if not _is_flat(values, MOST_TEMPLATE_LEVELS) or len(msgspec.json.encode(values)) > MOST_TEMPLATE_BYTES:
        limits = f"at most {MOST_TEMPLATE_BYTES} bytes, {MOST_TEMPLATE_LEVELS} levels deep, were expected"
        raise ApiError(400, f"chat_template_kwargs: {limits}.", "chat_template_kwargs")
    return values


def _is_flat(value: Any, levels: int) -> bool:
    """Return True if lists and objects in the value are nested at most `levels` levels deep."""
    if not isinstance(value, dict | list):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(part, levels - 1) for part in parts)


def form_of(body: ChatBody) -> ReplyForm | None:
    """Return the JSON schema that the reply must fit. Return None if the reply can be any text."""
    if body.json_schema is not None:
        if body.response_format is not None:
            message = "json_schema: response_format is given, too; give one of them."
            raise ApiError(400, message, "json_schema", "invalid_combination")
        return schema_form(NamedSchema("answer", body.json_schema), "json_schema")
    match body.response_format:
        case ObjectFormat(schema=dict() as schema):
            return schema_form(NamedSchema("answer", schema), "response_format.schema")
        case ObjectFormat():
            return any_object("response_format")
        case SchemaFormat(json_schema=named):
            return schema_form(named, "response_format.json_schema.schema")
    return None


def any_object(where: str) -> ReplyForm:
    """Return a form that any JSON object fits. where: the request's field that asks for this form."""
    return ReplyForm(Constraint.json_object(), where)


def schema_form(named: NamedSchema, where: str) -> ReplyForm:
    """Return the form for a JSON schema. If `strict` is true, raise ApiError for a keyword of the schema that
    the server does not support. If `strict` is false, a keyword that the server does not support does not
    restrict the reply."""
    try:
        return ReplyForm(Constraint.json_schema(named.schema, loose=not named.strict), where)
    except (UsageError, RecursionError) as error:
        reason = error if isinstance(error, UsageError) else UsageError("it is nested too deeply.")
        raise api_error(UsageError(f"{where}: {reason}"), where) from None
