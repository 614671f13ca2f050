"""What OpenAI's endpoints answer, as structs."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ruvmlx.engine.types import GenerationResponse, TokenLogprob
from ruvmlx.models.config.model import Tokenizer

from .errors import ApiError, openai_error

FinishReason = Literal["stop", "length", "tool_calls"]
RATE_LINK = {"operationId": "rate", "requestBody": {"id": "$response.body#/id", "rating": "up"}}
DONE = b"data: [DONE]\n\n"


class PromptDetails(Struct):
    """cached_tokens: tokens of the prompt that were in a KV cache already."""

    cached_tokens: int


class CompletionDetails(Struct):
    """Tokens that were guessed, from the prompt too: those that the reply has, and the others."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    """Tokens of a request. The prompt of several replies is counted once. max_tokens: the longest reply that
    there was room for; only where the request allowed a longer one. completion_tokens_details: only for
    a request with a prediction."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    max_tokens: int | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class TopLogprob(Struct):
    """A token that could have come here."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenInfo(Struct):
    """A token of the reply. logprob: at temperature 1, the adapter applied."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct):
    """One entry for each token."""

    content: list[TokenInfo] | None
    refusal: None = None


class ErrorFacts(Struct):
    """message: one line. param: the field that is wrong. code: a word that programs may test."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct):
    """Every error."""

    error: ErrorFacts


ReplyId = Annotated[str, Meta(description="What POST /v1/ratings and `ruvmlx rate` take.")]


def usage_of(
    responses: Sequence[GenerationResponse], per_prompt: int, allowed: int | None, is_predicted: bool = False
) -> Usage:
    """responses: in the order of their requests, with `per_prompt` replies to each prompt. allowed: tokens of
    a reply, as the request says. is_predicted: the request has a prediction."""
    first = responses[::per_prompt]
    prompt = sum(response.prompt_tokens for response in first)
    cached = sum(response.cached_tokens for response in first)
    generated = sum(response.generation_tokens for response in responses)
    room = room_of(responses, allowed)
    drafted, accepted = (
        sum(counts) for counts in zip(*((r.drafted, r.accepted) for r in responses), strict=True)
    )
    details = CompletionDetails(accepted, drafted - accepted) if is_predicted else UNSET
    return Usage(prompt, generated, prompt + generated, PromptDetails(cached), room, details)


def room_of(responses: Sequence[GenerationResponse], allowed: int | None) -> int | UnsetType:
    """Tokens of the longest reply that there was room for, if the request allowed a longer one."""
    limits = [response.limit for response in responses if response.limit is not None]
    return UNSET if allowed is None or min(limits, default=allowed) >= allowed else min(limits)


def finish_reason(response: GenerationResponse, called: bool = False) -> FinishReason:
    """called: the reply has calls of tools."""
    if response.finish_reason == "length":
        return "length"
    return "tool_calls" if called else "stop"


def token_infos(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], top: int) -> list[TokenInfo]:
    """Tokens with the `top` most likely ones at each place."""
    return [
        TokenInfo(
            *_token(tokenizer, entry.token_id, entry.logprob),
            [TopLogprob(*_token(tokenizer, token_id, value)) for token_id, value in entry.top[:top]],
        )
        for entry in logprobs
    ]


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    data = tokenizer.token_bytes(token_id)
    return data.decode("utf-8", "replace"), max(logprob, -9999.0), list(data)


def event(data: Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def failed_event(error: ApiError) -> bytes:
    """An error after the stream has begun; OpenAI's clients raise it."""
    return b"data: " + msgspec.json.encode(openai_error(error)) + b"\n\n"
