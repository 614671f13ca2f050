"""This module is the public API for asyncio. The methods that wait for the model are coroutines or
asynchronous iterators, so the model never blocks the event loop.

async with await ruvmlx.aopen() as model:
    chat = await model.chat()
    async for piece in chat.stream("Why is the sky blue?"):
        print(piece, end="")
    await chat.rate("up")
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from ..engine.context_window import Turn
from ..sampling import ReplyOptions
from .call_thread import CallThread
from .model import Chat, LocalModel, Prompt, open
from .replies import Reply, ReplyStream
from .types import Preference, Rating

if TYPE_CHECKING:
    from ..sona.adapter_history import LearnStatus

T = TypeVar("T")


class AsyncReplyStream(AsyncIterator[str]):
    """An iterator over the pieces of one reply's text. If the asyncio task that reads the pieces is
    cancelled, the reply ends."""

    def __init__(self, stream: ReplyStream):
        self._stream, self._news = stream, asyncio.Event()

    async def __anext__(self) -> str:
        stream, chunks, news = self._stream, self._stream._chunks, self._news
        chunks.tell = _event_setter(asyncio.get_running_loop(), news)
        while not stream._ended:
            news.clear()
            if chunks.empty():
                await self._wait()
            elif text := stream._record_chunk(chunks.get_nowait()):
                return text
        raise StopAsyncIteration

    async def _wait(self) -> None:
        """Wait for the next chunk. No thread waits, so any number of replies can be open."""
        try:
            await self._news.wait()
        except asyncio.CancelledError:
            self.stop()
            raise

    async def reply(self) -> Reply:
        """Wait until the reply is complete, then return the whole reply."""
        async for _ in self:
            pass
        return self._stream.reply

    def stop(self) -> None:
        """End the reply early. The store keeps the text so far, and the user can rate it."""
        self._stream.stop()

    async def __aenter__(self) -> "AsyncReplyStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()


def _event_setter(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets the event `news`. Any thread can call this function, although the event
    belongs to the event loop `loop`."""

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads the reply
            loop.call_soon_threadsafe(news.set)

    return tell


class WaitingCalls(CallThread):
    """A thread that runs the blocking calls of one AsyncModel, one after another. So these calls use no
    thread of the event loop's executor, and the program can use the whole executor for other work."""

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work(*arguments) in the thread, and return its result. The event loop goes on meanwhile."""
        return await asyncio.wrap_future(self.submit(work, *arguments))


class AsyncModel:
    """The class `LocalModel` for asyncio: the methods that wait for the model are coroutines, and `stream`
    returns an asynchronous iterator. Call `ruvmlx.aopen` to make an AsyncModel. To rate a reply, call the
    method `rate` of this class, because `Reply.rate` blocks the event loop."""

    def __init__(self, model: LocalModel):
        self._model, self._calls = model, WaitingCalls()

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    async def chat(self, id: str | None = None, system: str | None = None) -> "AsyncChat":
        """See `LocalModel.chat`."""
        return AsyncChat(await self._calls.run(self._model.chat, id, system), self._calls)

    async def reply(self, prompt: Prompt, **options: Unpack[ReplyOptions]) -> Reply:
        """See `LocalModel.reply`."""
        return await self.stream(prompt, **options).reply()

    def stream(self, prompt: Prompt, **options: Unpack[ReplyOptions]) -> AsyncReplyStream:
        """See `LocalModel.stream`."""
        return AsyncReplyStream(self._model.stream(prompt, **options))

    async def rate(
        self, reply: Reply | str, rating: str | int, note: str = "", adapter: str | None = None
    ) -> Rating:
        """See `LocalModel.rate`."""
        return await self._calls.run(self._model.rate, reply, rating, note, adapter)

    async def prefer(self, better: Reply | str, worse: Reply | str) -> Preference:
        """See `LocalModel.prefer`."""
        return await self._calls.run(self._model.prefer, better, worse)

    async def edit(self, reply: Reply | str, text: str) -> Preference:
        """See `LocalModel.edit`."""
        return await self._calls.run(self._model.edit, reply, text)

    async def undo(self) -> "LearnStatus":
        """See `LocalModel.undo`."""
        return await self._calls.run(self._model.undo)

    async def learned(self) -> "LearnStatus":
        """See `LocalModel.learned`."""
        return await self._calls.run(self._model.learned)

    async def adapter(self) -> str | None:
        """See `LocalModel.adapter`."""
        return await self._calls.run(lambda: self._model.adapter)

    async def use_adapter(self, name: str | None) -> None:
        """See `LocalModel.use_adapter`."""
        await self._calls.run(self._model.use_adapter, name)

    async def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """See `LocalModel.embed`."""
        return await self._calls.run(self._model.embed, texts)

    async def close(self) -> None:
        """See `LocalModel.close`."""
        # `shield` lets the runtime close even if the task is cancelled
        await asyncio.shield(asyncio.wrap_future(self._model._begin_close()))

    async def __aenter__(self) -> "AsyncModel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncChat:
    """The class `Chat` for asyncio: its methods are coroutines; `stream` returns an asynchronous iterator."""

    def __init__(self, chat: Chat, calls: WaitingCalls):
        """calls: the thread for the blocking calls of the AsyncModel that made this chat."""
        self._chat, self._calls = chat, calls

    @property
    def id(self) -> str:
        """The chat's id."""
        return self._chat.id

    async def messages(self) -> list[Turn]:
        """See `Chat.messages`."""
        return await self._calls.run(lambda: self._chat.messages)

    async def say(self, text: str, *, edit: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """See `Chat.say`."""
        return await self.stream(text, edit=edit, **options).reply()

    def stream(
        self, text: str, *, edit: int | None = None, **options: Unpack[ReplyOptions]
    ) -> AsyncReplyStream:
        """See `Chat.stream`."""
        return AsyncReplyStream(self._chat.stream(text, edit=edit, **options))

    async def again(self, message: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """See `Chat.again`."""
        return await AsyncReplyStream(self._chat._again(message, options)).reply()

    async def continue_reply(self, message: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """See `Chat.continue_reply`."""
        return await AsyncReplyStream(self._chat._continue(message, options)).reply()

    async def rate(self, rating: str | int, note: str = "") -> Rating:
        """See `Chat.rate`."""
        return await self._calls.run(self._chat.rate, rating, note)


async def aopen(model: str | Path | None = None, **settings: Any) -> AsyncModel:
    """See `ruvmlx.open`."""
    return AsyncModel(await asyncio.to_thread(lambda: open(model, **settings)))
