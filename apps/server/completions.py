"""This module answers POST /v1/completions. The model continues a text, which it reads without a chat
template."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ruvmlx.engine.types import GenerationResponse, TokenLogprob

from .bodies import MOST_PROMPTS, CompletionBody, refuse_true
from .endpoint import Answer, Call, Endpoint, EventStream, Waiting
from .errors import ApiError
from .gaps import gap_prompt
from .openai_answers import (
    DONE,
    RATE_LINK,
    FinishReason,
    ReplyId,
    Usage,
    event,
    failed_event,
    finish_reason,
    token_infos,
    usage_of,
)
from .writing import Requests, reply_parts, requests_for, write_replies


class TextLogprobs(Struct):
    """The log-probabilities of a reply. Each list has one entry for each token. text_offset: the number of
    characters of the reply before the token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Struct):
    """One reply, or a piece of a streamed reply. If the model thinks, the thought is part of the text."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    reply_id: ReplyId


class TextCompletion(Struct):
    """The answer with all replies, or one event of a stream. id: the id of the first reply."""

    id: ReplyId
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


async def completions(call: Call) -> Answer:
    """Let the model continue each prompt `n` times. If the request has a suffix, the model writes the text
    between the prompt and the suffix. The answer comes at once or as a stream."""
    body: CompletionBody = call.body
    refuse_true(body.echo, "echo")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: needs stream: true.", "stream_options", "invalid_combination")
    prompts = _prompts(body.prompt) if not body.suffix else [await _gap(call, body.prompt, body.suffix)]
    logprobs = 0 if body.logprobs is None else max(1, body.logprobs)
    requests = await requests_for(call, body, body.max_tokens, logprobs, prompts)
    if body.stream:
        return EventStream(_chunks(call, body, requests), Waiting(failed_event))
    choices, responses = [], []
    for index, reply in enumerate(await write_replies(call, requests)):
        told = TokenTally(call, body)
        entries = told.entries(reply.logprobs)
        response = reply.response
        choices.append(
            TextChoice(index, response.text, entries, finish_reason(response), response.request_id)
        )
        responses.append(response)
    usage = usage_of(responses, body.n or 1, body.max_tokens)
    id, now = requests[0].request_id, int(time.time())
    return TextCompletion(id, "text_completion", now, body.model, choices, usage)


def _prompts(prompt: str | list[Any]) -> list[dict[str, Any]]:
    """Return for each prompt the fields of a GenerationRequest."""
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) for item in prompt):
        return [{"input_ids": prompt}]
    items = prompt if isinstance(prompt, list) else [prompt]
    if any(isinstance(item, int) for item in items) or len({type(item) for item in items}) != 1:
        message = "prompt: give a text, texts, token ids, or lists of token ids, not a mixture."
        raise ApiError(400, message, "prompt", "invalid_value")
    if len(items) > MOST_PROMPTS:
        raise ApiError(400, f"prompt: at most {MOST_PROMPTS} prompts at once.", "prompt", "invalid_value")
    return [{"prompt": item} if isinstance(item, str) else {"input_ids": item} for item in items]


async def _gap(call: Call, prompt: str | list[Any], suffix: str) -> dict[str, Any]:
    if not isinstance(prompt, str):
        raise ApiError(400, "suffix: needs one text as the prompt.", "suffix", "invalid_combination")
    return {"input_ids": await gap_prompt(call, prompt, suffix)}


class TokenTally:
    """An object of this class puts the log-probabilities of one reply into the form of the answer, piece by
    piece."""

    def __init__(self, call: Call, body: CompletionBody):
        self._tokenizer, self._top = call.serving.runtime.model.tokenizer, body.logprobs
        self._characters = 0

    def entries(self, logprobs: Sequence[TokenLogprob]) -> TextLogprobs | None:
        """Return the log-probabilities of the next tokens of the reply. Return None if the list of tokens is
        empty, or if the client did not ask for log-probabilities."""
        if self._top is None or not logprobs:
            return None
        infos, offsets = token_infos(self._tokenizer, logprobs, self._top), []
        for info in infos:
            offsets.append(self._characters)
            self._characters += len(info.token)
        return TextLogprobs(
            [info.token for info in infos],
            [info.logprob for info in infos],
            [{top.token: top.logprob for top in info.top_logprobs} for info in infos],
            offsets,
        )


async def _chunks(call: Call, body: CompletionBody, requests: Requests) -> AsyncGenerator[bytes, None]:
    id, created = requests[0].request_id, int(time.time())
    wants_usage = bool(body.stream_options and body.stream_options.include_usage)
    told = [TokenTally(call, body) for _ in requests]
    done: dict[int, GenerationResponse] = {}

    def chunk(choices: list[TextChoice], usage: Usage | None = None) -> bytes:
        counted: Usage | UnsetType | None = usage if wants_usage else UNSET
        return event(TextCompletion(id, "text_completion", created, body.model, choices, counted))

    async with aclosing(reply_parts(call, requests, raw=True)) as parts:
        async for part in parts:
            i, reply_id = part.index, requests[part.index].request_id
            if part.text or part.logprobs:
                entries = told[i].entries(part.logprobs)
                yield chunk([TextChoice(i, part.text, entries, None, reply_id)])
            if part.response is not None:
                done[i] = part.response
                yield chunk([TextChoice(i, "", None, finish_reason(part.response), reply_id)])
    if wants_usage:
        responses = [done[i] for i in range(len(requests))]
        yield chunk([], usage_of(responses, body.n or 1, body.max_tokens))
    yield DONE


ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/completions",
        completions,
        "Continue a text.",
        TextCompletion,
        body=CompletionBody,
        event=TextCompletion,
        statuses=(404, 409),
        links=[RATE_LINK],
        waiting=lambda body: Waiting(failed_event) if body.stream else None,
    )
]
