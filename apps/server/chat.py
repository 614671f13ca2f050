"""This module answers POST /v1/chat/completions, which is OpenAI's form of a conversation."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ruvmlx.engine.types import GenerationResponse
from ruvmlx.models.text.thinking import tag_of
from ruvmlx.models.text.tool_calls import CallBegun

from .bodies import ChatBody, text_of
from .chat_requests import form_of, messages_of, template_values, thinking_of, tools_of
from .endpoint import Answer, Call, Endpoint, EventStream, Waiting
from .errors import ApiError
from .openai_answers import (
    DONE,
    RATE_LINK,
    ChoiceLogprobs,
    FinishReason,
    ReplyId,
    Usage,
    event,
    failed_event,
    finish_reason,
    token_infos,
    usage_of,
)
from .prompts import begun_prompt
from .splitting import CallPiece, NewCalls
from .writing import ReplyPart, Requests, WrittenReply, reply_parts, requests_for, write_replies


class WrittenFunction(Struct):
    """The function of a tool call that the model wrote. arguments: the arguments as JSON text. In a chunk of
    a stream, `arguments` is a piece of this text."""

    arguments: str
    name: str | UnsetType = UNSET


class WrittenCall(Struct):
    """A tool call that the model wrote."""

    id: str
    type: Literal["function"]
    function: WrittenFunction


class CallDelta(Struct):
    """The text that a chunk of the stream adds to tool call number `index`. Only the first chunk of a tool
    call has the id, the type and the name."""

    index: int
    function: WrittenFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantReply(Struct):
    """The model's reply. content: null if the reply has tool calls and no text. reasoning_content: the
    thought of a model that thinks before its answer."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[WrittenCall] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(Struct):
    """One of the `n` replies that the request asked for."""

    index: int
    message: AssistantReply
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    reply_id: ReplyId


class ChatCompletion(Struct):
    """The answer with all replies. id: the id of the first reply."""

    id: ReplyId
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Struct):
    """The text that a chunk of the stream adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    """A piece of one of the `n` replies that the request asked for."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None
    reply_id: ReplyId


class ChatChunk(Struct):
    """An event of the stream. usage: the token counts, if the request asks for them; only the last event
    before [DONE] has them."""

    id: ReplyId
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


async def chat_completions(call: Call) -> Answer:
    """Answer a conversation, with the whole answer at once or as a stream."""
    body: ChatBody = call.body
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: needs stream: true.", "stream_options", "invalid_combination")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs: true.", "top_logprobs", "invalid_combination")
    logprobs = max(1, body.top_logprobs or 0) if body.logprobs else 0
    tag = tag_of(call.serving.runtime.model.tokenizer.chat_template)
    thinking, values = thinking_of(body, tag, call.ignored), template_values(body.chat_template_kwargs)
    prompt = await begun_prompt(call, messages_of(body.messages, tag), tools_of(body), form_of(body))
    fields = {
        **prompt.fields_with(thinking, "reasoning_effort"),
        "template_values": values,
        "predicted": await _predicted_tokens(call, body),
    }
    requests = await requests_for(call, body, _limit(body), logprobs, [fields])
    if body.stream:
        return EventStream(_chunks(call, body, requests, prompt.new_calls), Waiting(failed_event))
    return _completion(call, body, requests, await write_replies(call, requests, prompt.new_calls))


async def _predicted_tokens(call: Call, body: ChatBody) -> list[int]:
    if body.prediction is None:
        return []
    model, text = call.serving.runtime.model, text_of(body.prediction.content)
    return await asyncio.to_thread(model.tokenizer.encode, text, add_bos=False, most=model.context)


def _limit(body: ChatBody) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        message = "max_tokens: max_completion_tokens is given, too; give one of them."
        raise ApiError(400, message, "max_tokens", "invalid_combination")
    return body.max_completion_tokens or body.max_tokens


def _completion(
    call: Call, body: ChatBody, requests: Requests, replies: Sequence[WrittenReply]
) -> ChatCompletion:
    choices = [
        ChatChoice(
            index,
            _message(reply),
            _logprobs(call, body, reply.logprobs),
            finish_reason(reply.response, bool(reply.calls)),
            reply.response.request_id,
        )
        for index, reply in enumerate(replies)
    ]
    usage = usage_of(
        [reply.response for reply in replies], len(replies), _limit(body), body.prediction is not None
    )
    return ChatCompletion(
        requests[0].request_id, "chat.completion", int(time.time()), body.model, choices, usage
    )


def _message(reply: WrittenReply) -> AssistantReply:
    calls = [
        WrittenCall(made.id, "function", WrittenFunction(made.arguments, made.name)) for made in reply.calls
    ]
    text = reply.text or (None if calls else "")
    return AssistantReply("assistant", text, reply.thought or UNSET, calls or UNSET)


def _logprobs(call: Call, body: ChatBody, logprobs: Sequence[Any]) -> ChoiceLogprobs | None:
    if not (body.logprobs and logprobs):
        return None
    return ChoiceLogprobs(token_infos(call.serving.runtime.model.tokenizer, logprobs, body.top_logprobs or 0))


async def _chunks(
    call: Call, body: ChatBody, requests: Requests, new_calls: NewCalls
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer. The order for each reply is: the role, pieces of text and of
    tool calls, the finish reason. After all replies come the usage, if the request asks for it, and
    [DONE]."""
    id, created = requests[0].request_id, int(time.time())
    wants_usage = bool(body.stream_options and body.stream_options.include_usage)
    begun: set[int] = set()
    called: set[int] = set()
    done: dict[int, GenerationResponse] = {}

    def chunk(choices: list[ChunkChoice], usage: Usage | None = None) -> bytes:
        counted: Usage | UnsetType | None = usage if wants_usage else UNSET
        return event(ChatChunk(id, "chat.completion.chunk", created, body.model, choices, counted))

    async with aclosing(reply_parts(call, requests, new_calls=new_calls)) as parts:
        async for part in parts:
            reply_id = requests[part.index].request_id
            if part.index not in begun:
                begun.add(part.index)
                first = Delta(role="assistant", content="")
                yield chunk([ChunkChoice(part.index, first, None, None, reply_id)])
            if delta := _delta(part):
                logprobs = _logprobs(call, body, part.logprobs)
                yield chunk([ChunkChoice(part.index, delta, logprobs, None, reply_id)])
            if part.calls:
                called.add(part.index)
            if part.response is not None:
                done[part.index] = part.response
                reason = finish_reason(part.response, part.index in called)
                yield chunk([ChunkChoice(part.index, Delta(), None, reason, reply_id)])
    if wants_usage:
        responses = [done[i] for i in range(len(requests))]
        yield chunk([], usage_of(responses, len(requests), _limit(body), body.prediction is not None))
    yield DONE


def _delta(part: ReplyPart) -> Delta | None:
    """Return the thought, the text and the tool calls that a part of the reply adds to the message. Return
    None if the part is empty."""
    if not (part.text or part.thought or part.logprobs or part.calls):
        return None
    calls = _call_deltas(part.calls)
    return Delta(UNSET, part.text or UNSET, part.thought or UNSET, calls or UNSET)


def _call_deltas(pieces: Sequence[CallPiece]) -> list[CallDelta]:
    """Return one CallDelta for each tool call to which the pieces belong. A piece is the beginning of a tool
    call (its id and name) or a part of its arguments."""
    found: dict[int, CallDelta] = {}
    for piece in pieces:
        if isinstance(piece, CallBegun):
            function = WrittenFunction("", piece.name)
            found[piece.index] = CallDelta(piece.index, function, piece.id, "function")
        else:
            delta = found.setdefault(piece.index, CallDelta(piece.index, WrittenFunction("")))
            delta.function.arguments += piece.text
    return [*found.values()]


ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a conversation.",
        ChatCompletion,
        body=ChatBody,
        event=ChatChunk,
        statuses=(404, 409),
        links=[RATE_LINK],
        waiting=lambda body: Waiting(failed_event) if body.stream else None,
    )
]
