"""This module defines the parts of OpenAI's request bodies that describe tools and the form of the reply."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

JsonSchema = Annotated[dict[str, Any], Meta(description="A JSON schema.")]
FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,8})$")]


class OfferedFunction(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model can call. strict: if true, and the model must call a tool or the answer must
    fit a schema, a keyword of `parameters` that the server does not support is an error. If strict is false,
    a keyword that the server does not support does not restrict the arguments."""

    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class OfferedTool(Struct, forbid_unknown_fields=True):
    """A tool that the model can call."""

    type: Literal["function"]
    function: OfferedFunction


class ChosenName(Struct, forbid_unknown_fields=True):
    """The name of a function of one of the tools."""

    name: str


class ChosenTool(Struct, forbid_unknown_fields=True):
    """The tool that the model must call."""

    type: Literal["function"]
    function: ChosenName


class CalledBefore(Struct, forbid_unknown_fields=True):
    """The function of an earlier tool call. arguments: the text of the arguments that the model wrote."""

    name: FunctionName
    arguments: str


class EarlierCall(Struct, forbid_unknown_fields=True):
    """A tool call of the model in an earlier reply."""

    id: Annotated[str, Meta(min_length=1)]
    type: Literal["function"]
    function: CalledBefore


class FreeText(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """With this format, the reply can be any text."""


class AnyObject(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """With this format, a reply without tool calls must be a JSON object."""


class ObjectFormat(AnyObject, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """With this format, a reply without tool calls must be a JSON object. schema: the object must fit
    this schema. Clients of llama.cpp send a schema in this field. A keyword that the server does not support
    does not restrict the reply."""

    schema: JsonSchema | None = None


class NamedSchema(Struct, forbid_unknown_fields=True):
    """A JSON schema. name, description: the server ignores these fields. strict: if true, a keyword of the
    schema that the server does not support is an error. If strict is false, a keyword that the server does
    not support does not restrict the reply."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: JsonSchema
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """With this format, a reply without tool calls must be JSON that fits the schema."""

    json_schema: NamedSchema


ResponseFormat = FreeText | ObjectFormat | SchemaFormat
ToolChoice = Literal["none", "auto", "required"] | ChosenTool
