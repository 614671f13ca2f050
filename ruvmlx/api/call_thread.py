"""This module runs calls in a thread of their own, one after another, in the order of their arrival.

The thread is a daemon: Python does not wait for it at the end of a program, and a call can arrive after the
end of the main thread, from a thread that still runs. A ThreadPoolExecutor refuses such a call, and Python
waits for its threads.
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
    """A thread with a queue of calls. The thread ends after `end`, or when nobody has this object."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[Call | None]()
        self._thread = threading.Thread(target=_run, args=(self._calls,), name="ruvmlx", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run work(*arguments) in the thread. Do not call this method after `end`."""
        done = Future[T]()
        self._calls.put((done, work, arguments))
        return done

    def end(self) -> None:
        """End the thread after the calls that wait."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()


def _run(calls: "SimpleQueue[Call | None]") -> None:
    while (call := calls.get()) is not None:
        done, work, arguments = call
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work(*arguments))
            except BaseException as error:  # noqa: BLE001 - the caller receives the error
                done.set_exception(error)
        del call, done, work, arguments  # while the thread waits, it keeps no reply and no model
