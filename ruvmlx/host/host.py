"""This module runs one open model in one thread with a queue of calls. The chat app and the server use this
module.

MLX binds its streams to threads, and a reply takes seconds. So all calls of the runtime, also `open` and
`close`, run in the host's thread, one at a time, in the order of their arrival; only the calls of
`call_between` go before other calls, and only `encode` and `encode_request` use other threads. A call for a
user ends idle work (work of `run_idle`, which runs while no user needs the model). The coroutines never block
the caller's event loop. The callers can have different event loops.

`write` streams any number of replies at the same time (serving.py). `submit` encodes a request in another
thread, then streams its reply in the same way. Other calls run between two steps of the replies.

model_holder.py holds the runtime in use. The chat in plain mode has no event loop, so it uses only the
holder.

A server has a host for each open model. All hosts of a server share one thread (`beside`), so that two models
never compute at the same time: the steps of the models take turns.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, cast

from ..engine.types import Chunk, GenerationRequest
from ..errors import Interrupted, ModelClosed
from ..platform import memory
from ..platform.bounded_process import stop_requests
from ..progress import QUIET, Watch
from ..runtime import Runtime
from .model_holder import ModelHolder, Opener, OpenRuntime, StoppableWatch
from .serving import NOT_OPEN, BeginReply, ServingLoop

T = TypeVar("T")


def _slice(work: Generator[None, None, T]) -> tuple[float, bool, T | None]:
    """Run a generator to its next `yield`. Return (seconds of the run, True if the generator has ended, the
    generator's result)."""
    begun, ended, result = time.perf_counter(), False, None
    try:
        next(work)
    except StopIteration as end:
        ended, result = True, end.value
    return time.perf_counter() - begun, ended, result


class Host:
    """A host owns a runtime (an open model with its store), which runs in a separate thread. Any event loop
    can call the coroutines of a host."""

    def __init__(self, open_runtime: OpenRuntime, beside: "Host | None" = None) -> None:
        """beside: another host whose thread this host uses. Close `beside` after this host. If `beside` is
        None, this host gets its own thread."""
        self.holder = ModelHolder(Opener.of(open_runtime))
        own = ThreadPoolExecutor(1, thread_name_prefix="runtime") if beside is None else None
        self._pool: ThreadPoolExecutor = own or cast(Host, beside)._pool
        self._first = beside is None
        self._hosts: list[Host] = beside._hosts if beside else []  # all hosts that share this host's thread
        self._hosts.append(self)
        self._between: deque[Callable[[], None]] = deque()
        self._closing = threading.Lock()
        self._closed: Future[None] | None = None
        self._reply_cancel: threading.Event | None = None  # the event that ends the newest `write`
        self._idle_cancels: set[threading.Event] = set()  # the events that end the calls of `run_idle`
        self._settle_cancel: threading.Event | None = None  # the event that ends the newest `settle`
        self._opening: StoppableWatch | None = None  # the watch of the newest `open` or `switch`
        self.used_at = time.monotonic()  # the time of the newest call for a user to a host in this thread
        self._serving = ServingLoop(self._pool, lambda: self.holder.runtime, self._answer)

    async def open(self, watch: Watch) -> None:
        """Open the first runtime. The runtime's thread calls the watch. `stop` ends the opening."""
        watch = self._opening = StoppableWatch(watch)
        await self._run(lambda: self.holder.open(watch))

    async def switch(self, model: str, session: str, watch: Watch) -> None:
        """Switch to another model (ModelHolder.switch). `stop` ends the loading of the other model."""
        self.interrupt()
        watch = self._opening = StoppableWatch(watch)

        def switch() -> None:
            self._serving.end_all(ModelClosed("another model is being opened; ask again."))
            self.holder.switch(model, session, watch)

        await self._run(switch)

    async def release(self) -> None:
        """Close the runtime and free its memory. A later `open` opens the same model, with the adapter
        that was in use."""
        self.interrupt()

        def release() -> None:
            self._serving.end_all(ModelClosed(NOT_OPEN))
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
        return await self._run(lambda: work(self.holder.opened_runtime))

    async def call_in_slices(
        self,
        begin: Callable[[Runtime], Generator[None, None, T]],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run the generator begin(runtime) in the runtime's thread, in slices from one `yield` to the next.
        If replies are in progress, wait after each slice as long as the slice took, so that the replies go
        on. Raises Interrupted after a slice if should_stop() is True, and ModelClosed if another runtime has
        taken the runtime's place."""
        first, work = await self.call(lambda runtime: (runtime, begin(runtime)))

        def run_slice(runtime: Runtime) -> tuple[float, bool, T | None]:
            if runtime is not first:
                raise ModelClosed("another model is open now; ask again.")
            return _slice(work)

        while True:
            seconds, ended, result = await self.call(run_slice)
            if ended:
                return cast(T, result)
            if should_stop():
                raise Interrupted("ruvmlx was stopped before the work ended.")
            if self._is_thread_busy:
                await asyncio.sleep(seconds)

    async def call_between(self, work: Callable[[Runtime], T], is_use: bool = True) -> T:
        """Run work(runtime) before the other work in the queue, for example between two steps of a reply. Use
        this method only for ratings and short reads. is_use: as in `cancel_idle`."""
        self.cancel_idle(is_use)
        done: Future[T] = Future()

        def answer() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    self._serving.rest()
                    done.set_result(work(self.holder.opened_runtime))
                except BaseException as error:  # noqa: BLE001 - the caller receives the error
                    done.set_exception(error)

        self._between.append(answer)
        self._pool.submit(self._answer)
        return await asyncio.wrap_future(done)

    def _answer(self) -> None:
        """Run the work that `call_between` received. The host calls this method after each step of a reply,
        and from the queue of calls."""
        while self._between:
            self._between.popleft()()

    async def run_idle(self, work: Callable[[Runtime, threading.Event], T]) -> T:
        """Run work(runtime, cancel) while no user needs the model. Each later call for a user sets `cancel`,
        which ends the work. If replies are in progress, `cancel` is set before the work begins."""
        cancel = threading.Event()
        self._idle_cancels.add(cancel)

        def idle() -> T:
            if self._is_thread_busy:
                cancel.set()
            return work(self.holder.opened_runtime, cancel)

        try:
            return await self._run(idle)
        finally:
            self._idle_cancels.discard(cancel)

    @property
    def is_writing(self) -> bool:
        """Return True if a reply of `write` is in progress."""
        return self._serving.is_writing

    @property
    def _is_thread_busy(self) -> bool:
        """Return True if a reply of any host in this thread is in progress."""
        return any(host._serving.is_busy for host in self._hosts)

    def cancel_idle(self, is_use: bool = True) -> None:
        """End the idle work that runs or waits in the runtime's thread, because a user needs the model now.
        Any thread can call this method. is_use: False for a look that a program takes again and again, such
        as a read of the metrics; the next idle work then does not begin later because of the look."""
        now = time.monotonic()
        for host in list(self._hosts):
            host.used_at = now if is_use else host.used_at
            for cancel in list(host._idle_cancels):
                cancel.set()

    async def settle(self, watch: Watch = QUIET) -> bool:
        """Prepare the newest replies for their ratings. Return True if the preparation was not cancelled.

        `interrupt` and the methods that call it (such as `write` and `submit`) cancel the preparation, and so
        does a reply of `write` that is in progress; a later rating does the remaining work. Each call for a
        user ends the longest part, the replies that nobody sees, so that a rating does not wait for it.

        watch: the runtime's thread reports the progress of the first measurements of a model to this object
        """
        self.interrupt()
        cancel, unseen = threading.Event(), threading.Event()
        self._settle_cancel = cancel
        self._idle_cancels.add(unseen)

        def settle() -> None:
            if any(host.is_writing for host in self._hosts):
                cancel.set()
                unseen.set()
            self.holder.opened_runtime.learning.settle(cancel, watch, unseen)
            # The taste model frees large tables after a fit. Small blocks near the tables stay in use, so the
            # allocator keeps the memory of the tables. If a user waits, a later call does this work.
            if not (cancel.is_set() or unseen.is_set()):
                memory.give_back()

        try:
            await self._run(settle)
        finally:
            self._idle_cancels.discard(unseen)
        return not (cancel.is_set() or unseen.is_set())

    def interrupt(self) -> None:
        """End the work in the runtime's thread for which no user waits: idle work and `settle`. Any thread
        can call this method."""
        self.cancel_idle()
        for host in list(self._hosts):
            if host._settle_cancel is not None:
                host._settle_cancel.set()

    def write(self, begin: BeginReply, cancel: threading.Event | None = None) -> AsyncIterator[list[Chunk]]:
        """Stream the reply of begin(runtime, cancel) while other replies run. Each item of the iterator is a
        list of all chunks that came after the previous item, so a slow reader receives all waiting chunks at
        once.

        cancel: an event that ends the reply. `stop` also ends the reply, even before the first chunk is read.
        """
        self.interrupt()
        self._reply_cancel = cancel or threading.Event()
        return self._serving.write(begin, self._reply_cancel)

    def submit(self, request: GenerationRequest, session_id: str | None = None) -> AsyncIterator[list[Chunk]]:
        """Stream the reply to a request while other replies run. The reply is stored, and the user can rate
        it. Each item has all chunks since the last item. If the caller closes the iterator, the request is
        cancelled.

        session_id: the chat that the reply belongs to.
        """
        self.interrupt()
        return self._serving.submit(request, session_id)

    async def encode(self, work: Callable[[Runtime], T], letters: int) -> T:
        """Run work that only encodes text, in another thread than the model. letters: the length of the
        text."""
        self.cancel_idle()
        return await self._serving.encode(work, letters)

    async def encode_request(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with the token ids of its text (`ReplyWriter.encode_request`). The text is
        encoded in another thread than the model's."""
        self.cancel_idle()
        return await self._serving.encode_request(request)

    def stop(self) -> None:
        """End the newest reply of `write` and keep its text. If a model is being loaded, end the loading too.
        Also end the child processes that compile constraints."""
        if self._reply_cancel is not None:
            self._reply_cancel.set()
        self.stop_opening()
        stop_requests()

    def stop_opening(self) -> None:
        """End the loading of a model if it is in progress."""
        if self._opening is not None:
            self._opening.stopped.set()

    async def close(self) -> None:
        """Stop all replies, wait for running calls, then close the runtime."""
        # `shield` lets the runtime close even if the caller of `close` is cancelled
        await asyncio.shield(asyncio.wrap_future(self._close_once()))

    def close_now(self) -> BaseException | None:
        """Do the same as `close`, but block the calling thread. Return the error of the close, or None. Any
        thread can call this method, also more than once."""
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
