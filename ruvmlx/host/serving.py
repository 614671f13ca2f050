"""This module computes replies in the runtime's thread, step by step, and passes their chunks to event loops.

Every reply comes from a generator (`write`). The generator of a submitted request (`submit`) is the one that
`ReplyWriter.generate` returns. The generators take turns. One step of any reply computes the next token of
all replies that use the same base LoRA (engine/scheduler.py). Other calls of the runtime run between two
turns.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..engine.types import NO_NEWS, Chunk, GenerationRequest
from ..errors import ModelClosed, RuvmlxError
from ..runtime import Runtime

T = TypeVar("T")
# texts with more characters are encoded in a thread of their own, because the tokenizer needs tens of
# milliseconds for them
LONG_TEXT = 20_000
NOT_OPEN = "no model is open; ask again when one is."
# A BeginReply is a function that streams a reply until the event is set.
BeginReply = Callable[[Runtime, threading.Event], Iterator[Chunk]]


class ServingLoop:
    """An object of this class has the replies in progress of one host. Event loops call its coroutines. Any
    thread can call `cancel_all`, `is_busy` and `is_writing`. Only the runtime's thread can call the other
    methods."""

    def __init__(
        self, pool: ThreadPoolExecutor, runtime: Callable[[], Runtime | None], between: Callable[[], None]
    ):
        """pool: the executor of the runtime's thread. runtime: a function that returns the runtime in use,
        or None if no runtime is open. between: a function that the loop calls after each turn of a reply."""
        self._pool, self._runtime, self._between = pool, runtime, between
        self._encoders = [ThreadPoolExecutor(1, "encoding"), ThreadPoolExecutor(1, "encoding-long")]
        self._lock = threading.Lock()
        self._replies: set[ReplyInProgress] = set()

    @property
    def is_busy(self) -> bool:
        """Return True if a reply is in progress."""
        return bool(self._replies)

    @property
    def is_writing(self) -> bool:
        """Return True if a reply is in progress that is no submitted request."""
        with self._lock:
            return not all(reply.is_request for reply in self._replies)

    async def write(
        self, begin: BeginReply, cancel: threading.Event, is_request: bool = False
    ) -> AsyncIterator[list[Chunk]]:
        """Yield the chunks of begin(runtime, cancel). The model continues to write the reply even if the
        caller reads no chunk.

        is_request: True for a submitted request: the chunk with the response is the last one, and another
            model in place of this one ends the reply with an error; False: the text so far is then the reply
        """
        reply = ReplyInProgress(begin, cancel, ChunkStream(asyncio.get_running_loop()), is_request)
        with self._lock:
            self._replies.add(reply)
        self._pool.submit(self._take_turn, reply)
        async for batch in reply.stream.batches():
            yield batch

    async def submit(self, request: GenerationRequest, session_id: str | None) -> AsyncIterator[list[Chunk]]:
        """Encode a request in another thread, then `write` its reply. If the caller closes the iterator, the
        request is cancelled."""
        encoder = self._runtime()  # the token ids are those of this runtime's tokenizer

        def begin(runtime: Runtime, _: threading.Event) -> Iterator[Chunk]:
            if runtime is not encoder:
                raise ModelClosed(NOT_OPEN)
            return runtime.writer.generate(request, session_id)

        try:
            request = await self._encoded_or_noted(request)
            async for batch in self.write(begin, request.cancel, is_request=True):
                yield batch
        except BaseException:
            request.cancel.set()
            raise

    async def encode(self, work: Callable[[Runtime], T], letters: int) -> T:
        """Run work that only encodes text, in a thread for short texts or a thread for long texts. With
        separate threads, the event loop and the model do not wait for the encoding, and short texts do not
        wait for long texts. letters: the length of the text in characters."""
        runtime = self._runtime()
        if runtime is None:
            raise ModelClosed(NOT_OPEN)
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

    def cancel_all(self) -> None:
        """End every reply after its current step. Any thread can call this method."""
        with self._lock:
            for reply in self._replies:
                reply.cancel.set()

    def rest(self) -> None:
        """Install the adapter in use in the model again after replies with other adapters, because all other
        calls of the runtime expect the adapter in use."""
        if self._replies and (runtime := self._runtime()) is not None:
            runtime.writer.scheduler.rest()

    def end_all(self, error: RuvmlxError) -> None:
        """End every submitted request with `error`. End every other reply and keep its text so far."""
        replies = list(self._replies)
        self._finish([reply for reply in replies if not reply.is_request])
        begun = [reply for reply in replies if reply.is_request and reply.has_begun]
        if begun and (runtime := self._runtime()) is not None:
            runtime.writer.scheduler.fail_all(error)
            self._finish(begun)

    def finish(self) -> None:
        """Cancel all replies and take their turns until they have ended, so that their texts are stored."""
        self._finish(list(self._replies))

    def close(self) -> None:
        """End the threads that encode texts."""
        for encoder in self._encoders:
            encoder.shutdown(wait=False, cancel_futures=True)

    def _finish(self, replies: Sequence["ReplyInProgress"]) -> None:
        for reply in replies:
            reply.cancel.set()
        for reply in replies:
            while self._goes_on(reply):
                pass

    def _take_turn(self, reply: "ReplyInProgress") -> None:
        """Write what one turn of a reply yields. Put the next turn at the end of the queue, so that waiting
        calls run first."""
        if reply in self._replies and self._goes_on(reply):
            # the queue refuses work while the host closes; in this case `finish` takes the remaining turns
            with contextlib.suppress(RuntimeError):
                self._pool.submit(self._take_turn, reply)
        self._between()

    def _goes_on(self, reply: "ReplyInProgress") -> bool:
        """Write what one turn of a reply yields. Return False if the reply has ended."""
        runtime = self._runtime()
        if runtime is not None and reply.step(runtime):
            return True
        with self._lock:
            self._replies.discard(reply)
        reply.stream.end(None if runtime is not None else ModelClosed(NOT_OPEN))
        return False


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


class ReplyInProgress:
    """A reply whose chunks come from a generator. is_request: as in `ServingLoop.write`."""

    def __init__(self, begin: BeginReply, cancel: threading.Event, stream: ChunkStream, is_request: bool):
        self._begin, self.cancel, self.stream, self.is_request = begin, cancel, stream, is_request
        self._chunks: Iterator[Chunk] | None = None

    @property
    def has_begun(self) -> bool:
        return self._chunks is not None

    def step(self, runtime: Runtime) -> bool:
        """Write the next chunk. Return False if the generator has ended."""
        try:
            if self._chunks is None:
                self._chunks = self._begin(runtime, self.cancel)
            chunk = next(self._chunks, None)
            if chunk is not None and chunk.response is not None and self.is_request:
                self.stream.put(chunk, last=True)
                chunk = next(self._chunks, None)  # None: the generator ends
        except BaseException as error:  # noqa: BLE001 - the caller receives the error, also a panic in Rust
            # the traceback of an error for the user would keep stack frames alive, and these the KV caches
            self.stream.end(error.with_traceback(None) if isinstance(error, RuvmlxError) else error)
            return False
        if chunk is not None and chunk != NO_NEWS:
            self.stream.put(chunk)
        return chunk is not None
