"""This module supports tool calls: it writes tools into a prompt and finds the model's calls in a reply.

    prepared = prepare(model, messages, tools, "auto")      # or "none", "required"; function="weather"
    request = GenerationRequest(**prepared.fields(), max_new_tokens=...)
    parser = prepared.parser()                              # a parser of models/text/tool_calls.py
    for chunk in engine.stream(request):
        pieces = parser.add(chunk.text)
    pieces = parser.end()                                   # parser.calls: the number of calls

The module learns the form of a model's calls from the text that its chat template writes for one call. If a
template has no place for tools, or writes calls in an unknown form, the module writes the tools into the
system text, in the form of the Hermes models (`HERMES`).

With "required" or `function`, a constraint makes the reply one call, or up to MOST_CALLS calls, that can be
parsed. If a function is `strict`, the arguments of its calls fit the JSON schema of its parameters. If the
function is not `strict`, the constraint ignores the keywords of JSON Schema that llguidance does not know,
because agents often describe the parameters of tools for people and not for a parser. An object of the
arguments can have undeclared properties only if its schema declares no properties, mentions additional
properties or combines objects (closed_schemas.py). With "auto" and `answer`, a reply is either one or more
such calls, or text that fits the JSON schema `answer`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import UnsupportedModel, UsageError
from ..models.config.model import Message, Model, Tokenizer, Tools
from ..models.files.error_text import one_line
from ..models.text.tool_calls import ARGS, CALL_ID, HERMES, LLAMA, MISTRAL, MISTRAL11, CallParser, Dialect
from .closed_schemas import close_schema
from .grammar import Constraint, json_rule

MOST_CALLS = 8  # the maximum number of tool calls in a reply that must consist of tool calls
MOST_TOOLS = 512
CHOICES = ("none", "auto", "required")
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_PROMPT = """\
You can call these functions. To call one, answer with its name and its arguments, and nothing else:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>

{tools}"""


@dataclass(frozen=True)
class ToolForm:
    """The text form in which a model reads the definitions of tools and writes tool calls.

    in_template: True if the model's chat template has a place for tools
    call_ids: True if the model's calls have ids
    """

    dialect: Dialect
    in_template: bool
    call_ids: bool = False


@dataclass(frozen=True)
class Prepared:
    """A conversation with tools: the fields of a GenerationRequest, and the parser of the reply."""

    form: ToolForm
    names: tuple[str, ...]
    messages: tuple[Message, ...]
    tools: Tools
    constraint: Constraint | None
    asked: str | None  # as in GenerationRequest

    def fields(self) -> dict[str, Any]:
        fields = {"messages": self.messages, "tools": self.tools, "constraint": self.constraint}
        return {**fields, "shows_calls": bool(self.names), "asked": self.asked}

    def parser(self) -> CallParser:
        return CallParser(self.form.dialect, self.names)


def prepare(
    model: Model,
    messages: Sequence[Message],
    tools: Tools,
    choice: str = "auto",
    function: str = "",
    parallel: bool = True,
    answer: Constraint | None = None,
) -> Prepared:
    """Prepare a conversation with tools. Raises UsageError if a tool or the choice is wrong; the message
    names the mistake.

    choice: one of CHOICES
    function: the name of the function that the reply must call
    parallel: False: a reply that must call tools has exactly one call
    answer: the JSON schema that a reply without tool calls must fit
    """
    if choice not in CHOICES:
        raise UsageError(f"tool_choice is {one_line(choice, 40)!r}; it must be one of {', '.join(CHOICES)}.")
    functions = check_tools(tools)
    form = tool_form(model.tokenizer)
    names = tuple(f["name"] for f in functions)
    wanted = [f for f in functions if function in ("", f["name"])]
    forced = bool(function) or choice == "required"
    if forced and not wanted:
        there = ", ".join(names) or "none"
        raise UsageError(f"tool_choice asks for {function or 'a tool'}; the tools are: {there}.")
    offered = functions if forced or choice == "auto" else []
    many = MOST_CALLS if parallel and not function else 1
    return Prepared(
        form,
        tuple(f["name"] for f in offered),
        _in_form(form, messages, offered),
        _as_tools(offered) if form.in_template else (),
        _constraint(model.tokenizer, form, wanted if forced else offered, many, forced, answer),
        _question_before_results(messages),
    )


def _question_before_results(messages: Sequence[Message]) -> str | None:
    """Return the last user message before the tool results at the end of the conversation. If the
    conversation does not end with a tool result, return None."""
    if not messages or messages[-1].role != "tool":
        return None
    return next((message.content for message in reversed(messages) if message.role == "user"), "")


def _constraint(
    tokenizer: Tokenizer,
    form: ToolForm,
    functions: Sequence[Mapping[str, Any]],
    most: int,
    forced: bool,
    answer: Constraint | None,
) -> Constraint | None:
    if forced:
        return forced_calls(tokenizer, form, functions, most)
    if answer is None or not functions:
        return answer
    return forced_calls(tokenizer, form, functions, most, answer)


def check_tools(tools: Tools) -> list[dict[str, Any]]:
    """Return the function of each tool, with its description and its parameters. Raise UsageError if a tool
    is wrong."""
    if len(tools) > MOST_TOOLS:
        raise UsageError(f"{len(tools)} tools were given; at most {MOST_TOOLS} are allowed.")
    found = [_check_tool(i, tool) for i, tool in enumerate(tools)]
    names = [f["name"] for f in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two tools have the name {twice}; names must differ.")
    return found


def _check_tool(i: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise UsageError(f'tools[{i}] must be {{"type": "function", "function": {{...}}}}.')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"tools[{i}] has the name {one_line(name, 40)!r}; it must be 1 to 128 letters, digits, - . or _."
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UsageError(f"tools[{i}] has parameters that are no JSON schema; they must be an object.")
    # In a tool's function, name, description and parameters come first, because models were trained with this
    # order. The function's other fields follow.
    filled = {
        "name": name,
        "description": function.get("description") or "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return filled | {key: value for key, value in function.items() if key not in filled}


def _as_tools(functions: Sequence[Mapping[str, Any]]) -> Tools:
    return tuple({"type": "function", "function": dict(f)} for f in functions)


# Call forms --------------------------------------------------------------------------------------

_known: WeakKeyDictionary[Tokenizer, ToolForm] = WeakKeyDictionary()
_ID = "probecall"
_PROBE = {"name": "probe_name", "arguments": {"probe_key": 7}}
_PROBED = re.compile(r'"probe_key":\s*7')
_PROBE_DESCRIPTION = "Probe description."
_PROBE_TOOL = {
    "name": "probe_name",
    "description": _PROBE_DESCRIPTION,
    "parameters": {"type": "object", "properties": {"probe_key": {"type": "integer"}}},
}
_CHAT = (
    Message("user", "A question."),
    Message("assistant", "", ({"id": _ID, "type": "function", "function": _PROBE},)),
    Message("tool", "A result.", (), _ID, "probe_name"),
)


def tool_form(tokenizer: Tokenizer) -> ToolForm:
    """Return the form in which the model's chat template writes a tool call; HERMES in the system text if the
    template has no place for tools or an unknown form."""
    if tokenizer not in _known:
        _known[tokenizer] = _probe_form(tokenizer) or ToolForm(HERMES, in_template=False)
    return _known[tokenizer]


def _probe_form(tokenizer: Tokenizer) -> ToolForm | None:
    tools = _as_tools([_PROBE_TOOL])
    try:
        offered = tokenizer.chat_text(_CHAT[:1], tools=tools)
        called = tokenizer.chat_text(_CHAT, tools=tools)
    except (UsageError, UnsupportedModel):
        return None
    found = _PROBED.search(called)
    if found is None or _PROBE_DESCRIPTION not in offered:
        return None
    before = called[: found.start()]
    mark = MISTRAL.begin
    if mark in before:
        head = before.rpartition(mark)[2].lstrip()
        return ToolForm(MISTRAL if head.startswith("[") else MISTRAL11, True, CALL_ID in head)
    if HERMES.begin in before and before.endswith(('"arguments": {', '"arguments":{')):
        return ToolForm(HERMES, True)
    return ToolForm(LLAMA, True) if before.endswith('"parameters": {') else None


# Messages ----------------------------------------------------------------------------------------


def _in_form(
    form: ToolForm, messages: Sequence[Message], functions: Sequence[Mapping[str, Any]]
) -> tuple[Message, ...]:
    if not form.in_template:
        return _in_words(messages, functions)
    return tuple(map(_with_short_ids, messages)) if form.dialect.begin == MISTRAL.begin else tuple(messages)


def _with_short_ids(message: Message) -> Message:
    """Return the message with tool call ids of nine characters (letters and digits), because some of
    Mistral's chat templates refuse other ids."""
    calls = tuple({**call, "id": _short_id(str(call.get("id", "")))} for call in message.tool_calls)
    call_id = _short_id(message.tool_call_id) if message.role == "tool" else message.tool_call_id
    return replace(message, tool_calls=calls, tool_call_id=call_id)


def _short_id(call_id: str) -> str:
    """Return an id of nine characters for a tool call. Equal values of `call_id` give equal results."""
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _in_words(messages: Sequence[Message], functions: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return the messages with the tools' definitions, calls and results as plain text, for a chat template
    that has no place for tools."""
    turns: list[Message] = []
    for message in messages:
        turn, last = _as_text_message(message), turns[-1] if turns else None
        # many chat templates require that user and assistant alternate
        if last is not None and turn.role == last.role == "user":
            turns[-1] = Message("user", f"{last.content}\n{turn.content}")
        else:
            turns.append(turn)
    if not functions:
        return tuple(turns)
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in _as_tools(functions))
    text = _PROMPT.format(tools=lines)
    if turns and turns[0].role == "system":
        return (Message("system", f"{turns[0].content}\n\n{text}"), *turns[1:])
    return (Message("system", text), *turns)


def _as_text_message(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    parts = [message.content] if message.content else []
    for call in message.tool_calls:
        function = call["function"]
        body = {"name": function["name"], "arguments": function["arguments"]}
        parts.append(f"{HERMES.begin}\n{json.dumps(body, ensure_ascii=False)}\n{HERMES.end}")
    return Message(message.role, "\n".join(parts))


# Required calls ----------------------------------------------------------------------------------


def forced_calls(
    tokenizer: Tokenizer,
    form: ToolForm,
    functions: Sequence[Mapping[str, Any]],
    most: int = 1,
    answer: Constraint | None = None,
) -> Constraint:
    """Return a constraint: the reply must be one to `most` calls of these functions in the model's form, or
    text that fits `answer` (a JSON schema)."""
    dialect = form.dialect

    def mark(text: str) -> str:
        token = tokenizer.special_tokens.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    call_id = f"{mark(CALL_ID)} /[a-zA-Z0-9]{{9}}/ " if form.call_ids else ""
    calls = []
    for f in functions:
        arguments = _arguments(f)
        if dialect.named:
            args = mark(ARGS) if ARGS in tokenizer.special_tokens else ""
            calls.append(f"{mark(dialect.begin)} {json.dumps(f['name'])} {call_id}{args} {arguments}")
        else:
            head = json.dumps(f'{{"name": "{f["name"]}", "{dialect.key}": ')
            calls.append(f'{head} {arguments} "}}"')
    rules = [f"call_{i}: {call}" for i, call in enumerate(calls)]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(calls))))
    rules.append(_calls(dialect, mark, most))
    if answer is not None:
        rules.append(f"answer: {answer.json_rule()}")
    start = "start: calls" if answer is None else "start: calls | answer"
    return Constraint.lark("\n".join([start, *rules]))


def _calls(dialect: Dialect, mark: Any, most: int) -> str:
    more, begin = f"{{0,{most - 1}}}", mark(dialect.begin)
    if dialect is LLAMA:  # Llama's chat templates accept only one call in a message
        return "calls: call"
    if dialect.named:
        return f"calls: call call{more}" if most > 1 else "calls: call"
    if dialect is MISTRAL:
        rest = f' (", " call){more}' if most > 1 else ""
        return f'calls: {begin} " "? "[" call{rest} "]"'
    rest = f' ("\\n" tagged){more}' if most > 1 else ""
    return f'calls: tagged{rest}\ntagged: {begin} "\\n" call "\\n" {mark(dialect.end)}'


def _arguments(function: Mapping[str, Any]) -> str:
    schema = close_schema({"type": "object", **function["parameters"]})
    return json_rule(schema, loose=function.get("strict") is not True, as_templates=True)
