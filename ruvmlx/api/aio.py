"""This module is the public API for asyncio. The methods that wait for the model are coroutines or
asynchronous iterators, so the model never blocks the event loop.

async with await ruvmlx.aopen() as model:
    chat = await model.chat()
    async for piece in chat.stream("Why is the sky blue?"):
        print(piece, end="")
    await chat.rate("up")
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..engine.context_window import Turn
from ..sampling import ReplyOptions
from .model import Chat, LocalModel, Prompt, open
from .replies import Reply, ReplyStream
from .types import Preference, Rating

if TYPE_CHECKING:
    from ..sona.adapter_history import LearnStatus


class AsyncReplyStream(AsyncIterator[str]):
    """An iterator over the pieces of one reply's text. If the asyncio task that reads the pieces is
    cancelled, the reply ends."""

    def __init__(self, begin: Callable[[], ReplyStream]):
        """begin: a function that starts the reply; the iterator calls the function when the caller requests
        the first piece."""
        self._begin = begin
        self._begun: ReplyStream | None = None
        self._is_stopped = False

    async def __anext__(self) -> str:
        stream = await self._stream()
        try:
            piece = await asyncio.to_thread(next, stream, None)
        except asyncio.CancelledError:
            stream.stop()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def reply(self) -> Reply:
        """Wait until the reply is complete, then return the whole reply."""
        async for _ in self:
            pass
        stream = await self._stream()
        return await asyncio.to_thread(lambda: stream.reply)

    def stop(self) -> None:
        """End the reply early. The store keeps the text so far, and the user can rate it."""
        self._is_stopped = True
        if self._begun is not None:
            self._begun.stop()

    async def __aenter__(self) -> "AsyncReplyStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    async def _stream(self) -> ReplyStream:
        if self._begun is None:
            self._begun = self._begin()
            if self._is_stopped:
                self._begun.stop()
        return self._begun


class AsyncModel:
    """The class `LocalModel` for asyncio: the methods that wait for the model are coroutines, and `stream`
    returns an asynchronous iterator. Call `ruvmlx.aopen` to make an AsyncModel. To rate a reply, call the
    method `rate` of this class, because `Reply.rate` blocks the event loop."""

    def __init__(self, model: LocalModel):
        self._model = model

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    async def chat(self, id: str | None = None, system: str | None = None) -> "AsyncChat":
        """See `LocalModel.chat`."""
        return AsyncChat(await asyncio.to_thread(self._model.chat, id, system))

    async def reply(self, prompt: Prompt, **options: Unpack[ReplyOptions]) -> Reply:
        """See `LocalModel.reply`."""
        return await self.stream(prompt, **options).reply()

    def stream(self, prompt: Prompt, **options: Unpack[ReplyOptions]) -> AsyncReplyStream:
        """See `LocalModel.stream`."""
        return AsyncReplyStream(lambda: self._model.stream(prompt, **options))

    async def rate(
        self, reply: Reply | str, rating: str | int, note: str = "", adapter: str | None = None
    ) -> Rating:
        """See `LocalModel.rate`."""
        return await asyncio.to_thread(self._model.rate, reply, rating, note, adapter)

    async def prefer(self, better: Reply | str, worse: Reply | str) -> Preference:
        """See `LocalModel.prefer`."""
        return await asyncio.to_thread(self._model.prefer, better, worse)

    async def edit(self, reply: Reply | str, text: str) -> Preference:
        """See `LocalModel.edit`."""
        return await asyncio.to_thread(self._model.edit, reply, text)

    async def undo(self) -> "LearnStatus":
        """See `LocalModel.undo`."""
        return await asyncio.to_thread(self._model.undo)

    async def learned(self) -> "LearnStatus":
        """See `LocalModel.learned`."""
        return await asyncio.to_thread(self._model.learned)

    async def use_adapter(self, name: str | None) -> None:
        """See `LocalModel.use_adapter`."""
        await asyncio.to_thread(self._model.use_adapter, name)

    async def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """See `LocalModel.embed`."""
        return await asyncio.to_thread(self._model.embed, texts)

    async def close(self) -> None:
        """See `LocalModel.close`."""
        await asyncio.to_thread(self._model.close)

    async def __aenter__(self) -> "AsyncModel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncChat:
    """The class `Chat` for asyncio: its methods are coroutines; `stream` returns an asynchronous iterator."""

    def __init__(self, chat: Chat):
        self._chat = chat

    @property
    def id(self) -> str:
        """The chat's id."""
        return self._chat.id

    async def messages(self) -> list[Turn]:
        """See `Chat.messages`."""
        return await asyncio.to_thread(lambda: self._chat.messages)

    async def say(self, text: str, *, edit: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """See `Chat.say`."""
        return await self.stream(text, edit=edit, **options).reply()

    def stream(
        self, text: str, *, edit: int | None = None, **options: Unpack[ReplyOptions]
    ) -> AsyncReplyStream:
        """See `Chat.stream`."""
        return AsyncReplyStream(lambda: self._chat.stream(text, edit=edit, **options))

    async def again(self, message: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """See `Chat.again`."""
        return await AsyncReplyStream(lambda: self._chat._again(message, options)).reply()

    async def continue_reply(self, message: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """See `Chat.continue_reply`."""
        return await AsyncReplyStream(lambda: self._chat._continue(message, options)).reply()

    async def rate(self, rating: str | int, note: str = "") -> Rating:
        """See `Chat.rate`."""
        return await asyncio.to_thread(self._chat.rate, rating, note)


async def aopen(model: str | Path | None = None, **settings: Any) -> AsyncModel:
    """See `ruvmlx.open`."""
    return AsyncModel(await asyncio.to_thread(lambda: open(model, **settings)))
