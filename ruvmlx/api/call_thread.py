"""This module runs calls in a thread of their own, one after another, in the order of their arrival.

The thread is a daemon, so Python does not wait for this thread at the end of a program. After the end of the
main thread, another thread of the program can still run, and this module accepts the calls of that thread. A
ThreadPoolExecutor would refuse these calls, and Python would wait for the threads of the executor.

If no call comes in the IDLE_AFTER seconds after a call, the thread can do idle work. The next call ends the
idle work.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


IdleWork = Callable[[threading.Event], None]
IDLE_AFTER = 0.3  # seconds without a call, after which the idle work starts


class CallQueue(SimpleQueue[Call | None]):
    """A queue of the calls that the thread will run. The item None ends the thread.

    idle_work: a function that the thread calls with the event `cancel`; None: the thread does no idle work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.idle_work: IdleWork | None = None
        self._cancel = threading.Event()  # ends the idle work

    def add(self, call: Call | None) -> None:
        self.put(call)
        self._cancel.set()

    def next_call(self) -> Call | None:
        """Return the next call. If no call comes for IDLE_AFTER seconds, do the idle work first."""
        if self.idle_work is not None:
            try:
                return self.get(timeout=IDLE_AFTER)
            except Empty:
                self._cancel.clear()
                if self.empty():  # `clear` can have undone the `set` of a call that came after `get`
                    self.idle_work(self._cancel)
        return self.get()


class CallThread:
    """A queue of calls, and a thread that runs these calls one after another. The method `end` ends the
    thread. If Python frees this object, the thread ends, too."""

    def __init__(self) -> None:
        self._calls = CallQueue()
        self._thread = threading.Thread(target=_run, args=(self._calls,), name="ruvmlx", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.add, None).atexit = False

    def set_idle_work(self, work: IdleWork) -> None:
        """Let the thread call work(cancel) if no call comes in the IDLE_AFTER seconds after a call. The next
        call, and the method `end`, set the event `cancel`; the work must then end at once. The work must
        handle its errors, and must not keep this CallThread."""
        self._calls.idle_work = work

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Put the call work(*arguments) into the queue. Return the future of the result. Do not call this
        method after `end`, because the thread then runs no call.

        A forked process does not have the thread. There, this method runs the work itself. A call of a model
        then raises UsageError and does not wait without end."""
        done = Future[T]()
        if self._thread.is_alive():
            self._calls.add((done, work, arguments))
        else:
            _run_call(done, work, arguments)
        return done

    def end(self) -> None:
        """Let the thread end after it has run the calls that are in the queue now. Do not wait for this end
        (`join`)."""
        self._calls.add(None)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()


def _run(calls: CallQueue) -> None:
    while (call := calls.next_call()) is not None:
        _run_call(*call)
        del call  # while the thread waits, it keeps no reply and no model


def _run_call(done: Future[Any], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run a call, and give its result or its error to the future `done`."""
    if done.set_running_or_notify_cancel():
        try:
            done.set_result(work(*arguments))
        except BaseException as error:  # noqa: BLE001 - the caller receives the error
            done.set_exception(error)
    del done, work, arguments  # an error keeps this frame, and the frame must keep no reply and no model
