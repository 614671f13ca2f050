"""Replies in the runtime's thread, step by step between its other calls, and their way to event loops.

A reply is either written by a generator (`write`: the chats) or a request that was submitted (`serve`: HTTP).
Each step of either one brings all of them on (engine/scheduler.py).
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..engine.types import Chunk, GenerationRequest
from ..errors import RuvmlxError
from ..runtime import Runtime

T = TypeVar("T")
LONG_TEXT = 20_000  # characters: encoded in tens of milliseconds
NOT_OPEN = "no model is open; ask again when one is."
BeginReply = Callable[[Runtime, threading.Event], Iterator[Chunk]]  # streams a reply until the event is set


class ServingLoop:
    """The replies that a host was asked for. `serve` and `write` are for event loops, all else for the
    runtime's thread except `cancel_all` and `is_writing`."""

    def __init__(
        self, pool: ThreadPoolExecutor, runtime: Callable[[], Runtime | None], between: Callable[[], None]
    ):
        """pool: one thread. runtime: the one in use. between: called after each step."""
        self._pool, self._runtime, self._between = pool, runtime, between
        self._encoders = [ThreadPoolExecutor(1, "encoding"), ThreadPoolExecutor(1, "encoding-long")]
        self._lock = threading.Lock()
        self._requests: set[ServedRequest] = set()
        self._written: set[GeneratedReply] = set()
        self.busy = False  # a step of the requests is queued

    @property
    def is_writing(self) -> bool:
        """Is a reply of `write` not at its end?"""
        return bool(self._written)

    async def serve(self, request: GenerationRequest, session_id: str | None) -> AsyncIterator[list[Chunk]]:
        """The chunks of a request, as they arrive. It is cancelled when the iterator is closed."""
        served = ServedRequest(request, ChunkStream(asyncio.get_running_loop()))
        with self._lock:
            self._requests.add(served)
        try:
            served.runtime = self._runtime()
            served.request = await self._encoded_or_noted(request)
            self._pool.submit(self._join, served, session_id)
            async for batch in served.stream.batches():
                yield batch
        finally:
            if not served.stream.over:
                request.cancel.set()
            with self._lock:
                self._requests.discard(served)

    async def encode(self, work: Callable[[Runtime], T], letters: int) -> T:
        """Run work that only encodes text, of so many characters. Neither the event loop nor the model waits
        for it, and short texts do not wait for long ones."""
        runtime = self._runtime()
        if runtime is None:
            raise RuvmlxError(NOT_OPEN)
        encoder = self._encoders[letters > LONG_TEXT]
        return await asyncio.get_running_loop().run_in_executor(encoder, work, runtime)

    async def encode_request(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the ids of its text: `ReplyWriter.encode_request`."""
        texts = [message.content for message in request.messages or ()] + [request.prompt or ""]
        return await self.encode(lambda runtime: runtime.writer.encode_request(request), sum(map(len, texts)))

    async def _encoded_or_noted(self, request: GenerationRequest) -> GenerationRequest:
        """As `encoded`; the store's thread records that the request failed."""
        try:
            return await self.encode_request(request)
        except Exception as error:
            if runtime := self._runtime():
                with contextlib.suppress(RuntimeError):  # the host is closing
                    self._pool.submit(runtime.writer.archive.note_failure, request, error)
            raise

    async def write(self, begin: BeginReply, cancel: threading.Event) -> AsyncIterator[list[Chunk]]:
        """The chunks of begin(runtime, cancel), as they arrive. It goes on if nobody reads them."""
        reply = GeneratedReply(begin, cancel, ChunkStream(asyncio.get_running_loop()))
        with self._lock:
            self._written.add(reply)
        self._pool.submit(self._write_step, reply)
        async for batch in reply.stream.batches():
            yield batch

    def cancel_all(self) -> None:
        """End every reply within a step; from any thread."""
        with self._lock:
            for cancel in [*(s.request.cancel for s in self._requests), *(r.cancel for r in self._written)]:
                cancel.set()

    def rest(self) -> None:
        """Leave the model as other calls expect it: under the adapter in use."""
        if (self.busy or self._written) and (runtime := self._runtime()) is not None:
            runtime.writer.scheduler.rest()

    def end_all(self, error: RuvmlxError) -> None:
        """End every request with this error, and every other reply with the text that it has."""
        self.finish_written()
        if self.busy and (runtime := self._runtime()) is not None:
            runtime.writer.scheduler.fail_all(error)
        self.busy = False

    def finish(self) -> None:
        """Serve the replies, which were cancelled, to their ends: their texts are kept."""
        self.finish_written()
        runtime = self._runtime()
        while self.busy and runtime is not None:
            self._one_step(runtime)

    def close(self) -> None:
        """Nothing more is served."""
        for encoder in self._encoders:
            encoder.shutdown(wait=False, cancel_futures=True)

    def finish_written(self) -> None:
        """Stop the replies of `write`; their texts are kept."""
        for reply in list(self._written):
            reply.cancel.set()
            while self._wrote(reply):
                pass

    def _write_step(self, reply: "GeneratedReply") -> None:
        """One chunk; the next one is queued behind the calls that have come since."""
        if reply in self._written and self._wrote(reply):
            self._between()
            with contextlib.suppress(RuntimeError):  # the host is closing: `finish` does the rest
                self._pool.submit(self._write_step, reply)

    def _wrote(self, reply: "GeneratedReply") -> bool:
        """Write one chunk; False at the end."""
        runtime = self._runtime()
        if runtime is not None and reply.step(runtime):
            return True
        with self._lock:
            self._written.discard(reply)
        reply.stream.end(None if runtime is not None else RuvmlxError(NOT_OPEN))
        return False

    def _join(self, served: "ServedRequest", session_id: str | None) -> None:
        try:
            runtime = self._runtime()
            if runtime is None or runtime is not served.runtime:  # the ids are those of another model
                raise RuvmlxError(NOT_OPEN)
            self.rest()
            runtime.writer.submit(served.request, served, session_id)
        except Exception as error:  # noqa: BLE001 - goes to whoever asked
            served.fail(error)
            return
        if not self.busy:
            self.busy = True
            self._step()

    def _step(self) -> None:
        """One step for all requests; the next one is queued behind the calls that have come since."""
        runtime = self._runtime()
        if not self.busy or runtime is None:
            return
        self._one_step(runtime)
        if self.busy:
            with contextlib.suppress(RuntimeError):  # the host is closing: `finish` does the rest
                self._pool.submit(self._step)

    def _one_step(self, runtime: Runtime) -> None:
        try:
            more = runtime.writer.scheduler.step()
        except Exception as error:  # noqa: BLE001 - goes to those who asked
            runtime.writer.scheduler.fail_all(error)
            more = False
        self._between()
        if not more:
            self.rest()
            self.busy = False


class ChunkStream:
    """Chunks of one reply on their way from the runtime's thread to an event loop. `put` and `end` are for
    the runtime's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._chunks, self._news = deque[Chunk](), asyncio.Event()
        self._error: BaseException | None = None
        self._ended = False

    def put(self, chunk: Chunk, last: bool = False) -> None:
        self._chunks.append(chunk)
        self._ended = last
        self._tell()

    def end(self, error: BaseException | None = None) -> None:
        """No more chunks come. Only the first call counts."""
        if not self._ended:
            self._error, self._ended = error, True
            self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._news.set)

    @property
    def over(self) -> bool:
        """It has ended, and every chunk was read."""
        return self._ended and not self._chunks

    async def batches(self) -> AsyncIterator[list[Chunk]]:
        """Each item has all chunks since the last one. Raises the error of the end."""
        while not self.over:
            await self._news.wait()
            self._news.clear()
            if batch := [self._chunks.popleft() for _ in range(len(self._chunks))]:
                yield batch
        if self._error is not None:
            raise self._error


class ServedRequest:
    """A submitted request: a sink of engine/scheduler.py."""

    def __init__(self, request: GenerationRequest, stream: ChunkStream):
        self.request, self.stream = request, stream
        self.runtime: Runtime | None = None  # whose tokenizer encoded the request

    def take(self, chunk: Chunk) -> None:
        self.stream.put(chunk, last=chunk.response is not None)

    def fail(self, error: BaseException) -> None:
        self.stream.end(error)


class GeneratedReply:
    """A reply that a generator writes."""

    def __init__(self, begin: BeginReply, cancel: threading.Event, stream: ChunkStream):
        self._begin, self.cancel, self.stream = begin, cancel, stream
        self._chunks: Iterator[Chunk] | None = None

    def step(self, runtime: Runtime) -> bool:
        """Write the next chunk; False if there is none."""
        try:
            if self._chunks is None:
                self._chunks = self._begin(runtime, self.cancel)
            chunk = next(self._chunks, None)
        except Exception as error:  # noqa: BLE001 - goes to whoever asked
            self.stream.end(error)
            return False
        if chunk is not None:
            self.stream.put(chunk)
        return chunk is not None
