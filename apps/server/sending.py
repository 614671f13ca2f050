"""This module sends answers to clients as JSON, text or server-sent events. The module notices a client that
leaves or does not read its answer."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from .body_budget import HeldBody
from .endpoint import Answer, EventStream, PlainText
from .errors import ApiError, ErrorShape, openai_error, stopping_error
from .limits import ServerLimits

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
IGNORED = "x-ruvmlx-ignored"


class ClientGone(Exception):
    """The exception for a client that has left or does not read its answer."""


class Sender:
    """An object of this class sends one answer. status: the HTTP status that was sent; 0: nothing was sent
    yet."""

    def __init__(self, send: Send, limits: ServerLimits, headers: Sequence[tuple[str, str]] = ()):
        self._send, self._limits, self._headers = send, limits, [*headers]
        self.status = 0
        self._ignored: Sequence[str] = ()
        # a function that makes the error event of a stream
        self._failed: Callable[[ApiError], bytes] | None = None
        self._ended = False

    def name_ignored(self, names: Sequence[str]) -> None:
        """Name in a header of the answer the parts of the request that do not change the answer. The caller
        can add names to the list until the answer begins."""
        self._ignored = names

    async def answer(self, answer: Answer) -> None:
        """Send the answer of an endpoint."""
        if isinstance(answer, EventStream):
            await self._stream(answer)
        elif isinstance(answer, PlainText):
            self._headers += answer.headers
            await self._whole(200, answer.text.encode(), answer.media_type)
        else:
            await self._whole(200, msgspec.json.encode(answer), "application/json")

    async def error(self, error: ApiError, shape: ErrorShape) -> None:
        """Send an error as the answer. If a streamed answer has begun, send the error as the last event of
        the stream. If an answer that is not a stream has begun, send nothing."""
        if self.status:
            if self._failed is not None and not self._ended:
                await self._put(self._failed(error), more=True)
                await self._put(b"", more=False)
            return
        if error.retry_after is not None:
            self._headers.append(("retry-after", str(error.retry_after)))
        if error.status == 401:
            self._headers.append(("www-authenticate", "Bearer"))
        if error.status in (408, 413):
            self._headers.append(("connection", "close"))
        await self._whole(error.status, msgspec.json.encode(shape(error)), "application/json")

    async def empty(self, headers: Sequence[tuple[str, str]]) -> None:
        """Send an answer with the status 204, these headers, and no body."""
        await self._begin(204, [*self._headers, *headers])
        await self._put(b"", more=False)

    async def _whole(self, status: int, body: bytes, media_type: str) -> None:
        facts = [("content-type", media_type), ("content-length", str(len(body)))]
        await self._begin(status, [*facts, *self._headers])
        await self._put(body, more=False)

    async def _stream(self, stream: EventStream) -> None:
        waiting = stream.waiting
        self._failed = waiting.failed
        kept = _kept_alive(stream.events, self._limits.keep_alive, waiting.keep_alive)
        async with aclosing(kept) as events:
            async for event in events:
                if not self.status:
                    kind = ("content-type", f"{waiting.media_type}; charset=utf-8")
                    await self._begin(200, [kind, ("cache-control", "no-cache"), *self._headers])
                await self._put(event, more=True)
        await self._put(b"", more=False)

    async def _begin(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        self.status = status
        if self._ignored:
            headers = [*headers, (IGNORED, ", ".join(self._ignored))]
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send_bounded({"type": "http.response.start", "status": status, "headers": raw})

    async def _put(self, body: bytes, more: bool) -> None:
        self._ended = not more
        await self._send_bounded({"type": "http.response.body", "body": body, "more_body": more})

    async def _send_bounded(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limits.stall_seconds):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGone from None


async def _kept_alive(
    events: AsyncGenerator[bytes, None], silence: float, sign: bytes
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. If no event comes for `silence` seconds, yield `sign`, so that the client
    does not think that the connection is dead."""
    following: asyncio.Task[bytes] | None = None
    try:
        while True:
            if following is None:
                following = asyncio.ensure_future(_next_event(events))
            await asyncio.wait([following], timeout=silence)
            if not following.done():
                yield sign
                continue
            try:
                event = following.result()
            except StopAsyncIteration:
                return
            finally:
                # free the finished task, because the task would keep its error and this frame alive
                following = None
            yield event
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
        await events.aclose()


async def _next_event(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Wait until the coroutine `work` ends. If the client leaves, cancel the work and raise ClientGone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait([working, leaving])
        with suppress(asyncio.CancelledError):
            # The call marks the error as read. asyncio prints an unread error. A cancelled task keeps its
            # error.
            working.exception()
        # An error refers to this frame, the frame refers to the task, and the task refers to the error. This
        # line breaks the circle, so that Python frees the request without the garbage collector.
        del working, leaving, task


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive, length: str | None, limits: ServerLimits, held: HeldBody) -> bytes:
    """Return the body of a request. Raise ApiError: 413 if the body is too large, 408 if the body does not
    arrive in time, 503 if the bodies of all requests together are too large, or if the server stops.

    If a body is too large, the server still reads it and drops it. Most clients look for an answer only after
    they have sent the whole body. If the server closed the connection earlier, these clients would lose the
    answer.
    """
    told = int(length) if length is not None and length.isdigit() else 0
    size = told if told > limits.body else 0
    try:
        async with held.bodies.arriving(limits.body_seconds):
            async for piece in _pieces(receive):
                size += len(piece)
                if size <= limits.body:
                    held.add(piece)
                else:
                    held.release()
    except TimeoutError:
        if held.bodies.is_stopped:
            raise stopping_error() from None
        if size <= limits.body:
            message = f"the body did not arrive within {limits.body_seconds:g} seconds."
            raise ApiError(408, message, code="timeout") from None
    if size > limits.body:
        raise ApiError(413, f"the body is larger than {limits.body} bytes.", code="body_too_large")
    return held.whole()


async def _pieces(receive: Receive) -> AsyncGenerator[bytes, None]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def refuse_websocket(send: Send, error: ApiError) -> None:
    """Answer a request for a WebSocket connection with an error."""
    body = msgspec.json.encode(openai_error(error))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
