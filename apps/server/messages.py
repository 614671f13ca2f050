"""This module answers POST /v1/messages and /v1/messages/count_tokens, in Anthropic's form."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ruvmlx.engine.types import GenerationResponse
from ruvmlx.models.text.thinking import tag_of
from ruvmlx.models.text.tool_calls import CallBegun

from .anthropic_bodies import (
    CountBody,
    MessagesBody,
    conversation,
    form_of,
    reply_body,
    tools_of_body,
    wants_thought,
)
from .endpoint import Answer, Call, Endpoint, EventStream, Waiting
from .errors import ApiError, anthropic_error
from .openai_answers import ReplyId, room_of
from .prompts import ChatPrompt, begun_prompt
from .splitting import NewCalls, arguments_of, without_json
from .writing import (
    ReplyPart,
    Requests,
    WrittenReply,
    prompt_tokens,
    reply_parts,
    requests_for,
    write_replies,
)

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


class ThreadErrorDetails(Struct):
    """The details of the error for a request with the field `thread`. Anthropic's client reads the details,
    and then sends its requests without `thread`. unsupported: the features that the server does not
    support."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[Literal["thread"]]


class AnthropicErrorFacts(Struct):
    """The facts of an error. message: the error in one line. param, code: the wrong field and a fixed word,
    as in OpenAI's form; errors of Anthropic's own server do not have these fields. details: only the error
    for the field `thread` has this field."""

    type: str
    message: str
    param: str | None
    code: str | None
    details: ThreadErrorDetails | UnsetType = UNSET


class AnthropicErrorAnswer(Struct, tag_field="type", tag="error"):
    """The body of an answer with an error, in Anthropic's form."""

    error: AnthropicErrorFacts


class WrittenText(Struct, tag_field="type", tag="text"):
    """A content block with the text of the answer."""

    text: str


class WrittenThought(Struct, tag_field="type", tag="thinking"):
    """A content block with the thought of a model that thinks before its answer. signature: always empty,
    because the server checks no signature."""

    thinking: str
    signature: str


class WrittenToolUse(Struct, tag_field="type", tag="tool_use"):
    """A content block with a tool call that the model wrote."""

    id: str
    name: str
    input: dict[str, Any]


WrittenBlock = WrittenThought | WrittenText | WrittenToolUse


class MessageUsage(Struct):
    """The numbers of tokens. input_tokens: the prompt tokens that were not in a KV cache.
    cache_creation_input_tokens: always 0, because caching costs nothing. max_tokens: the longest reply that
    the context had room for; this field is present only if the request allowed a longer reply."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    max_tokens: int | UnsetType = UNSET


class AnthropicMessage(Struct, tag_field="type", tag="message"):
    """A reply of the model. id: the id that POST /v1/ratings takes."""

    id: ReplyId
    role: Literal["assistant"]
    model: str
    content: list[WrittenBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct):
    """The answer of count_tokens. input_tokens: the number of prompt tokens, with the tokens of the chat
    template."""

    input_tokens: int


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The first event of the stream. message: the reply without content; its token counts are provisional,
    and the last message_delta corrects them."""

    message: AnthropicMessage


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """The event at the beginning of a content block."""

    index: int
    content_block: WrittenBlock


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """The next piece of the answer's text."""

    text: str


class ThoughtDelta(Struct, tag_field="type", tag="thinking_delta"):
    """The next piece of the thought's text."""

    thinking: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    """The next piece of the tool call's input, as JSON text."""

    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """The event with the next piece of a content block."""

    index: int
    delta: TextDelta | ThoughtDelta | InputDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """The event at the end of a content block."""

    index: int


class StopFacts(Struct):
    """The reason why the reply ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The event at the end of the reply. usage: the numbers of tokens of the whole reply."""

    delta: StopFacts
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The last event of the stream."""


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


async def messages(call: Call) -> Answer:
    """Answer a conversation, with the whole answer at once or as a stream."""
    body: MessagesBody = call.body
    prompt = await _prompt(call, body)
    requests = await requests_for(call, reply_body(body), body.max_tokens, 0, [prompt.fields])
    if body.stream:
        return EventStream(_events(call, body, requests, prompt.new_calls), Waiting(_error_event, PING))
    [reply] = await write_replies(call, requests, prompt.new_calls)
    return _message(body, reply)


async def count_tokens(call: Call) -> Answer:
    """Count the prompt tokens of a conversation, without a reply to it."""
    body: CountBody = call.body
    prompt = await _prompt(call, body)
    return TokenCount(await prompt_tokens(call, body.model, body.adapter, prompt.fields))


async def _prompt(call: Call, body: CountBody) -> ChatPrompt:
    tag = tag_of(call.serving.runtime.model.tokenizer.chat_template)
    thinking = wants_thought(body, tag, call.ignored)
    prompt = await begun_prompt(call, conversation(body, tag), tools_of_body(body), form_of(body))
    return replace(prompt, fields=prompt.fields_with(thinking, "thinking"))


def _message(body: MessagesBody, reply: WrittenReply) -> AnthropicMessage:
    content: list[WrittenBlock] = [WrittenThought(reply.thought, "")] if reply.thought else []
    if reply.text:
        content.append(WrittenText(reply.text))
    calls = _calls(reply)
    content += calls
    why, response = _why(reply.response, bool(calls)), reply.response
    return AnthropicMessage(
        response.request_id,
        "assistant",
        body.model,
        content,
        why.stop_reason,
        why.stop_sequence,
        _usage(response, body.max_tokens),
    )


def _calls(reply: WrittenReply) -> list[WrittenToolUse]:
    """Return the tool calls. If a limit cut the reply within the last call, this call stays, because clients
    look for it before they ask again with a larger limit. Its input is not a call's input, so that a client
    does not run the tool with too few arguments."""
    found = []
    for made in reply.calls:
        is_cut = made is reply.calls[-1] and reply.response.finish_reason == "length"
        values = None if is_cut and not made.arguments else arguments_of(made)
        found.append(WrittenToolUse(made.id, made.name, without_json(made) if values is None else values))
    return found


def _why(response: GenerationResponse, called: bool) -> StopFacts:
    if response.stopped_by is not None:
        return StopFacts("stop_sequence", response.stopped_by)
    if response.finish_reason == "length":
        return StopFacts("max_tokens", None)
    return StopFacts("tool_use" if called else "end_turn", None)


def _usage(response: GenerationResponse, allowed: int) -> MessageUsage:
    cached, room = response.cached_tokens, room_of([response], allowed)
    new = response.prompt_tokens - cached
    return MessageUsage(new, response.generation_tokens, cached, max_tokens=room)


async def _events(
    call: Call, body: MessagesBody, requests: Requests, new_calls: NewCalls
) -> AsyncGenerator[bytes, None]:
    """Yield the reply as events: message_start, the events of each content block, message_delta with the
    numbers of tokens, and message_stop."""
    blocks, begun = BlockEvents(), False
    async with aclosing(reply_parts(call, requests, new_calls=new_calls)) as parts:
        async for part in parts:
            if not begun:
                begun, usage = True, MessageUsage(part.prompt_tokens, 0, 0)
                id = requests[0].request_id
                empty = AnthropicMessage(id, "assistant", body.model, [], None, None, usage)
                yield named_event(MessageStart(empty))
            for event in blocks.of(part):
                yield named_event(event)
            if part.response is not None:
                usage = _usage(part.response, body.max_tokens)
                yield named_event(MessageDelta(_why(part.response, blocks.called), usage))
                yield named_event(MessageStop())


@dataclass
class BlockEvents:
    """An object of this class makes events from the parts of a reply. index: the number of the newest content
    block. kind: the type of the open block; None: no block is open. called: True if a tool call has begun."""

    index: int = -1
    kind: type[WrittenBlock] | None = None
    called: bool = False

    def of(self, part: ReplyPart) -> Iterator[MessageEvent]:
        """Yield the events of one part of the reply. The last part closes the open content block."""
        if part.thought:
            yield from self._open_block(WrittenThought("", ""))
            yield BlockDelta(self.index, ThoughtDelta(part.thought))
        if part.text:
            yield from self._open_block(WrittenText(""))
            yield BlockDelta(self.index, TextDelta(part.text))
        for piece in part.calls:
            if isinstance(piece, CallBegun):
                self.called = True
                yield from self._close_block()
                yield from self._open_block(WrittenToolUse(piece.id, piece.name, {}))
            else:
                yield BlockDelta(self.index, InputDelta(piece.text))
        if part.response is not None:
            yield from self._close_block()

    def _open_block(self, block: WrittenBlock) -> Iterator[MessageEvent]:
        if self.kind is not type(block):
            yield from self._close_block()
            self.kind, self.index = type(block), self.index + 1
            yield BlockStart(self.index, block)

    def _close_block(self) -> Iterator[MessageEvent]:
        if self.kind is not None:
            self.kind = None
            yield BlockStop(self.index)


def named_event(data: Struct) -> bytes:
    """Return a server-sent event. The event's name is the field `type` of the struct."""
    name = str(data.__struct_config__.tag)
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(anthropic_error(error)) + b"\n\n"


_CLIENTS: dict[str, Any] = {
    "errors": anthropic_error,
    "error_body": AnthropicErrorAnswer,
    "statuses": (404, 409),
}
ENDPOINTS = [
    Endpoint(
        "POST", "/v1/messages", messages, "Answer a conversation, in Anthropic's form.",
        AnthropicMessage, body=MessagesBody, event=MessageEvent, **_CLIENTS,
        waiting=lambda body: Waiting(_error_event, PING) if body.stream else None,
    ),
    Endpoint(
        "POST", "/v1/messages/count_tokens", count_tokens, "Count a conversation's tokens.",
        TokenCount, body=CountBody, **_CLIENTS,
    ),
]  # fmt: skip
