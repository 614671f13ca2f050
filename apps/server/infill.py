"""This module answers POST /infill, in the form of llama.cpp's server. A model that has infilling tokens
writes the text between two given texts."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ruvmlx.engine.types import GenerationResponse
from ruvmlx.runtime import Runtime

from .bodies import ReplyBody
from .endpoint import Answer, Call, Endpoint, EventStream, Waiting
from .gaps import gap_ids
from .llama_cpp_bodies import InfillBody
from .openai_answers import RATE_LINK, ReplyId, event, failed_event
from .writing import Requests, reply_parts, requests_for, write_replies


class InfillTimings(Struct):
    """The numbers of tokens, and the times in milliseconds, of the prompt (until the first reply token) and
    of the reply (after the first token). prompt_n: the prompt tokens that were not in a KV cache."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class InfillAnswer(Struct):
    """The text that the model writes, or a piece of it. If `stop` is false, the answer is a piece, and it has
    no fields after `id`. id: the id that POST /v1/ratings takes. stop_type: "eos" if the model ended the
    text, "limit" if the limit of tokens ended it, "word" if a text of the request's `stop` ended it.
    stopping_word: the text of `stop` that ended the reply, or ""."""

    content: str
    stop: bool
    model: str
    id: ReplyId
    stop_type: Literal["eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    timings: InfillTimings | UnsetType = UNSET


async def infill(call: Call) -> Answer:
    """Let the model write the text between two given texts. The answer comes at once or as a stream."""
    body: InfillBody = call.body
    texts = [body.input_prefix, body.input_suffix, body.prompt or ""]
    letters = sum(map(len, texts)) + sum(len(extra.text) for extra in body.input_extra or ())
    ids = await call.serving.host.encode(lambda runtime: _prompt_ids(runtime, body), letters)
    limit = body.n_predict if body.n_predict and body.n_predict > 0 else None
    requests = await requests_for(call, _reply_body(call, body), limit, 0, [{"input_ids": ids}])
    if body.stream:
        return EventStream(_pieces(call, requests), Waiting(failed_event))
    [reply] = await write_replies(call, requests)
    return _last(call, reply.response.text, reply.response)


def _reply_body(call: Call, body: InfillBody) -> ReplyBody:
    return ReplyBody(
        model=body.model or call.serving.model_name,
        stop=body.stop,
        seed=None if body.seed == -1 else body.seed,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
    )


def _prompt_ids(runtime: Runtime, body: InfillBody) -> list[int]:
    files = [
        f"{file.filename}\n{file.text}" if file.filename else file.text for file in body.input_extra or ()
    ]
    return gap_ids(runtime.model, body.input_prefix + (body.prompt or ""), body.input_suffix, files)


async def _pieces(call: Call, requests: Requests) -> AsyncGenerator[bytes, None]:
    async with aclosing(reply_parts(call, requests, raw=True)) as parts:
        async for part in parts:
            if part.response is not None:
                yield event(_last(call, part.text, part.response))
            elif part.text:
                yield event(InfillAnswer(part.text, False, call.serving.model_name, requests[0].request_id))


def _last(call: Call, text: str, response: GenerationResponse) -> InfillAnswer:
    is_full = response.finish_reason == "length"
    read, written_tokens = response.prompt_tokens - response.cached_tokens, response.generation_tokens
    decoding = max(0.0, response.latency_ms - response.ttft_ms)
    return InfillAnswer(
        text,
        True,
        call.serving.model_name,
        response.request_id,
        "limit" if is_full else "word" if response.stopped_by else "eos",
        response.stopped_by or "",
        written_tokens,
        response.prompt_tokens,
        response.cached_tokens,
        False,
        InfillTimings(
            read, response.ttft_ms, response.prompt_tps, written_tokens, decoding, response.generation_tps
        ),
    )


ENDPOINTS = [
    Endpoint(
        "POST", "/infill", infill, "Write what fits between two texts.", InfillAnswer, body=InfillBody,
        event=InfillAnswer, statuses=(404,), links=[RATE_LINK],
        waiting=lambda body: Waiting(failed_event) if body.stream else None,
    )
]  # fmt: skip
