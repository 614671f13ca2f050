"""This module answers POST /api/chat and /api/generate, in ollama's form."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ruvmlx.engine.types import GenerationResponse
from ruvmlx.models.config.model import Message
from ruvmlx.models.text.thinking import tag_of

from .endpoint import Answer, Call, Endpoint, EventStream, Waiting
from .errors import ApiError
from .gaps import gap_prompt
from .ollama_bodies import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaReplyBody,
    conversation,
    form_of,
    is_last_use,
    limit_of,
    reply_body,
    thought_of,
    tools_of,
)
from .openai_answers import ReplyId, TokenInfo, token_infos
from .prompts import ChatPrompt, ToolUse, begun_prompt, chat_prompt, formed_fields
from .splitting import arguments_of, joined_calls, without_json
from .writing import ReplyPart, reply_parts, requests_for

NDJSON = "application/x-ndjson"


class OllamaError(Struct):
    """The body of an answer with an error, in ollama's form. error: the error in one line. param, code: the
    wrong field and a fixed word, as in OpenAI's form; errors of ollama's own server do not have these
    fields."""

    error: str
    param: str | None = None
    code: str | None = None


class CalledFunction(Struct):
    """The function of a tool call that the model wrote."""

    name: str
    arguments: dict[str, Any]


class WrittenToolCall(Struct):
    """A tool call that the model wrote."""

    function: CalledFunction
    id: str


class WrittenMessage(Struct):
    """The message that the model wrote, or a piece of it. thinking: the model's thought before the answer."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[WrittenToolCall] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """A reply, or in a stream a piece of a reply. Only the last piece has done_reason, id, the token counts
    and the durations in nanoseconds; if the request has no prompt, only done_reason. id: the id that POST
    /v1/ratings takes."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    id: ReplyId | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenInfo] | UnsetType = UNSET
    message: WrittenMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in ollama's form."""
    return {"error": str(error), "param": error.param, "code": error.code}


def failed_line(error: ApiError) -> bytes:
    """Return the line of JSON that ends a stream with an error."""
    return msgspec.json.encode(ollama_error(error)) + b"\n"


def now() -> str:
    """Return the present time in the notation of ollama's answers."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def chat(call: Call) -> Answer:
    """Answer a conversation. A body without messages only opens or closes the model. The answer is a stream
    of JSON lines, unless the body has `stream: false`."""
    body: OllamaChatBody = call.body
    await _close_after(call, body)
    if not body.messages:
        return await _load_answer(call, body, _chat_words)
    tag = tag_of(call.serving.runtime.model.tokenizer.chat_template)
    prompt = await begun_prompt(call, conversation(body.messages, tag), tools_of(body), form_of(body))
    fields = prompt.fields_with(thought_of(body, tag), "think")
    return await _answer(call, body, ChatPrompt(fields, prompt.new_calls), _chat_words)


async def generate(call: Call) -> Answer:
    """Answer one prompt. If the body has `raw`, the model continues the prompt without the chat template. If
    the body has `suffix`, the model writes the text between the prompt and the suffix."""
    body: OllamaGenerateBody = call.body
    await _close_after(call, body)
    if not body.prompt and not body.suffix:
        return await _load_answer(call, body, _plain_words)
    if body.raw or body.suffix:
        call.ignored.extend(name for name in ("system", "think") if getattr(body, name))
        text: dict[str, Any] = {"prompt": body.prompt}
        if body.suffix:
            text = {"input_ids": await gap_prompt(call, body.prompt or "", body.suffix)}
        fields = await formed_fields(call, text, form_of(body))
        return await _answer(call, body, ChatPrompt(fields), _plain_words)
    tag = tag_of(call.serving.runtime.model.tokenizer.chat_template)
    system = [Message("system", body.system)] if body.system else []
    prompt = await chat_prompt(call, [*system, Message("user", body.prompt or "")], ToolUse(), form_of(body))
    fields = {**prompt.fields, "thinking": thought_of(body, tag)}
    return await _answer(call, body, ChatPrompt(fields), _plain_words)


Words = Callable[
    [Sequence[ReplyPart]], dict[str, Any]
    # A function of this type takes the thought and the text of a reply's parts, and returns them as fields of
    # an OllamaAnswer.
]


def _chat_words(parts: Sequence[ReplyPart]) -> dict[str, Any]:
    text, thought = "".join(p.text for p in parts), "".join(p.thought for p in parts)
    calls = _calls(parts) if parts and parts[-1].response is not None else []
    return {"message": WrittenMessage("assistant", text, thought or UNSET, calls or UNSET)}


def _plain_words(parts: Sequence[ReplyPart]) -> dict[str, Any]:
    text, thought = "".join(p.text for p in parts), "".join(p.thought for p in parts)
    return {"response": text, "thinking": thought or UNSET}


def _calls(parts: Sequence[ReplyPart]) -> list[WrittenToolCall]:
    """Return the tool calls, without the last call if a limit cut the reply within this call."""
    response = parts[-1].response
    found = []
    calls = joined_calls([piece for part in parts for piece in part.calls])
    for made in calls:
        arguments = arguments_of(made)
        if arguments is None:
            if made is calls[-1] and response is not None and response.finish_reason == "length":
                continue
            arguments = without_json(made)
        found.append(WrittenToolCall(CalledFunction(made.name, arguments), made.id))
    return found


async def _answer(call: Call, body: OllamaReplyBody, prompt: ChatPrompt, words: Words) -> Answer:
    logprobs = max(1, body.top_logprobs or 0) if body.logprobs else 0
    begun = time.monotonic_ns()
    requests = await requests_for(call, reply_body(body), limit_of(body), logprobs, [prompt.fields])
    lines = _answers(call, body, reply_parts(call, requests, new_calls=prompt.new_calls), words, begun)
    if body.stream is not False:
        return EventStream(_encode_lines(lines), _waiting_form(body, words))
    async with aclosing(lines) as answers:
        parts = [answer async for answer in answers]
    return _join_answers(parts)


async def _answers(
    call: Call,
    body: OllamaReplyBody,
    arriving: AsyncGenerator[ReplyPart, None],
    words: Words,
    begun: int,
) -> AsyncGenerator[OllamaAnswer, None]:
    """Yield an answer for each part of the reply that has text, a thought or log-probabilities, and then the
    last answer. Only the last answer has the tool calls."""
    held: list[ReplyPart] = []
    async with aclosing(arriving) as parts:
        async for part in parts:
            infos = _infos(call, body, part)
            if part.calls or part.response is not None:
                held.append(part)
            if part.response is not None:
                said = words([ReplyPart(0, part.thought, part.text), _only_calls(held, part.response)])
                yield _last(call, body, part.response, said, infos, begun)
            elif part.text or part.thought or infos:
                yield OllamaAnswer(
                    model=body.model, created_at=now(), done=False, logprobs=infos, **words([part])
                )


def _only_calls(parts: Sequence[ReplyPart], response: GenerationResponse) -> ReplyPart:
    return ReplyPart(0, response=response, calls=[piece for part in parts for piece in part.calls])


def _infos(call: Call, body: OllamaReplyBody, part: ReplyPart) -> list[TokenInfo] | UnsetType:
    if not (body.logprobs and part.logprobs):
        return UNSET
    return token_infos(call.serving.runtime.model.tokenizer, part.logprobs, body.top_logprobs or 0)


def _last(
    call: Call,
    body: OllamaReplyBody,
    response: GenerationResponse,
    said: dict[str, Any],
    infos: list[TokenInfo] | UnsetType,
    begun: int,
) -> OllamaAnswer:
    """Return the last answer of a reply. begun: the time (time.monotonic_ns()) when the model was open and
    the prompt was complete."""
    first = round(1e6 * response.ttft_ms)
    return OllamaAnswer(
        model=body.model,
        created_at=now(),
        done=True,
        done_reason="length" if response.finish_reason == "length" else "stop",
        id=response.request_id,
        total_duration=time.monotonic_ns() - call.arrived,
        load_duration=begun - call.arrived,
        prompt_eval_count=response.prompt_tokens,
        prompt_eval_duration=first,
        eval_count=response.generation_tokens,
        eval_duration=max(0, round(1e6 * response.latency_ms) - first),
        logprobs=infos,
        **said,
    )


def _join_answers(parts: Sequence[OllamaAnswer]) -> OllamaAnswer:
    """Join the pieces of a streamed reply into one answer."""
    last = parts[-1]
    infos = [info for part in parts for info in part.logprobs or ()]
    last = msgspec.structs.replace(last, logprobs=infos or UNSET)
    if last.message is UNSET:
        thought = "".join(part.thinking or "" for part in parts)
        text = "".join(part.response or "" for part in parts)
        return msgspec.structs.replace(last, response=text, thinking=thought or UNSET)
    messages = [part.message for part in parts if part.message is not UNSET]
    text, thought = "".join(m.content for m in messages), "".join(m.thinking or "" for m in messages)
    whole = msgspec.structs.replace(messages[-1], content=text, thinking=thought or UNSET)
    return msgspec.structs.replace(last, message=whole)


def _waiting_form(body: OllamaReplyBody, words: Words) -> Waiting:
    alive = OllamaAnswer(model=body.model, created_at=now(), done=False, **words([]))
    return Waiting(failed_line, _line(alive), NDJSON)


def _waiting_for(words: Words) -> Callable[[Any], Waiting | None]:
    return lambda body: None if body.stream is False else _waiting_form(body, words)


async def _close_after(call: Call, body: OllamaReplyBody) -> None:
    """Close the model after this request if the body asks for it with `keep_alive: 0`."""
    if is_last_use(body.keep_alive):
        call.models.close_later(await call.models.find(body.model))


async def _load_answer(call: Call, body: OllamaReplyBody, words: Words) -> Answer:
    """Answer a request without a prompt. Clients send a request without a prompt only to load or to close the
    model."""
    closes = is_last_use(body.keep_alive)
    if not closes:
        await call.serving.adapter_of(body.model, None, call.salt)
    answer = OllamaAnswer(
        model=body.model,
        created_at=now(),
        done=True,
        done_reason="unload" if closes else "load",
        **words([]),
    )
    if body.stream is False:
        return answer

    async def once() -> AsyncGenerator[OllamaAnswer, None]:
        yield answer

    return EventStream(_encode_lines(once()), _waiting_form(body, words))


async def _encode_lines(answers: AsyncGenerator[OllamaAnswer, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(answers) as each:
        async for answer in each:
            yield _line(answer)


def _line(answer: OllamaAnswer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


CLIENTS: dict[str, Any] = {"errors": ollama_error, "error_body": OllamaError, "statuses": (404, 409)}
ENDPOINTS = [
    Endpoint(
        "POST", "/api/chat", chat, "Answer a conversation, in ollama's form.", OllamaAnswer,
        body=OllamaChatBody, event=OllamaAnswer, event_type=NDJSON, **CLIENTS,
        opens=lambda body: bool(body.messages) or not is_last_use(body.keep_alive),
        waiting=_waiting_for(_chat_words),
    ),
    Endpoint(
        "POST", "/api/generate", generate, "Answer a prompt, in ollama's form.", OllamaAnswer,
        body=OllamaGenerateBody, event=OllamaAnswer, event_type=NDJSON, **CLIENTS,
        opens=lambda body: bool(body.prompt or body.suffix) or not is_last_use(body.keep_alive),
        waiting=_waiting_for(_plain_words),
    ),
]  # fmt: skip
