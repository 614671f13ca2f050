"""This module defines as structs the parts that the answers of OpenAI's endpoints share."""

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
    """Details about the prompt tokens. cached_tokens: the number of prompt tokens that were in a KV cache."""

    cached_tokens: int


class CompletionDetails(Struct):
    """The numbers of drafted tokens. The server drafted (guessed) these tokens, for example from the
    prediction, the earlier text, or with a draft model. accepted_prediction_tokens: the drafted tokens that
    are in the reply. rejected_prediction_tokens: the drafted tokens that are not in the reply."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    """The numbers of tokens of a request. If a prompt has several replies, the tokens of the prompt are
    counted once. max_tokens: the longest reply that the context had room for; this field is present only if
    the request allowed a longer reply. completion_tokens_details: this field is present only if the request
    has a prediction."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    max_tokens: int | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class TopLogprob(Struct):
    """One of the most likely tokens at a position of the reply."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenInfo(Struct):
    """A token of the reply. logprob: the token's log-probability at temperature 1, by the model with its
    adapter."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct):
    """The log-probabilities of a reply. content: one entry for each token of the reply, without the tokens of
    a stop text."""

    content: list[TokenInfo] | None
    refusal: None = None


class ErrorFacts(Struct):
    """The facts of an error. message: the error in one line. param: the name of the wrong field. code: a
    fixed word that programs can test."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct):
    """The body of an answer with an error, in OpenAI's form."""

    error: ErrorFacts


ReplyId = Annotated[str, Meta(description="What POST /v1/ratings and `ruvmlx rate` take.")]


def usage_of(
    responses: Sequence[GenerationResponse], per_prompt: int, allowed: int | None, is_predicted: bool = False
) -> Usage:
    """Return the numbers of tokens of a request. responses: the replies in the order of the prompts.
    per_prompt: the number of replies to each prompt. allowed: the maximum number of tokens of a reply that
    the request allows. is_predicted: True if the request has a prediction."""
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
    """Return the number of tokens of the longest reply that the context had room for; for several replies,
    the smallest of these numbers. Return UNSET if the request did not allow a longer reply."""
    limits = [response.limit for response in responses if response.limit is not None]
    return UNSET if allowed is None or min(limits, default=allowed) >= allowed else min(limits)


def finish_reason(response: GenerationResponse, called: bool = False) -> FinishReason:
    """Return OpenAI's word for the reason why a reply ended. called: True if the reply has tool calls. A stop
    text can cut a call, as a limit can: then the reason is not "tool_calls"."""
    if response.finish_reason == "length":
        return "length"
    return "tool_calls" if called and response.stopped_by is None else "stop"


def token_infos(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], top: int) -> list[TokenInfo]:
    """Return an entry for each token of the reply. Each entry has the `top` most likely tokens at the token's
    position."""
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
    """Return a server-sent event with the struct as JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def failed_event(error: ApiError) -> bytes:
    """Return the event for an error that occurs after the stream has begun. OpenAI's clients raise this error
    as an exception."""
    return b"data: " + msgspec.json.encode(openai_error(error)) + b"\n\n"
