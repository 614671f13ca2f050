"""Writes the replies to requests: parts of them as they arrive, or all of them when they are done."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ruvmlx.engine.types import GenerationRequest, GenerationResponse, Patience, TokenLogprob
from ruvmlx.errors import MemoryBusy, RuvmlxError
from ruvmlx.models.text.tool_calls import ParsedCall

from .bodies import ReplyBody
from .endpoint import Call
from .errors import ApiError, api_error, busy
from .serving import Serving
from .splitting import CallPiece, NewCalls, SplitText, joined_calls

Requests = Sequence[GenerationRequest]
LONG_SYSTEM = 1000  # characters of a system prompt that is worth keeping: some pages of tokens
_OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "repetition_window",
)  # fmt: skip


@dataclass(frozen=True)
class ReplyPart:
    """A piece of reply number `index`. All but `index` may be empty: then its prompt is being read.

    thought, text: what the model thinks, and what it answers. calls: of tools, behind the text.
    prompt_tokens: 0 if not known yet. response: with the last part alone.
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
    """A whole reply."""

    response: GenerationResponse
    thought: str = ""
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[ParsedCall] = field(default_factory=list)


async def requests_for(
    call: Call, body: ReplyBody, limit: int | None, logprobs: int, prompts: Sequence[dict[str, Any]]
) -> list[GenerationRequest]:
    """The requests for body.n replies to each prompt. limit: longest reply, if the client says.

    prompts: fields of a GenerationRequest: messages, prompt or input_ids, and what belongs to them.
    """
    serving, runtime = call.serving, call.serving.runtime
    adapter = await serving.adapter_of(body.model, body.adapter, call.salt)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    asked = {name: getattr(body, name) for name in _OPTIONS}
    asked["logit_bias"] = _biases(body, runtime.model.shape.vocab_size)
    count = body.n or 1
    patience = Patience(serving.limits.memory_seconds, serving.limits.memory_waits)
    return [
        GenerationRequest(
            **prompt,
            max_new_tokens=limit or serving.max_tokens or runtime.model.context,
            sampling=runtime.sampling(**asked, seed=None if body.seed is None else body.seed + i),
            stop=stop,
            logprobs=logprobs,
            adapter_id=adapter,
            cache_salt=call.salt_for(body.user),
            tenant=call.salt,
            resumable=i == 0 and is_likely_to_go_on(prompt),  # the others share its pages
            # Once the first one runs, the others wait for it and for each other: its work is not thrown away.
            patience=Patience() if i or k else patience,
        )
        for k, prompt in enumerate(prompts)
        for i in range(count)
    ]


def is_likely_to_go_on(prompt: Mapping[str, Any]) -> bool:
    """Whether requests will come that begin like this one, so that its cache is worth keeping for after a
    restart: a conversation with more than one turn, or with much text before the first."""
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


async def reply_parts(
    call: Call, requests: Requests, raw: bool = False, new_calls: NewCalls = None
) -> AsyncGenerator[ReplyPart, None]:
    """Parts of all replies, as they arrive. If the caller stops iterating, the replies end.

    raw: the thought is part of the text.
    """
    serving, arrived = call.serving, asyncio.Queue[ReplyPart | Exception]()
    over = serving.waiting + len(requests) - serving.limits.replies
    if over > 0:
        seconds = serving.times.until_free(over / max(1, serving.waiting))
        raise busy(f"{serving.waiting} replies are being written; try again.", seconds)
    with serving.answering(requests):
        for index, request in enumerate(requests):
            text = SplitText(raw or bool(request.opening), new_calls)
            serving.start(_pump(call, index, request, arrived, text))
        unfinished = len(requests)
        while unfinished:
            part = await arrived.get()
            if isinstance(part, Exception):
                try:
                    raise part
                finally:
                    del part  # it holds this frame
            if part.response is not None:
                unfinished -= 1
            yield part


async def written(call: Call, requests: Requests, new_calls: NewCalls = None) -> list[WrittenReply]:
    """All replies, whole."""
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
    arrived: "asyncio.Queue[ReplyPart | Exception]",
    text: SplitText,
) -> None:
    """Read one reply to its end, also when its client has gone: `request.cancel` is set then."""
    try:
        with call.serving.times.reply():
            async for part in _parts(call, index, request, text):
                arrived.put_nowait(part)
    except RuvmlxError as error:
        arrived.put_nowait(
            _client_error(call.serving, error).with_traceback(None)
        )  # that would hold this frame
    except Exception as error:  # noqa: BLE001 - whoever waits for the reply handles it
        arrived.put_nowait(error)


async def _parts(
    call: Call, index: int, request: GenerationRequest, text: SplitText
) -> AsyncGenerator[ReplyPart, None]:
    begun, has_token, calls = time.monotonic(), False, list[CallPiece]()
    of_chat = () if request.session_id is None else (request.session_id,)
    async for chunks in call.serving.host.submit(request, *of_chat):
        response = chunks[-1].response
        if not has_token and chunks[-1].generated:
            has_token = True
            call.serving.metrics.observe("ruvmlx_first_token_seconds", time.monotonic() - begun)
        if response is not None:
            _count(call, response)
        if response is not None and response.finish_reason == "cancelled":
            raise ApiError(503, "the server is stopping; the reply was ended early.")
        logprobs = [token for chunk in chunks for token in chunk.logprobs]
        new = "".join(chunk.text for chunk in chunks)
        *others, last = text.feed(new, ends=response is not None)
        calls += [piece for part in (*others, last) for piece in part.calls]
        prompt = max(chunk.prompt_tokens for chunk in chunks)
        for part in others:
            yield ReplyPart(index, part.thought, part.text, (), prompt, None, part.calls)
        if response is not None:
            for made in joined_calls(calls):
                call.serving.written_calls.add(made)
        yield ReplyPart(index, last.thought, last.text, logprobs, prompt, response, last.calls)


def _client_error(serving: Serving, error: RuvmlxError) -> ApiError:
    """The error as clients see it, with the time after which there may be memory."""
    found = api_error(error)
    if isinstance(error, MemoryBusy):
        taken = max(1, error.budget - error.free)
        found.seconds = serving.times.until_free((error.need - error.free) / taken)
    return found


def _count(call: Call, response: GenerationResponse) -> None:
    """Add a reply's numbers to the request's log line and to the metrics."""
    counts = {
        "prompt": response.prompt_tokens,
        "cached": response.cached_tokens,
        "generated": response.generation_tokens,
    }
    for name, tokens in counts.items():
        call.facts[f"{name}_tokens"] = call.facts.get(f"{name}_tokens", 0) + tokens
        call.serving.metrics.add(f"ruvmlx_{name}_tokens_total", tokens)
    call.serving.metrics.add("ruvmlx_drafted_tokens_total", response.drafted)
    call.serving.metrics.add("ruvmlx_accepted_tokens_total", response.accepted)
    call.facts["tokens_per_second"] = round(response.generation_tps, 1)
