"""Conversations with tools and with a form for the reply, as the engine takes them. For every API's form."""

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
from .errors import ApiError, api_error
from .splitting import Calls, NewCalls


@dataclass(frozen=True)
class ToolUse:
    """What a request says of its tools, as `ruvmlx.engine.tools.prepare` takes it.

    function: the one that must be called. parallel: whether a reply may have several calls. tools_field,
    choice_field: what the request calls them, for errors.
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
    """A tool as the engine takes it; what is None is left out."""
    facts = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {
        "type": "function",
        "function": {key: value for key, value in facts.items() if value is not None},
    }


@dataclass(frozen=True)
class ReplyForm:
    """What a reply without calls must fit: a JSON schema. where: the field that says so, for errors."""

    constraint: Constraint
    where: str


@dataclass(frozen=True)
class ChatPrompt:
    """fields: of a GenerationRequest. new_calls: finds the calls in a reply to it."""

    fields: dict[str, Any] = field(default_factory=dict)
    new_calls: NewCalls = None

    def fields_with(self, thinking: bool | None, thinking_field: str) -> dict[str, Any]:
        """The fields, and whether the model is to think first; None: as its template says. A begun reply has
        its thought, or none."""
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
    """As `chat_prompt`; a last message of the assistant is a reply that the client has begun. ApiError, 400,
    if it cannot be continued."""
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls:
        return await chat_prompt(call, messages, use, form)
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
    """The conversation, its tools and what a reply without calls must fit. ApiError, 400, names the field
    that is wrong, also if a schema cannot be compiled."""
    model = call.serving.runtime.model
    messages = [call.serving.written_calls.restored(message) for message in messages]
    fields = await formed_fields(call, {"messages": messages}, form)
    if not use.tools and not use.function and use.choice != "required" and not _has_calls(messages):
        return ChatPrompt(fields)
    prepared = await asyncio.to_thread(_prepare_chat, model, messages, use, form)
    most = None if use.parallel else 1
    return ChatPrompt(prepared.fields(), (lambda: Calls(prepared.parser(), most)) if prepared.names else None)


async def formed_fields(call: Call, fields: Mapping[str, Any], form: ReplyForm | None) -> dict[str, Any]:
    """The fields of a GenerationRequest whose reply must fit the form. ApiError, 400, if the form cannot be
    compiled."""
    if form is None:
        return {**fields}
    # In a thread: a large schema or vocabulary takes up to a second, and other replies go on meanwhile.
    await asyncio.to_thread(_compile, call.serving.runtime.model, form.constraint, form.where)
    return {**fields, "constraint": form.constraint}


def _has_calls(messages: Sequence[Message]) -> bool:
    return any(message.tool_calls or message.role == "tool" for message in messages)


def _prepare_chat(
    model: Model, messages: Sequence[Message], use: ToolUse, form: ReplyForm | None
) -> Prepared:
    answer = form.constraint if form is not None else None
    try:
        made = prepare(model, messages, use.tools, use.choice, use.function, use.parallel, answer)
    except (UsageError, RecursionError) as error:
        about_choice = str(error).startswith("tool_choice")
        raise _field_error(error, use.choice_field if about_choice else use.tools_field) from None
    if made.constraint is not None:
        _compile(model, made.constraint, use.tools_field)
    return made


def _compile(model: Model, constraint: Constraint, where: str) -> None:
    try:
        matcher_for(model, constraint)
    except (UsageError, RecursionError) as error:
        raise _field_error(error, where) from None


def _field_error(error: UsageError | RecursionError, where: str) -> ApiError:
    if isinstance(error, RecursionError):
        error = UsageError("objects in it are nested too deeply.")
    return api_error(UsageError(f"{where}: {error}"), where)
