"""This module runs calls in a thread of their own, one after another, in the order of their arrival.

The thread is a daemon, so Python does not wait for this thread at the end of a program. After the end of the
main thread, another thread of the program can still run, and this module accepts the calls of that thread. A
ThreadPoolExecutor would refuse these calls, and Python would wait for the threads of the executor.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class CallThread:
    """A queue of calls, and a thread that runs these calls one after another. The method `end` ends the
    thread. If Python frees this object, the thread ends, too."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[Call | None]()
        self._thread = threading.Thread(target=_run, args=(self._calls,), name="ruvmlx", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Put the call work(*arguments) into the queue. Return the future of the result. Do not call this
        method after `end`, because the thread then runs no call.

        A forked process does not have the thread. There, this method runs the work itself. A call of a model
        then raises UsageError and does not wait without end."""
        done = Future[T]()
        if self._thread.is_alive():
            self._calls.put((done, work, arguments))
        else:
            _run_call(done, work, arguments)
        return done

    def end(self) -> None:
        """Let the thread end after it has run the calls that are in the queue now. Do not wait for this end
        (`join`)."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()


def _run(calls: "SimpleQueue[Call | None]") -> None:
    while (call := calls.get()) is not None:
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
