"""This module turns a conversation, its tools and the required form of the reply into fields of a
GenerationRequest. The endpoints in the forms of OpenAI, Anthropic and ollama use this module."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ruvmlx.engine.constraint import matcher_for
from ruvmlx.engine.grammar import Constraint
from ruvmlx.engine.tools import Prepared, prepare
from ruvmlx.errors import UsageError
from ruvmlx.models.config.model import Message, Model, Tools
from ruvmlx.models.text.thinking import split

from .endpoint import Call
from .errors import ApiError, api_error, stopping_error
from .splitting import Calls, NewCalls


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and the rules for their calls, in the form that `ruvmlx.engine.tools.prepare`
    takes.

    function: the name of the function that the reply must call; "": the model chooses. parallel: True if a
    reply can have several tool calls. tools_field, choice_field: the names of the request's fields for the
    tools and for the choice of a tool, for error messages.
    """

    tools: Tools = ()
    choice: str = "auto"
    function: str = ""
    parallel: bool = True
    tools_field: str = "tools"
    choice_field: str = "tool_choice"


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """Return a tool in the form that the engine takes, without the fields that are None."""
    facts = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {
        "type": "function",
        "function": {key: value for key, value in facts.items() if value is not None},
    }


@dataclass(frozen=True)
class ReplyForm:
    """The form of a reply: the JSON schema that a reply without tool calls must fit. where: the name of the
    request's field that has the schema, for error messages."""

    constraint: Constraint
    where: str


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a conversation. fields: fields of a GenerationRequest. new_calls: a function that makes
    the parser of the reply's tool calls."""

    fields: dict[str, Any] = field(default_factory=dict)
    new_calls: NewCalls = None

    def fields_with(self, thinking: bool | None, thinking_field: str) -> dict[str, Any]:
        """Return the fields, with the field `thinking`: True if the model must think before its answer, False
        if it must not, None if the chat template decides. thinking_field: the name of the request's field for
        this choice. Raise ApiError, 400, if the model must think but the client has begun the reply without a
        thought."""
        opening = self.fields.get("opening", "")
        if opening and not split(opening).thought:
            if thinking:
                message = f"{thinking_field}: a reply that was begun without a thought cannot think first."
                raise ApiError(400, message, thinking_field, "invalid_combination")
            thinking = False
        return {**self.fields, "thinking": thinking}


async def begun_prompt(
    call: Call, messages: Sequence[Message], use: ToolUse, form: ReplyForm | None = None
) -> ChatPrompt:
    """Return the prompt of a conversation as `chat_prompt` does, but the last message can be the beginning of
    the reply. If the last message is the assistant's, the model continues this message. Raise ApiError, 400,
    if the thought of this message has no end, or if the request also demands a form or a tool call."""
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls:
        return await chat_prompt(call, messages, use, form)
    if len(messages) == 1:
        message = "messages: a reply that was begun needs a message before it."
        raise ApiError(400, message, "messages", "invalid_combination")
    if split(last.content).is_open:
        message = "messages: the thought of the begun reply has no end, and only its answer can be continued."
        raise ApiError(400, message, "messages", "invalid_combination")
    is_forced = bool(use.function) or use.choice == "required"
    if form is not None or is_forced:
        where = use.choice_field if is_forced or form is None else form.where
        message = (
            f"{where}: a reply that was begun (the last message) cannot be held to a form; leave one out."
        )
        raise ApiError(400, message, where, "invalid_combination")
    prompt = await chat_prompt(call, messages[:-1], use)
    return ChatPrompt({**prompt.fields, "opening": last.content}, prompt.new_calls)


async def chat_prompt(
    call: Call, messages: Sequence[Message], use: ToolUse, form: ReplyForm | None = None
) -> ChatPrompt:
    """Return the prompt of a conversation with its tools. form: the form of a reply without tool calls. Raise
    ApiError, 400, with the name of the wrong field, also if a schema cannot be compiled."""
    model = call.serving.runtime.model
    messages = [call.serving.written_calls.restore_message(message) for message in messages]
    fields = await formed_fields(call, {"messages": messages}, form)
    if not use.tools and not use.function and use.choice != "required" and not _has_calls(messages):
        return ChatPrompt(fields)
    prepared = await asyncio.to_thread(_prepare_chat, model, messages, use, form)
    if prepared.constraint is not None:
        await _check_constraint(call, prepared.constraint, use.tools_field)
    most = None if use.parallel else 1
    return ChatPrompt(prepared.fields(), (lambda: Calls(prepared.parser(), most)) if prepared.names else None)


async def formed_fields(call: Call, fields: Mapping[str, Any], form: ReplyForm | None) -> dict[str, Any]:
    """Return the fields of a GenerationRequest whose reply must fit the form. Raise ApiError, 400, if the
    form's schema cannot be compiled."""
    if form is None:
        return {**fields}
    await _check_constraint(call, form.constraint, form.where)
    return {**fields, "constraint": form.constraint}


def _has_calls(messages: Sequence[Message]) -> bool:
    return any(message.tool_calls or message.role == "tool" for message in messages)


def _prepare_chat(
    model: Model, messages: Sequence[Message], use: ToolUse, form: ReplyForm | None
) -> Prepared:
    answer = form.constraint if form is not None else None
    try:
        return prepare(model, messages, use.tools, use.choice, use.function, use.parallel, answer)
    except (UsageError, RecursionError) as error:
        about_choice = str(error).startswith("tool_choice")
        raise _field_error(error, use.choice_field if about_choice else use.tools_field) from None


async def _check_constraint(call: Call, constraint: Constraint, where: str) -> None:
    """Compile a constraint. Raise ApiError: 400 with the field `where` if the constraint cannot be
    compiled, 503 if the server stops.

    The compilation runs in a separate thread, because a large schema or vocabulary takes up to a second. Only
    a few threads compile at the same time, so that other requests find a free thread."""
    async with call.serving.compiling:
        if call.serving.stopping:
            raise stopping_error()
        await asyncio.to_thread(_compile, call.serving.runtime.model, constraint, where)


def _compile(model: Model, constraint: Constraint, where: str) -> None:
    try:
        matcher_for(model, constraint)
    except (UsageError, RecursionError) as error:
        raise _field_error(error, where) from None


def _field_error(error: UsageError | RecursionError, where: str) -> ApiError:
    if isinstance(error, RecursionError):
        error = UsageError("objects in it are nested too deeply.")
    return api_error(UsageError(f"{where}: {error}"), where)
