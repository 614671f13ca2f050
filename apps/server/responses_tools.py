"""Tools and the form of the answer in the body of POST /v1/responses, and as the engine takes them."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from .chat_requests import any_object, schema_form
from .prompts import ReplyForm, ToolUse, function_tool
from .tool_bodies import AnyObject, FreeText, NamedSchema, OfferedFunction

ShortName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,63}$")]


class ResponseFunction(
    OfferedFunction, forbid_unknown_fields=True, omit_defaults=False, tag_field="type", tag="function"
):
    """A function that the model may call."""


class FunctionGroup(Struct, forbid_unknown_fields=True, tag_field="type", tag="namespace"):
    """Functions of one purpose. The model reads and writes GROUP.FUNCTION; in items, `namespace` has the
    group's name and `name` the function's. description: not used."""

    name: ShortName
    description: str
    tools: list[ResponseFunction]


class ChosenFunction(Struct, forbid_unknown_fields=True):
    """The function that must be called; GROUP.FUNCTION for one of a group."""

    type: Literal["function"]
    name: str


class ResponseSchema(NamedSchema, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that fits the schema."""


class TextOptions(Struct, forbid_unknown_fields=True):
    """What the answer must fit."""

    format: FreeText | AnyObject | ResponseSchema | None = None


ResponseTool = ResponseFunction | FunctionGroup
FunctionChoice = Literal["none", "auto", "required"] | ChosenFunction


def full_name(group: str | None, name: str) -> str:
    """What the model reads and writes."""
    return f"{group}.{name}" if group else name


def grouped_names(tools: Sequence[ResponseTool]) -> dict[str, tuple[str, str]]:
    """(group, function) by the name that the model writes, for functions of groups."""
    return {full_name(group, f.name): (group, f.name) for group, f in _functions(tools) if group}


def tool_use(tools: Sequence[ResponseTool], choice: FunctionChoice | None, parallel: bool | None) -> ToolUse:
    """The tools, and whether they must be called."""
    offered = [
        function_tool(full_name(group, f.name), f.description, f.parameters, f.strict)
        for group, f in _functions(tools)
    ]
    if isinstance(choice, ChosenFunction):
        return ToolUse(offered, "required", choice.name, parallel is not False)
    return ToolUse(offered, choice or "auto", "", parallel is not False)


def _functions(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, ResponseFunction]]:
    for tool in tools:
        if isinstance(tool, FunctionGroup):
            yield from ((tool.name, function) for function in tool.tools)
        else:
            yield "", tool


def form_of(options: TextOptions | None) -> ReplyForm | None:
    """What the answer must fit; None: anything."""
    match options and options.format:
        case AnyObject():
            return any_object("text.format")
        case ResponseSchema() as named:
            return schema_form(named, "text.format.schema")
    return None
