"""This module answers POST /v1/responses. This endpoint is OpenAI's newer form of a conversation; the coding
agent Codex uses it."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Struct

from ruvmlx.engine.types import GenerationRequest, GenerationResponse
from ruvmlx.models.config.model import Tokenizer
from ruvmlx.models.text.thinking import TAGS, ThoughtCounter, tag_of
from ruvmlx.models.text.tool_calls import CallBegun

from . import responses_answers as answers
from .endpoint import Answer, Call, Endpoint, EventStream, Waiting
from .errors import ApiError
from .messages import named_event
from .openai_answers import room_of
from .prompts import ChatPrompt, chat_prompt
from .responses_bodies import (
    ReasoningOptions,
    ResponsesBody,
    conversation,
    items_of,
    reply_body,
    wants_thought,
)
from .responses_items import OpenCall, OpenText
from .responses_tools import TextOptions, form_of, grouped_names, tool_use
from .splitting import CallPiece, NewCalls
from .stored_responses import SHOW_LINK, keep_response, named_items, stored_items
from .tool_bodies import FreeText
from .writing import ReplyPart, prompt_tokens, reply_parts, requests_for

_LAST = {"completed": answers.ResponseCompleted, "incomplete": answers.ResponseIncomplete}


async def responses(call: Call) -> Answer:
    """Answer a conversation, with the whole answer at once or as a stream."""
    body: ResponsesBody = call.body
    prompt = await _prompt(call, body)
    [request] = await requests_for(call, reply_body(body), body.max_output_tokens, 0, [prompt.fields])
    writing = ResponseWriter(body, request, call.serving.runtime.model.tokenizer)
    if body.stream:
        return EventStream(
            _events(call, body, request, prompt.new_calls, writing), Waiting(writing.failure_event)
        )
    async with aclosing(reply_parts(call, [request], new_calls=prompt.new_calls)) as parts:
        async for part in parts:
            for _ in writing.add(part):
                pass
    await keep_response(call, body, writing.answer)
    return writing.answer


async def count_input_tokens(call: Call) -> Answer:
    """Count the prompt tokens of a conversation, without a reply to it."""
    body: ResponsesBody = call.body
    prompt = await _prompt(call, body)
    return answers.InputTokens(
        input_tokens=await prompt_tokens(call, body.model, body.adapter, prompt.fields)
    )


async def _prompt(call: Call, body: ResponsesBody) -> ChatPrompt:
    tag = tag_of(call.serving.runtime.model.tokenizer.chat_template)
    use = tool_use(body.tools or (), body.tool_choice, body.parallel_tool_calls)
    before = await stored_items(call, body.previous_response_id)
    items = await named_items(call, items_of(body), lambda at: f"input[{at}]")
    whole = msgspec.structs.replace(body, input=items)
    prompt = await chat_prompt(call, conversation(whole, tag, before), use, form_of(body.text))
    return replace(prompt, fields={**prompt.fields, "thinking": wants_thought(body, tag, call.ignored)})


async def _events(
    call: Call,
    body: ResponsesBody,
    request: GenerationRequest,
    new_calls: NewCalls,
    writing: "ResponseWriter",
) -> AsyncGenerator[bytes, None]:
    begun = False
    async with aclosing(reply_parts(call, [request], new_calls=new_calls)) as parts:
        async for part in parts:
            if not begun:
                begun = True
                for event in writing.begin():
                    yield named_event(event)
            events = list(writing.add(part))
            # Store the response before the client gets the last event, because the client can continue the
            # response at once.
            if part.response is not None:
                await keep_response(call, body, writing.answer)
            for event in events:
                yield named_event(event)


class ResponseWriter:
    """An object of this class builds one response, and the events that describe it. answer: the response so
    far."""

    def __init__(self, body: ResponsesBody, request: GenerationRequest, tokenizer: Tokenizer):
        self._tokenizer, self._events = tokenizer, 0
        self._open: OpenText | OpenCall | None = None
        self._groups = grouped_names(body.tools or ())
        self.answer = answers.ResponseAnswer(
            id=request.request_id,
            created_at=int(time.time()),
            status="in_progress",
            model=body.model,
            instructions=body.instructions,
            metadata=body.metadata or {},
            max_output_tokens=body.max_output_tokens,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            reasoning=body.reasoning or ReasoningOptions(),
            text=TextOptions((body.text and body.text.format) or FreeText()),
            tools=body.tools or (),
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            user=body.user,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
        )

    def begin(self) -> Iterator[Struct]:
        """Yield the events that come before the first item of the response."""
        yield self._number_event(answers.ResponseCreated, self.answer)
        yield self._number_event(answers.ResponseInProgress, self.answer)

    def add(self, part: ReplyPart) -> Iterator[Struct]:
        """Yield the events for one part of the reply. The last part ends the response."""
        if part.thought:
            yield from self._more_text(True, part.thought)
        if part.text:
            yield from self._more_text(False, part.text)
        for piece in part.calls:
            yield from self._more_calls(piece)
        if part.response is not None:
            yield from self._finish_answer(part.response)

    def failure_event(self, error: ApiError) -> bytes:
        """Return the event for an error that ends the response."""
        failure = answers.ResponseFailure(error.code or error.type, str(error))
        self._replace(status="failed", error=failure)
        return named_event(self._number_event(answers.ResponseFailed, self.answer))

    def _more_text(self, is_thought: bool, text: str) -> Iterator[Struct]:
        item = self._open
        if not isinstance(item, OpenText) or item.is_thought != is_thought:
            item = OpenText(is_thought, self.answer.id, self._index)
            yield from self._open_item(item)
        yield self._number_event(item.more(text))

    def _more_calls(self, piece: CallPiece) -> Iterator[Struct]:
        if isinstance(piece, CallBegun):
            group, name = self._groups.get(piece.name, ("", piece.name))
            yield from self._open_item(OpenCall(self.answer.id, piece.id, group, name, self._index))
        elif self._open is not None:
            yield self._number_event(self._open.more(piece.text))

    @property
    def _index(self) -> int:
        """The number of the item that begins next. If an item is open, the open item has the previous
        number."""
        return len(self.answer.output) + (self._open is not None)

    def _open_item(self, item: OpenText | OpenCall) -> Iterator[Struct]:
        yield from self._close_item("completed")
        self._open = item
        yield from map(self._number_event, item.begin())

    def _close_item(self, status: answers.Status) -> Iterator[Struct]:
        if self._open is not None:
            yield from map(self._number_event, self._open.done(status))
            self._replace(output=[*self.answer.output, self._open.item(status)])
            self._open = None

    def _finish_answer(self, response: GenerationResponse) -> Iterator[Struct]:
        is_full = response.finish_reason == "length"
        status: answers.Status = "incomplete" if is_full else "completed"
        yield from self._close_item(status)
        why = answers.WhyIncomplete("max_output_tokens") if is_full else None
        self._replace(
            status=status,
            incomplete_details=why,
            usage=usage_of(self._tokenizer, response, self.answer.max_output_tokens),
        )
        yield self._number_event(_LAST[status], self.answer)

    def _replace(self, **fields: Any) -> None:
        self.answer = msgspec.structs.replace(self.answer, **fields)

    def _number_event(self, event: Callable[..., Struct], *facts: Any) -> Struct:
        number, self._events = self._events, self._events + 1
        return event(number, *facts)


def usage_of(
    tokenizer: Tokenizer, response: GenerationResponse, allowed: int | None
) -> answers.ResponseUsage:
    """Return the numbers of tokens of a reply. allowed: the maximum number of tokens of the reply that the
    request allows."""
    prompt, cached, count = response.prompt_tokens, response.cached_tokens, response.generation_tokens
    thought = answers.ThoughtTokens(thought_tokens(tokenizer, response))
    total, room = prompt + count, room_of([response], allowed)
    return answers.ResponseUsage(prompt, answers.CachedTokens(cached), count, thought, total, room)


def thought_tokens(tokenizer: Tokenizer, response: GenerationResponse) -> int:
    """Return the number of tokens of a reply's thought. If the prompt ends with the tag that begins the
    thought, the tokens of this tag are not counted."""
    text, drawn = response.text.lstrip(), tokenizer.decode(response.token_ids).lstrip()
    begun = next((tag for tag in TAGS if text.startswith(tag) and not drawn.startswith(tag)), "")
    counter = ThoughtCounter(tokenizer, begun)
    for token in response.token_ids:
        counter.add(token)
    return counter.tokens


def _failed_early(error: ApiError) -> bytes:
    """Return the event for an error that occurs before the response begins. Before this event, the client has
    usually received only keep-alive comments."""
    return named_event(answers.StreamError(error.code, str(error), error.param))


ENDPOINTS = [
    Endpoint(
        "POST", "/v1/responses", responses, "Answer a conversation, in the form of OpenAI's Responses.",
        answers.ResponseAnswer, body=ResponsesBody, event=answers.ResponseEvent, statuses=(404, 409),
        waiting=lambda body: Waiting(_failed_early) if body.stream else None, links=[SHOW_LINK],
    ),
    Endpoint(
        "POST", "/v1/responses/input_tokens", count_input_tokens, "Count the tokens of a response's input.",
        answers.InputTokens, body=ResponsesBody, statuses=(404, 409),
    ),
]  # fmt: skip
