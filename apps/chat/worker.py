"""The one thread that owns the runtime, as awaitable calls for the app.

MLX's streams are bound to threads, and a reply takes seconds: everything that touches the runtime,
`open` and `close` included, runs here, one call at a time. Calls are done in order, but those of
`call_between` do not wait for a reply that is being written, and every call ends a `rest`. The app's own
thread never waits.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ruvmlx.engine.types import Chunk
from ruvmlx.progress import Watch

from .contract import ChatRuntime, OpenRuntime
from .opener import Holder, Opener, Stoppable

T = TypeVar("T")
Writing = Callable[[ChatRuntime, threading.Event], Iterator[Chunk]]


class RuntimeThread:
    def __init__(self, open_runtime: OpenRuntime) -> None:
        self._holder = Holder(Opener.of(open_runtime))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runtime")
        self._between: deque[Callable[[], None]] = deque()
        self._closing = threading.Lock()
        self._closed: Future[None] | None = None
        self._cancel: threading.Event | None = None  # of the reply that is being written
        self._disturbed: threading.Event | None = None  # of the newest `rest`
        self._unread: threading.Event | None = None  # of the newest `settle`
        self._opening: Stoppable | None = None  # the newest

    async def open(self, watch: Watch) -> None:
        """The watch is told in the runtime's thread; `stop` ends it."""
        watch = self._opening = Stoppable(watch)
        await self._run(lambda: self._holder.open(watch))

    async def switch(self, model: str, session: str, watch: Watch) -> None:
        """Go on with another model. Where that fails, the one in use stays (Holder.switch)."""
        self.disturb()
        self._hurry()
        watch = self._opening = Stoppable(watch)
        await self._run(lambda: self._holder.switch(model, session, watch))

    @property
    def is_open(self) -> bool:
        return self._holder.runtime is not None

    @property
    def is_first_run(self) -> bool:
        return self._holder.first_run

    async def call(self, work: Callable[[ChatRuntime], T]) -> T:
        """work(runtime), in the runtime's thread."""
        self.disturb()
        return await self._run(lambda: work(self._opened()))

    async def call_between(self, work: Callable[[ChatRuntime], T]) -> T:
        """The same, if need be between two chunks of a reply: only for ratings and looks at the store."""
        self.disturb()
        done: Future[T] = Future()

        def answer() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work(self._opened()))
                except BaseException as error:  # noqa: BLE001 - goes to whoever waits for it
                    done.set_exception(error)

        self._between.append(answer)
        self._pool.submit(self._answer)
        return await asyncio.wrap_future(done)

    def _answer(self) -> None:
        """Do what is queued for between; a reply comes by after each chunk, the idle thread at once."""
        while self._between:
            self._between.popleft()()

    async def rest(self, work: Callable[[ChatRuntime, threading.Event], T]) -> T:
        """work(runtime, cancel) in time that nobody wants: whatever else is called for sets `cancel`."""
        cancel = self._disturbed = threading.Event()
        return await self._run(lambda: work(self._opened(), cancel))

    async def settle(self) -> None:
        """Prepare the newest replies for their rating. A message ends that; a rating needs it, and waits."""
        self.disturb()
        cancel = self._unread = threading.Event()
        await self._run(lambda: self._opened().settle(cancel))

    def disturb(self) -> None:
        """End the `rest` that is going on or queued, if there is one; from any thread."""
        if self._disturbed is not None:
            self._disturbed.set()

    def write(self, begin: Writing) -> AsyncIterator[list[Chunk]]:
        """The chunks of the reply that begin(runtime, cancel) streams, all that have come since the last
        look: a slow screen never falls behind.

        `stop` works from now on, also before the first chunk is asked for.
        """
        self.disturb()
        self._hurry()
        self._cancel = threading.Event()
        return self._stream(begin, self._cancel)

    async def _stream(self, begin: Writing, cancel: threading.Event) -> AsyncIterator[list[Chunk]]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        chunks: deque[Chunk] = deque()

        def pump() -> None:
            for chunk in begin(self._opened(), cancel):
                chunks.append(chunk)
                with contextlib.suppress(RuntimeError):  # the app has gone; the reply is still committed
                    loop.call_soon_threadsafe(arrived.set)
                self._answer()

        pumping = asyncio.ensure_future(self._run(pump))
        pumping.add_done_callback(lambda _: arrived.set())
        while not (pumping.done() and not chunks):
            await arrived.wait()
            arrived.clear()
            batch = [chunks.popleft() for _ in range(len(chunks))]
            if batch:
                yield batch
        await pumping  # raises what the runtime raised

    def stop(self) -> None:
        """End the reply that is being written, if there is one; its text is kept. An opening ends, too."""
        if self._cancel is not None:
            self._cancel.set()
        if self._opening is not None:
            self._opening.stopped.set()

    def _hurry(self) -> None:
        if self._unread is not None:
            self._unread.set()

    async def close(self) -> None:
        """Stops a reply, waits for what is running, then closes the runtime."""
        await asyncio.shield(asyncio.wrap_future(self._close_once()))  # it closes even if nobody waits

    def close_now(self) -> BaseException | None:
        """The same from any thread, without an event loop; what went wrong. Harmless when repeated."""
        return self._close_once().exception()

    def _close_once(self) -> Future[None]:
        self._holder.leaving = True
        self.stop()
        self.disturb()
        self._hurry()
        with self._closing:
            if self._closed is None:
                self._closed = self._pool.submit(self._close)
                self._pool.shutdown(wait=False)
            return self._closed

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _opened(self) -> ChatRuntime:
        return self._holder.opened

    def _close(self) -> None:
        self._holder.close()
