"""This module computes replies in the runtime's thread, step by step, and passes their chunks to event loops.

A reply of the chat comes from a generator (`write`). A reply over HTTP comes from a submitted request
(`serve`). One step of any reply computes the next token of all replies that use the same base LoRA
(engine/scheduler.py). Other calls of the runtime run between two steps.
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
# texts with more characters are encoded in a thread of their own, because the tokenizer needs tens of
# milliseconds for them
LONG_TEXT = 20_000
NOT_OPEN = "no model is open; ask again when one is."
# A BeginReply is a function that streams a reply until the event is set.
BeginReply = Callable[[Runtime, threading.Event], Iterator[Chunk]]


class ServingLoop:
    """The replies in progress of one host. Event loops call the coroutines; any thread can call `cancel_all`
    and `is_writing`; only the runtime's thread calls the other methods."""

    def __init__(
        self, pool: ThreadPoolExecutor, runtime: Callable[[], Runtime | None], between: Callable[[], None]
    ):
        """pool: the executor of the runtime's thread. runtime: a function that returns the runtime in use,
        or None if no runtime is open. between: a function that the loop calls after each step."""
        self._pool, self._runtime, self._between = pool, runtime, between
        self._encoders = [ThreadPoolExecutor(1, "encoding"), ThreadPoolExecutor(1, "encoding-long")]
        self._lock = threading.Lock()
        self._requests: set[ServedRequest] = set()
        self._written: set[GeneratedReply] = set()
        self.busy = False  # True if the next step of the submitted requests is in the thread's queue

    @property
    def is_writing(self) -> bool:
        """Return True if a reply of `write` is in progress."""
        return bool(self._written)

    async def serve(self, request: GenerationRequest, session_id: str | None) -> AsyncIterator[list[Chunk]]:
        """Submit a request and yield its chunks. If the caller closes the iterator, the request is
        cancelled."""
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
            if not served.stream.is_over:
                request.cancel.set()
            with self._lock:
                self._requests.discard(served)

    async def encode(self, work: Callable[[Runtime], T], letters: int) -> T:
        """Run work that only encodes text, in a thread for short texts or a thread for long texts. With
        separate threads, the event loop and the model do not wait for the encoding, and short texts do not
        wait for long texts. letters: the length of the text in characters."""
        runtime = self._runtime()
        if runtime is None:
            raise RuvmlxError(NOT_OPEN)
        encoder = self._encoders[letters > LONG_TEXT]
        return await asyncio.get_running_loop().run_in_executor(encoder, work, runtime)

    async def encode_request(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with the token ids of its text (`ReplyWriter.encode_request`), encoded in a
        separate thread."""
        texts = [message.content for message in request.messages or ()] + [request.prompt or ""]
        return await self.encode(lambda runtime: runtime.writer.encode_request(request), sum(map(len, texts)))

    async def _encoded_or_noted(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with its token ids, as `encode_request` does. If the encoding fails, the
        runtime's thread records the failure in the store."""
        try:
            return await self.encode_request(request)
        except Exception as error:
            if runtime := self._runtime():
                with contextlib.suppress(RuntimeError):  # the pool raises this error while the host closes
                    self._pool.submit(runtime.writer.archive.note_failure, request, error)
            raise

    async def write(self, begin: BeginReply, cancel: threading.Event) -> AsyncIterator[list[Chunk]]:
        """Yield the chunks of begin(runtime, cancel). The model continues to write the reply even if the
        caller reads no chunk."""
        reply = GeneratedReply(begin, cancel, ChunkStream(asyncio.get_running_loop()))
        with self._lock:
            self._written.add(reply)
        self._pool.submit(self._write_step, reply)
        async for batch in reply.stream.batches():
            yield batch

    def cancel_all(self) -> None:
        """End every reply after its current step. Any thread can call this method."""
        with self._lock:
            for cancel in [*(s.request.cancel for s in self._requests), *(r.cancel for r in self._written)]:
                cancel.set()

    def rest(self) -> None:
        """Install the adapter in use in the model again after replies with other adapters, because all other
        calls of the runtime expect the adapter in use."""
        if (self.busy or self._written) and (runtime := self._runtime()) is not None:
            runtime.writer.scheduler.rest()

    def end_all(self, error: RuvmlxError) -> None:
        """End every submitted request with `error`. End every reply of `write` and keep its text so far."""
        self.finish_written()
        if self.busy and (runtime := self._runtime()) is not None:
            runtime.writer.scheduler.fail_all(error)
        self.busy = False

    def finish(self) -> None:
        """Run the steps of the cancelled replies until all replies have ended, so that their texts are
        stored."""
        self.finish_written()
        runtime = self._runtime()
        while self.busy and runtime is not None:
            self._one_step(runtime)

    def close(self) -> None:
        """End the threads that encode texts."""
        for encoder in self._encoders:
            encoder.shutdown(wait=False, cancel_futures=True)

    def finish_written(self) -> None:
        """Stop the replies of `write` and keep their texts."""
        for reply in list(self._written):
            reply.cancel.set()
            while self._wrote(reply):
                pass

    def _write_step(self, reply: "GeneratedReply") -> None:
        """Write one chunk of a reply. Put the next step at the end of the queue, so that waiting calls run
        first."""
        if reply in self._written and self._wrote(reply):
            self._between()
            # the queue refuses work while the host closes; in this case `finish` writes the remaining chunks
            with contextlib.suppress(RuntimeError):
                self._pool.submit(self._write_step, reply)

    def _wrote(self, reply: "GeneratedReply") -> bool:
        """Write one chunk of a reply. Return False if the reply has ended."""
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
            # Refuse the request if no model is open, or if another model was opened since. The token ids of
            # the request come from the earlier model's tokenizer.
            if runtime is None or runtime is not served.runtime:
                raise RuvmlxError(NOT_OPEN)
            self.rest()
            runtime.writer.submit(served.request, served, session_id)
        except Exception as error:  # noqa: BLE001 - the caller receives the error
            served.fail(error)
            return
        if not self.busy:
            self.busy = True
            self._step()

    def _step(self) -> None:
        """Run one step of the scheduler for all submitted requests. Put the next step at the end of the
        queue, so that waiting calls run first."""
        runtime = self._runtime()
        if not self.busy or runtime is None:
            return
        self._one_step(runtime)
        if self.busy:
            # the queue refuses work while the host closes; in this case `finish` runs the remaining steps
            with contextlib.suppress(RuntimeError):
                self._pool.submit(self._step)

    def _one_step(self, runtime: Runtime) -> None:
        try:
            more = runtime.writer.scheduler.step()
        except Exception as error:  # noqa: BLE001 - the callers receive the error
            runtime.writer.scheduler.fail_all(error)
            more = False
        self._between()
        if not more:
            self.rest()
            self.busy = False


class ChunkStream:
    """A queue that passes the chunks of one reply from the runtime's thread to an event loop. Only the
    runtime's thread calls `put` and `end`."""

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
        """End the stream. error: the error that ended the reply; None: the reply is complete. A second call
        changes nothing."""
        if not self._ended:
            self._error, self._ended = error, True
            self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # a closed event loop raises this error
            self._loop.call_soon_threadsafe(self._news.set)

    @property
    def is_over(self) -> bool:
        """Return True if the stream has ended and the reader has read every chunk."""
        return self._ended and not self._chunks

    async def batches(self) -> AsyncIterator[list[Chunk]]:
        """Yield lists of chunks. Each list has all chunks that came after the previous list. Raises the error
        that `end` got."""
        while not self.is_over:
            await self._news.wait()
            self._news.clear()
            if batch := [self._chunks.popleft() for _ in range(len(self._chunks))]:
                yield batch
        if self._error is not None:
            raise self._error


class ServedRequest:
    """A submitted request that receives its chunks from the scheduler (engine/scheduler.py)."""

    def __init__(self, request: GenerationRequest, stream: ChunkStream):
        self.request, self.stream = request, stream
        self.runtime: Runtime | None = None  # the runtime whose tokenizer encoded the request

    def take(self, chunk: Chunk) -> None:
        self.stream.put(chunk, last=chunk.response is not None)

    def fail(self, error: BaseException) -> None:
        self.stream.end(error)


class GeneratedReply:
    """A reply whose chunks come from a generator."""

    def __init__(self, begin: BeginReply, cancel: threading.Event, stream: ChunkStream):
        self._begin, self.cancel, self.stream = begin, cancel, stream
        self._chunks: Iterator[Chunk] | None = None

    def step(self, runtime: Runtime) -> bool:
        """Write the next chunk. Return False if the generator has ended."""
        try:
            if self._chunks is None:
                self._chunks = self._begin(runtime, self.cancel)
            chunk = next(self._chunks, None)
        except Exception as error:  # noqa: BLE001 - the caller receives the error
            self.stream.end(error)
            return False
        if chunk is not None:
            self.stream.put(chunk)
        return chunk is not None
