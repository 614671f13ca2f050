"""This module lets the server's web page read and continue the user's chats. The chat app in the terminal
shows the same chats.

A request needs a key of the chat app. No web page except the server's own page can send requests to the
endpoints of this module (`Endpoint.is_private`).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ruvmlx.engine.types import GenerationRequest
from ruvmlx.errors import NotFound, RuvmlxError, StoreError
from ruvmlx.models.text.thinking import Thought, split
from ruvmlx.runtime import Runtime

from .bodies import ReplyBody, Words
from .endpoint import Answer, Call, Endpoint, EventStream, PlainText, Waiting
from .errors import ApiError
from .openai_answers import DONE, ReplyId, event, failed_event
from .serving import Serving
from .writing import check_room, reply_parts, requests_for

SHOWN = 200  # the maximum number of chats in a list, and of results of a search
MOST_LETTERS = 262_144  # the maximum number of characters of one message


class ChatCard(Struct):
    """A chat in the list of chats. updated: the Unix time of the last change. turns: the number of messages
    of the branch in use."""

    id: str
    title: str
    updated: float
    model: str
    turns: int


class ChatList(Struct):
    """The list of the newest chats, the newest first."""

    chats: list[ChatCard]


class ChatMessageShown(Struct):
    """A message of a chat. thought: the model's thought before its answer. reply_id: null if the message is
    not a reply. rating: null if the message has no rating."""

    id: int
    role: str
    content: str
    thought: str
    reply_id: str | None
    rating: str | None


class ChatShown(Struct):
    """A chat: its system prompt and the messages of the branch in use."""

    id: str
    title: str
    system: str | None
    messages: list[ChatMessageShown]


class ChatDeleted(Struct):
    """The answer after a chat was deleted. For at least a day, `ruvmlx sessions restore` can show the chat
    again."""

    id: str
    deleted: Literal[True] = True


class ChatHitShown(Struct):
    """A chat or a message that a search found. message_id: null if the words are in the chat's title or
    system prompt."""

    chat: str
    title: str
    message_id: int | None
    role: str
    content: str


class ChatHits(Struct):
    """The results of a search: first the chats whose title or system prompt has the words, then the messages;
    both with the newest first."""

    hits: list[ChatHitShown]


class SearchBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/chats/search. The search finds the messages, chat titles and system prompts that
    contain every word."""

    words: Annotated[str, Meta(pattern=r"\S", max_length=200)]
    limit: Annotated[int, Meta(ge=1, le=SHOWN)] | None = None


class SayBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/chats. chat: the id of the chat to continue; null begins a new chat. system: the
    chat's system prompt from now on."""

    model: Annotated[str, Meta(description="NAME or NAME@ADAPTER, as GET /v1/models lists them.")]
    content: Annotated[Words, Meta(max_length=MOST_LETTERS)]
    chat: str | None = None
    system: Annotated[str, Meta(max_length=MOST_LETTERS)] | None = None
    adapter: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class ChatEvent(Struct):
    """A piece of a streamed reply. chat: the id of the chat. done: true if the reply is complete."""

    chat: str
    reply_id: ReplyId
    text: str = ""
    thought: str = ""
    done: bool | UnsetType = UNSET


async def list_chats(call: Call) -> Answer:
    """Return the newest chats."""
    async with call.models.using_any() as serving:
        rows = await serving.host.call_between(lambda runtime: runtime.store.chats.all()[:SHOWN])
    return ChatList([ChatCard(row.id, row.title, row.updated, row.model, row.turns) for row in rows])


async def show_chat(call: Call) -> Answer:
    """Return one chat with the messages of the branch in use."""
    async with call.models.using_any() as serving:
        return await serving.host.call_between(lambda runtime: _chat_answer(runtime, call.names["id"]))


def _chat_answer(runtime: Runtime, chat: str) -> ChatShown:
    row = runtime.store.chats.get(_existing_chat(runtime, chat))
    messages = []
    for m in runtime.store.messages.branch(row.id):
        said = split(m.content) if m.reply_id else Thought("", m.content)
        messages.append(ChatMessageShown(m.id, m.role, said.answer, said.thought, m.reply_id, m.rating))
    return ChatShown(row.id, row.title, row.system, messages)


def _existing_chat(runtime: Runtime, chat: str) -> str:
    """Return `chat` if it is the id of a chat. If no chat has this id, raise ApiError, 404."""
    try:
        if chat and runtime.store.chats.find(chat) == chat:
            return chat
        raise NotFound(chat)
    except NotFound:
        raise ApiError(
            404, "chat: there is no such chat; GET /v1/chats lists them.", "chat", "not_found"
        ) from None


async def delete_chat(call: Call) -> Answer:
    """Hide a chat from all lists. When a program starts or ends more than a day later, the store erases the
    chat's messages."""
    chat = call.names["id"]

    def delete(runtime: Runtime) -> ChatDeleted:
        runtime.store.chats.soft_delete(_existing_chat(runtime, chat))
        return ChatDeleted(chat)

    async with call.models.using_any() as serving:
        return await serving.host.call_between(delete)


async def search_chats(call: Call) -> Answer:
    """Return the messages that contain all words of the search, and the chats whose title or system prompt
    does."""
    body: SearchBody = call.body
    async with call.models.using_any() as serving:
        found = await serving.host.call_between(
            lambda runtime: runtime.store.search.find(body.words, body.limit or SHOWN)
        )
    return ChatHits(
        [ChatHitShown(h.session.id, h.session.title, h.message_id, h.role, h.content) for h in found]
    )


async def say(call: Call) -> Answer:
    """Add a message to a chat, and stream the reply. The store keeps the message and the reply."""
    body: SayBody = call.body
    asked = ReplyBody(model=body.model, adapter=body.adapter, temperature=body.temperature, top_p=body.top_p)
    # `_question` copies the sampling, the adapter, the token limit, the tenant, the patience (maximum waiting
    # time) and the id of this request.
    [like] = await requests_for(call, asked, body.max_tokens, 0, [{"prompt": body.content}])
    return EventStream(_events(call, like), Waiting(failed_event))


def _question(runtime: Runtime, body: SayBody, like: GenerationRequest) -> GenerationRequest:
    """Save the user's message in the chat, and return the request for the reply to it. If the message is
    refused, leave no new chat and no new system prompt. like: a request whose options the new request
    copies."""
    chats, rows = runtime.chats, runtime.store.chats
    chat = _existing_chat(runtime, body.chat) if body.chat is not None else chats.new_chat(body.system)
    before = rows.get(chat).system
    if body.chat is not None and body.system is not None:
        chats.set_system(chat, body.system)
    try:
        request = chats.question(
            chat,
            body.content,
            sampling=like.sampling,
            max_new_tokens=like.max_new_tokens,
            adapter_id=like.adapter_id,
        )
    except BaseException:
        with suppress(StoreError):
            if body.chat is None:
                rows.delete(chat, seconds=0)
            else:
                rows.set_system(chat, before)
        raise
    return replace(request, tenant=like.tenant, patience=like.patience, request_id=like.request_id)


async def _events(call: Call, like: GenerationRequest) -> AsyncGenerator[bytes, None]:
    """Save the message, and yield the reply as events. Before, reserve the place of one reply, so that a
    message without a reply is not saved. If an error, or the leaving of the client, ends the reply before its
    first text, take the message back, because two messages of the user must not follow each other. like: as
    in `_question`."""
    serving = call.serving
    check_room(serving, 1)
    with serving.reserving():
        saving = asyncio.ensure_future(
            serving.host.call_between(lambda runtime: _question(runtime, call.body, like))
        )
        take_back = partial(_take_back, serving, saving)
        try:
            request = await asyncio.shield(saving)
        except asyncio.CancelledError:  # the client has left, and the message can be saved after this line
            serving.start(take_back())
            raise
    chat = str(request.session_id)
    parts = reply_parts(call, [request], has_room=True, unanswered=take_back)
    async with aclosing(parts):
        async for part in parts:
            is_last = part.response is not None
            yield event(ChatEvent(chat, request.request_id, part.text, part.thought, is_last or UNSET))
    yield DONE


async def _take_back(serving: Serving, saving: Awaitable[GenerationRequest]) -> None:
    """Delete a message that has no reply or an empty reply. If the deletion fails, for example because the
    store is busy, the message stays. saving: saves the message, and returns the request for its reply"""
    with suppress(RuvmlxError):
        request = await saving
        chat, question = str(request.session_id), request.question_id
        if question is not None:
            await serving.host.call_between(lambda runtime: runtime.store.chats.take_back(chat, question))


ENDPOINTS = [
    Endpoint("GET", "/v1/chats", list_chats, "List the newest chats.", ChatList, is_private=True),
    Endpoint(
        "POST", "/v1/chats", say, "Say something in a chat.", PlainText, body=SayBody, is_private=True,
        event=ChatEvent, statuses=(404, 409), waiting=lambda body: Waiting(failed_event),
    ),
    Endpoint(
        "POST", "/v1/chats/search", search_chats, "Search all chats.", ChatHits, body=SearchBody,
        is_private=True,
    ),
    Endpoint("GET", "/v1/chats/{id}", show_chat, "Show a chat.", ChatShown, is_private=True, statuses=(404,)),
    Endpoint(
        "DELETE", "/v1/chats/{id}", delete_chat, "Delete a chat.", ChatDeleted, is_private=True,
        statuses=(404,),
    ),
]  # fmt: skip
