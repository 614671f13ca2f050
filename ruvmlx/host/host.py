"""One open model in one thread, with a queue of calls: for the chat app, or a server.

MLX binds its streams to threads, and a reply takes seconds. So everything that touches the runtime, `open`
and `close` included, runs in the host's thread, one call at a time and in order. Every call ends idle work
(`run_idle`). The caller's event loop never blocks; callers may have different ones.

`write` and `submit` stream any number of replies at the same time (serving.py): calls run between two of
their steps.

model_holder.py holds the runtime in use. The plain chat, which has no event loop, uses only the holder.

A server has a host for each open model. They share one thread (`beside`), so that two models never compute at
the same time: their steps take turns.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, cast

from ..engine.types import Chunk, GenerationRequest
from ..errors import RuvmlxError
from ..platform.bounded_process import stop_requests
from ..progress import QUIET, Watch
from ..runtime import Runtime
from .model_holder import ModelHolder, Opener, OpenRuntime, StoppableWatch
from .serving import NOT_OPEN, BeginReply, ServingLoop

T = TypeVar("T")


def _slice(work: Generator[None, None, T]) -> tuple[float, bool, T | None]:
    """Seconds that the work took to its next `yield`; whether it has ended, and its result."""
    begun, ended, result = time.perf_counter(), False, None
    try:
        next(work)
    except StopIteration as end:
        ended, result = True, end.value
    return time.perf_counter() - begun, ended, result


class Host:
    """Owns a runtime in a thread of its own; its coroutines may be called from any event loop."""

    def __init__(self, open_runtime: OpenRuntime, beside: "Host | None" = None) -> None:
        """beside: a host whose thread this one uses, too. It is closed last."""
        self.holder = ModelHolder(Opener.of(open_runtime))
        own = ThreadPoolExecutor(1, thread_name_prefix="runtime") if beside is None else None
        self._pool: ThreadPoolExecutor = own or cast(Host, beside)._pool
        self._first = beside is None
        self._hosts: list[Host] = beside._hosts if beside else []  # all hosts of this thread
        self._hosts.append(self)
        self._between: deque[Callable[[], None]] = deque()
        self._closing = threading.Lock()
        self._closed: Future[None] | None = None
        self._reply_cancel: threading.Event | None = None  # of the newest `write`
        self._idle_cancel: threading.Event | None = None  # of the newest `run_idle`
        self._settle_cancel: threading.Event | None = None  # of the newest `settle`
        self._opening: StoppableWatch | None = None  # of the newest `open` or `switch`
        self.used_at = time.monotonic()  # of the newest call other than idle work
        self._serving = ServingLoop(self._pool, lambda: self.holder.runtime, self._answer)

    async def open(self, watch: Watch) -> None:
        """Open the first runtime. The watch is called in the runtime's thread; `stop` ends the opening."""
        watch = self._opening = StoppableWatch(watch)
        await self._run(lambda: self.holder.open(watch))

    async def switch(self, model: str, session: str, watch: Watch) -> None:
        """Switch to another model (ModelHolder.switch); `stop` ends the opening."""
        self.interrupt()
        watch = self._opening = StoppableWatch(watch)

        def switch() -> None:
            self._serving.end_all(RuvmlxError("another model is being opened; ask again."))
            self.holder.switch(model, session, watch)

        await self._run(switch)

    async def release(self) -> None:
        """Close the runtime and free its memory. A later `open` opens the same model and adapter."""
        self.interrupt()

        def release() -> None:
            self._serving.end_all(RuvmlxError(NOT_OPEN))
            self.holder.release()

        await self._run(release)

    @property
    def is_open(self) -> bool:
        return self.holder.runtime is not None

    @property
    def is_first_run(self) -> bool:
        return self.holder.first_run

    async def call(self, work: Callable[[Runtime], T]) -> T:
        """Run work(runtime) in the runtime's thread."""
        self.cancel_idle()
        return await self._run(lambda: work(self.holder.opened))

    async def call_in_slices(self, begin: Callable[[Runtime], Generator[None, None, T]]) -> T:
        """Run begin(runtime) in the runtime's thread, from one `yield` to the next. Replies that are being
        written get as much time after each slice."""
        work = await self.call(begin)
        while True:
            seconds, ended, result = await self.call(lambda _: _slice(work))
            if ended:
                return cast(T, result)
            if self._is_thread_busy:
                await asyncio.sleep(seconds)

    async def call_between(self, work: Callable[[Runtime], T]) -> T:
        """Like `call`, but before the work that waits in the queue. For ratings and short reads only."""
        self.cancel_idle()
        done: Future[T] = Future()

        def answer() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    self._serving.rest()
                    done.set_result(work(self.holder.opened))
                except BaseException as error:  # noqa: BLE001 - goes to whoever waits for it
                    done.set_exception(error)

        self._between.append(answer)
        self._pool.submit(self._answer)
        return await asyncio.wrap_future(done)

    def _answer(self) -> None:
        """Run the work of `call_between`: called after each step of a reply, and from the queue."""
        while self._between:
            self._between.popleft()()

    async def run_idle(self, work: Callable[[Runtime, threading.Event], T]) -> T:
        """Run work(runtime, cancel) while nobody needs the model: any other call sets `cancel`. While
        replies are written it is set from the start."""
        cancel = self._idle_cancel = threading.Event()

        def idle() -> T:
            if self._is_thread_busy:
                cancel.set()
            return work(self.holder.opened, cancel)

        return await self._run(idle)

    @property
    def is_writing(self) -> bool:
        """Is a reply of `write` not at its end?"""
        return self._serving.is_writing

    @property
    def _is_thread_busy(self) -> bool:
        """Is a reply of any host in this thread not at its end?"""
        return any(host._serving.busy or host.is_writing for host in self._hosts)

    def cancel_idle(self) -> None:
        """End the idle work that runs or waits in the runtime's thread, because a user needs the model now.
        May be called from any thread."""
        now = time.monotonic()
        for host in list(self._hosts):
            host.used_at = now
            if host._idle_cancel is not None:
                host._idle_cancel.set()

    async def settle(self, watch: Watch = QUIET) -> bool:
        """Prepare the newest replies for their ratings; returns whether that was done to its end. `write` and
        `interrupt` cancel it, also a reply that is being written; a rating does the rest.

        watch: gets the progress where the model was never measured, in the runtime's thread
        """
        self.interrupt()
        cancel = self._settle_cancel = threading.Event()

        def settle() -> None:
            if any(host.is_writing for host in self._hosts):
                cancel.set()
            self.holder.opened.settle(cancel, watch)

        await self._run(settle)
        return not cancel.is_set()

    def interrupt(self) -> None:
        """End the work in the runtime's thread for which no user waits: idle work, and `settle`. From any
        thread."""
        self.cancel_idle()
        for host in list(self._hosts):
            if host._settle_cancel is not None:
                host._settle_cancel.set()

    def write(self, begin: BeginReply, cancel: threading.Event | None = None) -> AsyncIterator[list[Chunk]]:
        """Stream the reply of begin(runtime, cancel), beside others. Each item has all chunks since the last
        one, so a slow reader does not fall behind.

        cancel: ends the reply. `stop` ends it, too, from now on, even before the first chunk is requested.
        """
        self.interrupt()
        self._reply_cancel = cancel or threading.Event()
        return self._serving.write(begin, self._reply_cancel)

    def submit(self, request: GenerationRequest, session_id: str | None = None) -> AsyncIterator[list[Chunk]]:
        """Stream the reply to a request, which is served beside others; it is stored and can be rated. Each
        item has all chunks since the last one. The request is cancelled when the iterator is closed.

        session_id: the chat that the reply belongs to.
        """
        self.interrupt()
        return self._serving.serve(request, session_id)

    async def encode(self, work: Callable[[Runtime], T], letters: int) -> T:
        """Run work that only encodes text, of so many characters, beside all other work."""
        self.cancel_idle()
        return await self._serving.encode(work, letters)

    async def encode_request(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the ids of its text: `ReplyWriter.encode_request`, beside all other work."""
        self.cancel_idle()
        return await self._serving.encode_request(request)

    def stop(self) -> None:
        """End the reply in progress, keeping its text, and an opening in progress."""
        if self._reply_cancel is not None:
            self._reply_cancel.set()
        self.stop_opening()
        stop_requests()

    def stop_opening(self) -> None:
        """End the opening of a model that is in progress."""
        if self._opening is not None:
            self._opening.stopped.set()

    async def close(self) -> None:
        """Stop a reply, wait for running calls, then close the runtime."""
        await asyncio.shield(asyncio.wrap_future(self._close_once()))  # also if the caller is cancelled

    def close_now(self) -> BaseException | None:
        """Like `close`, but blocks, from any thread; returns the error, if any. May be repeated."""
        return self._close_once().exception()

    def _close_once(self) -> Future[None]:
        self.holder.leaving = True
        self.stop()
        self.interrupt()
        self._serving.cancel_all()
        with self._closing:
            if self._closed is None:
                self._closed = self._pool.submit(self._end)
                if self._first:
                    self._pool.shutdown(wait=False)
            return self._closed

    def _end(self) -> None:
        self._serving.finish()
        self._serving.close()
        self._hosts.remove(self)
        self.holder.close()

    async def _run(self, work: Callable[[], T]) -> T:
        def rest_then_work() -> T:
            self._serving.rest()
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._pool, rest_then_work)
