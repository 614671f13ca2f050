"""This module defines the tools and the form of the answer in the body of POST /v1/responses. The module also
turns the tools and the form into the engine's types."""

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
    """A function that the model can call."""


class FunctionGroup(Struct, forbid_unknown_fields=True, tag_field="type", tag="namespace"):
    """A group of functions for one purpose. The model reads and writes the name of a function of the group as
    GROUP.FUNCTION. In an item, `namespace` is the name of the group and `name` is the name of the function.
    description: the server ignores this field."""

    name: ShortName
    description: str
    tools: list[ResponseFunction]


class ChosenFunction(Struct, forbid_unknown_fields=True):
    """The function that the model must call. name: the name of the function; GROUP.FUNCTION if the function
    belongs to a group."""

    type: Literal["function"]
    name: str


class ResponseSchema(NamedSchema, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """The JSON schema that the answer must fit."""


class TextOptions(Struct, forbid_unknown_fields=True):
    """The options for the form of the answer. format: the form that the answer must fit."""

    format: FreeText | AnyObject | ResponseSchema | None = None


ResponseTool = ResponseFunction | FunctionGroup
FunctionChoice = Literal["none", "auto", "required"] | ChosenFunction


def full_name(group: str | None, name: str) -> str:
    """Return the name of a function that the model reads and writes: GROUP.FUNCTION, or the name alone if the
    function has no group."""
    return f"{group}.{name}" if group else name


def grouped_names(tools: Sequence[ResponseTool]) -> dict[str, tuple[str, str]]:
    """Return a mapping from the name that the model writes to (group, function), for each function of a
    group."""
    return {full_name(group, f.name): (group, f.name) for group, f in _functions(tools) if group}


def tool_use(tools: Sequence[ResponseTool], choice: FunctionChoice | None, parallel: bool | None) -> ToolUse:
    """Return the tools of the request, and whether the model must call one of them."""
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
    """Return the JSON schema that the answer must fit. Return None if the answer can be any text."""
    match options and options.format:
        case AnyObject():
            return any_object("text.format")
        case ResponseSchema() as named:
            return schema_form(named, "text.format.schema")
    return None
