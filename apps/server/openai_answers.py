"""This module defines the answers of OpenAI's endpoints, as structs."""

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
    """cached_tokens: the number of prompt tokens that were in a KV cache."""

    cached_tokens: int


class CompletionDetails(Struct):
    """The numbers of drafted tokens, which the server guessed from the prediction or the prompt.
    accepted_prediction_tokens: the drafted tokens that the reply has. rejected_prediction_tokens: all other
    drafted tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    """The numbers of tokens of a request. The prompt of several replies counts once. max_tokens: the longest
    reply that the context had room for; present only if the request allowed a longer reply.
    completion_tokens_details: present only if the request has a prediction."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    max_tokens: int | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class TopLogprob(Struct):
    """A token that the model could have chosen at this position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenInfo(Struct):
    """A token of the reply. logprob: its log-probability at temperature 1, with the adapter."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct):
    """content: one entry for each token of the reply."""

    content: list[TokenInfo] | None
    refusal: None = None


class ErrorFacts(Struct):
    """message: the error in one line. param: the field that is wrong. code: a fixed word that programs can
    test."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct):
    """The body of every error."""

    error: ErrorFacts


ReplyId = Annotated[str, Meta(description="What POST /v1/ratings and `ruvmlx rate` take.")]


def usage_of(
    responses: Sequence[GenerationResponse], per_prompt: int, allowed: int | None, is_predicted: bool = False
) -> Usage:
    """Return the numbers of tokens of a request. responses: the replies in the order of the prompts,
    `per_prompt` replies for each prompt. allowed: the request's limit of a reply in tokens. is_predicted:
    True if the request has a prediction."""
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
    """Return the tokens of the longest reply that the context had room for, if the request allowed a longer
    reply. If the request allowed no longer reply, return UNSET."""
    limits = [response.limit for response in responses if response.limit is not None]
    return UNSET if allowed is None or min(limits, default=allowed) >= allowed else min(limits)


def finish_reason(response: GenerationResponse, called: bool = False) -> FinishReason:
    """Return OpenAI's word for the end of a reply. called: True if the reply has tool calls."""
    if response.finish_reason == "length":
        return "length"
    return "tool_calls" if called else "stop"


def token_infos(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], top: int) -> list[TokenInfo]:
    """Return an entry for each token, with the `top` most likely tokens at its position."""
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
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def failed_event(error: ApiError) -> bytes:
    """Return the event of an error that occurs after the stream has begun. OpenAI's clients raise
    this error."""
    return b"data: " + msgspec.json.encode(openai_error(error)) + b"\n\n"
