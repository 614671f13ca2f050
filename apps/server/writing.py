"""This module lets the model write the replies to requests. The module yields parts of the replies as they
arrive, or returns whole replies."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ruvmlx.engine.types import GenerationRequest, GenerationResponse, Patience, TokenLogprob
from ruvmlx.errors import MemoryBusy, RuvmlxError
from ruvmlx.models.text.tool_calls import ParsedCall

from .bodies import ReplyBody, repetition_of
from .endpoint import Call
from .errors import ApiError, busy, request_error
from .serving import Serving
from .splitting import CallPiece, NewCalls, SplitText, joined_calls

Requests = Sequence[GenerationRequest]
LONG_SYSTEM = 1000  # characters; KV pages of a system prompt of this length or more are kept for a restart
_OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True)
class ReplyPart:
    """A piece of reply number `index`. If all fields besides `index` and `prompt_tokens` are empty, the model
    still reads the prompt, or the newest text is held back because later text can change its meaning.

    thought, text: pieces of the thought and of the answer. calls: pieces of tool calls, which come after the
    text. prompt_tokens: the number of prompt tokens; 0 if it is not known yet. response: the figures of the
    whole reply; only the last part has them.
    """

    index: int
    thought: str = ""
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    prompt_tokens: int = 0
    response: GenerationResponse | None = None
    calls: Sequence[CallPiece] = ()


@dataclass
class WrittenReply:
    """A whole reply: its thought, its text and its tool calls."""

    response: GenerationResponse
    thought: str = ""
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[ParsedCall] = field(default_factory=list)


async def requests_for(
    call: Call, body: ReplyBody, limit: int | None, logprobs: int, prompts: Sequence[dict[str, Any]]
) -> list[GenerationRequest]:
    """Return the requests for body.n replies to each prompt. limit: the maximum number of tokens of a
    reply, or None if the client set no limit.

    prompts: for each prompt, the fields of a GenerationRequest: messages, prompt or input_ids, and for
    example `tools`.
    """
    serving, runtime = call.serving, call.serving.runtime
    adapter = await serving.adapter_of(body.model, body.adapter, call.salt)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    asked = {name: getattr(body, name) for name in _OPTIONS}
    asked["repetition_penalty"], asked["repetition_window"] = repetition_of(body)
    asked["logit_bias"] = _biases(body, runtime.model.shape.vocab_size)
    count = body.n or 1
    patience = Patience(serving.limits.memory_seconds, serving.limits.memory_waits)
    return [
        GenerationRequest(
            **prompt,
            max_new_tokens=limit or serving.max_tokens or runtime.model.context,
            sampling=runtime.writer.sampling(**asked, seed=_seed(body.seed, i)),
            stop=stop,
            logprobs=logprobs,
            adapter_id=adapter,
            cache_salt=call.salt_for(body.user),
            tenant=call.salt,
            # the other replies to the prompt use the KV pages of the first reply
            resumable=i == 0 and is_likely_to_go_on(prompt),
            # Once the first reply has begun, the other replies wait without a time limit, so that the work on
            # the first reply is not lost.
            patience=Patience() if i or k else patience,
        )
        for k, prompt in enumerate(prompts)
        for i in range(count)
    ]


async def prompt_tokens(call: Call, model: str, adapter: str | None, prompt: Mapping[str, Any]) -> int:
    """Return the number of tokens of a prompt without a reply to it. prompt: as in `requests_for`."""
    adapter_id = await call.serving.adapter_of(model, adapter, call.salt)
    request = GenerationRequest(**prompt, adapter_id=adapter_id, untouched=adapter_id == "")
    known = await call.serving.host.encode_request(request)
    ready = await call.serving.host.call_between(lambda runtime: runtime.writer.prepare_request(known))
    return len(ready.input_ids or ())


def _seed(seed: int | None, index: int) -> int | None:
    """Return the seed of the reply with this index. A negative seed counts from the end of the seeds."""
    return None if seed is None else (seed + index) % 2**63


def is_likely_to_go_on(prompt: Mapping[str, Any]) -> bool:
    """Return True if later requests probably begin with this prompt, so that its KV cache is worth keeping
    for a restart. Such a prompt has more than one turn, a long system prompt, or tools."""
    messages = prompt.get("messages") or ()
    turns = [message for message in messages if message.role != "system"]
    before = sum(len(message.content) for message in messages if message.role == "system")
    return len(turns) > 1 or before >= LONG_SYSTEM or bool(prompt.get("tools"))


def _biases(body: ReplyBody, vocab: int) -> tuple[tuple[int, float], ...] | None:
    if body.logit_bias is None:
        return None
    biases = tuple((int(token), bias) for token, bias in body.logit_bias.items())
    unknown = next((token for token, _ in biases if token >= vocab), None)
    if unknown is not None:
        message = f"logit_bias: there is no token {unknown}; the model has tokens 0 to {vocab - 1}."
        raise ApiError(400, message, "logit_bias")
    return biases


def check_room(serving: Serving, count: int) -> None:
    """Raise ApiError, 429, if the server has no room now for `count` more replies, or 400 if the server never
    writes so many replies at once."""
    most = serving.limits.replies
    if count > most:
        message = f"n: this request asks for {count} replies; the server writes at most {most} at once."
        raise ApiError(400, f"{message} Send fewer prompts or a smaller n.", "n")
    over = serving.waiting + count - most
    if over > 0:
        seconds = serving.times.until_free(over / max(1, serving.waiting))
        raise busy(f"{serving.waiting} replies are being written; try again.", seconds)


async def reply_parts(
    call: Call,
    requests: Requests,
    raw: bool = False,
    new_calls: NewCalls = None,
    has_room: bool = False,
    unanswered: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[ReplyPart, None]:
    """Yield the parts of all replies as they arrive. If the caller stops the iteration, all replies end.
    Raise the errors of `check_room`, unless `has_room` says that the caller has called it.

    raw: True if the thought stays in the text of the answer; the thought also stays there if the client has
    begun the reply. new_calls: a function that makes the parser of tool calls, or None. unanswered: a
    function that is called for each reply that an error, or the leaving of the client, ends before its first
    text.
    """
    serving, arrived = call.serving, asyncio.Queue[ReplyPart | BaseException]()
    if not has_room:
        check_room(serving, len(requests))
    with serving.answering(requests):
        for index, request in enumerate(requests):
            text = SplitText(raw or bool(request.opening), new_calls)
            serving.start(_pump(call, index, request, arrived, text, unanswered))
        unfinished = len(requests)
        while unfinished:
            part = await arrived.get()
            if isinstance(part, BaseException):
                try:
                    raise part
                finally:
                    del part  # the error keeps this frame alive, and the frame would keep the part alive
            if part.response is not None:
                unfinished -= 1
            yield part


async def write_replies(call: Call, requests: Requests, new_calls: NewCalls = None) -> list[WrittenReply]:
    """Return all replies, each as a whole."""
    parts: list[list[ReplyPart]] = [[] for _ in requests]
    async with aclosing(reply_parts(call, requests, new_calls=new_calls)) as arriving:
        async for part in arriving:
            parts[part.index].append(part)
    return [_join_parts(each) for each in parts]


def _join_parts(parts: Sequence[ReplyPart]) -> WrittenReply:
    response = parts[-1].response
    assert response is not None
    return WrittenReply(
        response,
        "".join(part.thought for part in parts),
        "".join(part.text for part in parts),
        [token for part in parts for token in part.logprobs],
        joined_calls([piece for part in parts for piece in part.calls]),
    )


async def _pump(
    call: Call,
    index: int,
    request: GenerationRequest,
    arrived: "asyncio.Queue[ReplyPart | BaseException]",
    text: SplitText,
    unanswered: Callable[[], Awaitable[None]] | None,
) -> None:
    """Read the chunks of one reply to its end, and put its parts into the queue `arrived`. If the client
    leaves, `request.cancel` is set, and the reply ends early. unanswered: as in `reply_parts`."""
    has_text = False
    try:
        with call.serving.times.reply():
            async for part in _parts(call, index, request, text):
                has_text = has_text or bool(part.text or part.thought)
                arrived.put_nowait(part)
    except BaseException as error:  # noqa: BLE001 - the waiting task raises it, also a panic in Rust
        if unanswered is not None and not has_text:
            await unanswered()
        if isinstance(error, RuvmlxError):
            # the traceback of a raised error would keep this frame alive
            error = _client_error(call, error).with_traceback(None)
        arrived.put_nowait(error)


async def _parts(
    call: Call, index: int, request: GenerationRequest, text: SplitText
) -> AsyncGenerator[ReplyPart, None]:
    begun, has_token, calls, told = time.monotonic(), False, list[CallPiece](), dict[str, int]()
    of_chat = () if request.session_id is None else (request.session_id,)
    _tell(call, told, {"generated": 0})
    async for chunks in call.serving.host.submit(request, *of_chat):
        response = chunks[-1].response
        read = max(chunk.prefilled for chunk in chunks)
        _tell(call, told, {"prompt": read, "cached": 0, "generated": chunks[-1].generated})
        if not has_token and chunks[-1].generated:
            has_token = True
            call.serving.metrics.observe("ruvmlx_first_token_seconds", time.monotonic() - begun)
        for note in filter(None, (chunk.note for chunk in chunks)):
            call.serving.log.write("note", {"reply": request.request_id, "note": json.dumps(note)})
        if response is not None:
            _count(call, response, told)
        if response is not None and response.finish_reason == "cancelled":
            raise ApiError(503, "the server is stopping; the reply was ended early.", code="stopping")
        logprobs = [token for chunk in chunks for token in chunk.logprobs]
        new = "".join(chunk.text for chunk in chunks)
        is_cut = response is not None and response.finish_reason == "length"
        *others, last = text.feed(new, response is not None, is_cut)
        calls += [piece for part in (*others, last) for piece in part.calls]
        prompt = max(chunk.prompt_tokens for chunk in chunks)
        for part in others:
            yield ReplyPart(index, part.thought, part.text, (), prompt, None, part.calls)
        if response is not None:
            for made in joined_calls(calls):
                call.serving.written_calls.add(made)
        yield ReplyPart(index, last.thought, last.text, logprobs, prompt, response, last.calls)


def _client_error(call: Call, error: RuvmlxError) -> ApiError:
    """Return an error of the runtime as an ApiError for the client. If the cause is a lack of memory, the
    ApiError has the time after which memory can be free."""
    found = request_error(error, call.body)
    if isinstance(error, MemoryBusy):
        taken = max(1, error.budget - error.free)
        found.seconds = call.serving.times.until_free((error.need - error.free) / taken)
    return found


def _tell(call: Call, told: dict[str, int], counts: Mapping[str, int]) -> None:
    """Bring the facts of the request up to the numbers of tokens of one reply. If the client leaves, the log
    shows the numbers until then. told: the largest numbers of this reply so far, which the facts include."""
    for name, tokens in counts.items():
        more = max(0, tokens - told.get(name, 0))
        call.facts[f"{name}_tokens"] = call.facts.get(f"{name}_tokens", 0) + more
        told[name] = told.get(name, 0) + more


def _count(call: Call, response: GenerationResponse, told: dict[str, int]) -> None:
    """Add the numbers of tokens of a reply to the request's line in the log and to the metrics."""
    counts = {
        "prompt": response.prompt_tokens,
        "cached": response.cached_tokens,
        "generated": response.generation_tokens,
    }
    _tell(call, told, counts)
    for name, tokens in counts.items():
        call.serving.metrics.add(f"ruvmlx_{name}_tokens_total", tokens)
    call.serving.metrics.add("ruvmlx_drafted_tokens_total", response.drafted)
    call.serving.metrics.add("ruvmlx_accepted_tokens_total", response.accepted)
    if response.quality is not None:
        call.serving.metrics.observe("ruvmlx_reply_quality", response.quality)
    call.facts["tokens_per_second"] = round(response.generation_tps, 1)
