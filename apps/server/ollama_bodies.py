"""This module defines the request bodies of ollama's endpoints. If a body has a field that the server does
not know, the server refuses the request, as for the bodies in bodies.py."""

import re
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ruvmlx.engine.agent_headers import without_agent_headers
from ruvmlx.engine.tools import MOST_TOOLS
from ruvmlx.models.config.model import Message
from ruvmlx.models.text.thinking import join_thought

from .bodies import ReplyBody, Text, Words
from .chat_requests import any_object, schema_form
from .errors import ApiError
from .prompts import ReplyForm, ToolUse, function_tool
from .responses_tools import ChosenFunction, FunctionChoice
from .tool_bodies import FunctionName, JsonSchema, NamedSchema

Name = Annotated[str, Meta(description="NAME, NAME:latest or NAME@ADAPTER, as GET /api/tags lists them.")]
NoImages = Annotated[list[str], Meta(max_length=0)]
Format = Literal["", "json"] | JsonSchema


class OllamaFunction(Struct, forbid_unknown_fields=True):
    """A function that the model can call."""

    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None


class OllamaTool(Struct, forbid_unknown_fields=True):
    """A tool that the client runs."""

    function: OllamaFunction
    type: Literal["function"] | None = None


class OllamaCalled(Struct, forbid_unknown_fields=True):
    """The function of an earlier tool call. index: the number of the call; the server ignores this field."""

    name: FunctionName
    arguments: dict[str, Any] | None = None
    index: int | None = None


class OllamaCall(Struct, forbid_unknown_fields=True):
    """A tool call of the model in an earlier reply. LangChain and Open WebUI send the fields `type` and
    `index`. The server ignores these fields."""

    function: OllamaCalled
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class OllamaMessage(Struct, forbid_unknown_fields=True):
    """A message of the conversation. tool_name: the name of the function whose result the message is.
    thinking: the model's thought in an earlier reply."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: NoImages | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(Struct, forbid_unknown_fields=True):
    """The options of a reply. num_predict: the maximum number of tokens of the reply; below 1: the server's
    own maximum, or else all free tokens of the context. seed: -1 for a random seed. repeat_last_n: the number
    of last reply tokens to which repeat_penalty applies; 0: no tokens, -1: all tokens."""

    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.1, le=2, description="1 is off.")] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=16)] | None = None


KeepAlive = Annotated[
    str | float | None,
    Meta(description="0: close the model after the answer. All other values change nothing."),
]


def is_last_use(keep_alive: str | float | None) -> bool:
    """Return True if the client asks the server to close the model after this request. The client asks for
    the closing by a `keep_alive` of 0, as a number, a text or a duration."""
    return keep_alive is not None and re.fullmatch(r"0+(\.0*)?(ns|us|ms|s|m|h)?", str(keep_alive)) is not None


class OllamaReplyBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that the bodies of chat and generate share. stream: if the field is missing, the answer is a
    stream. format: "json" for any JSON object, or a schema that the answer must fit. think: true or a level
    if the model must think before its answer, false if it must not; null: the chat template decides."""

    model: Name
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    keep_alive: KeepAlive = None


class OllamaChatBody(OllamaReplyBody, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /api/chat. tool_choice: whether the model must call a tool, and which tool, as in
    /v1/responses. ollama's own server does not have this field."""

    messages: list[OllamaMessage] | None = None
    tools: Annotated[list[OllamaTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: FunctionChoice | None = None


class OllamaGenerateBody(OllamaReplyBody, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /api/generate. raw: if true, the model reads the prompt without the chat template.
    suffix: the text after the reply, for a model that has tokens for infilling."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: NoImages | None = None


class OllamaEmbedBody(Struct, forbid_unknown_fields=True):
    """The body of POST /api/embed."""

    model: Name
    input: Words | Annotated[list[Words], Meta(min_length=1, max_length=2048)]
    keep_alive: KeepAlive = None
    truncate: Annotated[bool | None, Meta(description="false: a text that is too long is an error.")] = None
    dimensions: Annotated[int | None, Meta(description="Only the number that the model has.")] = None


class OllamaEmbeddingsBody(Struct, forbid_unknown_fields=True):
    """The body of POST /api/embeddings."""

    model: Name
    prompt: Words
    keep_alive: KeepAlive = None


class OllamaShowBody(Struct, forbid_unknown_fields=True):
    """The body of POST /api/show. name: the name of the model; older clients send it in place of `model`.
    verbose: this field changes nothing."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None


def reply_body(body: OllamaReplyBody) -> ReplyBody:
    """Return the options for the reply as a ReplyBody, which has the fields that the endpoints for replies
    share."""
    options = body.options or OllamaOptions()
    return ReplyBody(
        model=body.model,
        stop=options.stop,
        seed=None if options.seed == -1 else options.seed,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repeat_penalty=options.repeat_penalty,
        repeat_last_n=options.repeat_last_n,
    )


def limit_of(body: OllamaReplyBody) -> int | None:
    """Return the maximum number of tokens of the reply. Return None if the body sets no maximum."""
    asked = body.options.num_predict if body.options else None
    return asked if asked is not None and asked > 0 else None


def form_of(body: OllamaReplyBody) -> ReplyForm | None:
    """Return the JSON schema that the answer must fit. Return None if the answer can be any text."""
    if not body.format:
        return None
    if body.format == "json" or isinstance(body.format, str):
        return any_object("format")
    return schema_form(NamedSchema("answer", body.format), "format")


def thought_of(body: OllamaReplyBody, tag: str | None) -> bool | None:
    """Return True if the model must think before its answer, False if it must not, and None if the chat
    template decides. Raise ApiError if the body asks for a thought but the model cannot think before its
    answer."""
    if body.think is None or body.think is False:
        return body.think
    if tag is None:
        message = "think: this model does not think first; leave the field out."
        raise ApiError(400, message, "think", "invalid_combination")
    return True


def tools_of(body: OllamaChatBody) -> ToolUse:
    """Return the tools of the request, and whether the model must call a tool, and which tool."""
    functions = [tool.function for tool in body.tools or ()]
    tools = [function_tool(f.name, f.description, f.parameters, None) for f in functions]
    if isinstance(body.tool_choice, ChosenFunction):
        return ToolUse(tools, "required", body.tool_choice.name)
    return ToolUse(tools, body.tool_choice or "auto")


def conversation(messages: Sequence[OllamaMessage], tag: str | None) -> list[Message]:
    """Return the conversation as a list of `Message`, which is the form that the engine reads. A tool call
    needs no id in ollama's form. A result can have neither an id nor a function name. Such a result belongs
    to the first call without a result. If each call has a result, the new result belongs to the call of the
    last result, as one more part. Raise ApiError if no call fits a result. tag: the tag that begins a
    thought, or None if the model does not think before its answer."""
    found: list[Message] = []
    open_calls = _OpenCalls([])
    for at, message in enumerate(messages):
        text = message.content or ""
        if message.role == "tool":
            call_id, name = _answered_call(message, open_calls, f"messages[{at}]")
            found.append(Message("tool", text, (), call_id, name))
        elif message.role == "assistant":
            calls = [_call(made, f"call{at}x{i}") for i, made in enumerate(message.tool_calls or ())]
            open_calls = _OpenCalls([(call["id"], call["function"]["name"]) for call in calls])
            said = join_thought(message.thinking, text, tag) if message.thinking and tag else text
            found.append(Message("assistant", said, tuple(calls)))
        else:
            found.append(
                Message(message.role, without_agent_headers(text) if message.role == "system" else text)
            )
    return found


def _call(made: OllamaCall, call_id: str) -> dict[str, Any]:
    function = {"name": made.function.name, "arguments": made.function.arguments or {}}
    return {"id": made.id or call_id, "type": "function", "function": function}


class _OpenCalls:
    """The tool calls of one message that have no result yet. calls: (id, function name) of each call. A
    search takes the same time for any number of calls, because a request can have very many."""

    def __init__(self, calls: Sequence[tuple[str, str]]):
        self._calls, self._last = dict(enumerate(calls)), ("", "")
        self._places: dict[tuple[str, str], deque[int]] = {}
        for place, (call_id, name) in self._calls.items():
            for known in ((call_id, name), (call_id, ""), ("", name), ("", "")):
                self._places.setdefault(known, deque()).append(place)

    def take(self, call_id: str, name: str) -> tuple[str, str] | None:
        """Remove the first call with this id and this name, and return the call. If no call is left that
        fits, return the call of the last result again if that call fits, else None. An empty id or name fits
        every call."""
        places = self._places.get((call_id, name), deque())
        while places:
            if (call := self._calls.pop(places.popleft(), None)) is not None:
                self._last = call
                return call
        is_more = self._last[0] and call_id in ("", self._last[0]) and name in ("", self._last[1])
        return self._last if is_more else None


def _answered_call(message: OllamaMessage, open_calls: _OpenCalls, where: str) -> tuple[str, str]:
    """Return the id and the function name of the tool call to which a result belongs. Take the first call
    without a result that has the id and the name of the message. A message without an id, or without a name,
    fits every id or every name. If no such call is left, take the call of the last result, if it fits. Raise
    ApiError if no call fits."""
    call = open_calls.take(message.tool_call_id or "", message.tool_name or "")
    if call is not None:
        return call
    field = f"{where}.role"
    raise ApiError(400, f"{field}: no call before this message waits for it.", field, "invalid_combination")
