"""This module lets long work stop when the user needs the machine.

Work that takes seconds receives a function `pause`. The work calls `pause` every few tens of milliseconds.
`pause` returns at once, or raises `Stopped` if the work must stop. The caller of the work catches `Stopped`
and keeps the results that are finished.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, Protocol, TypeVar

Pause = Callable[[], None]
T = TypeVar("T")
_LOOK_EVERY = 0.02  # seconds between two calls of `pause` in `ThreadedWork.wait`


class Stopped(Exception):
    """Another thread asked the work to stop, or the time for the work is over. The caller can resume the work
    later."""


class MemoryRanOut(Stopped):
    """The memory has no room for the work. The message says how many bytes the work needs and how many are
    left. The caller can resume the work when other work has freed memory."""


class Room(Protocol):
    """The memory that long work can take. next_try: the time.monotonic() at which work that found no room
    should begin again."""

    next_try: float

    @property
    def bytes_left(self) -> int:
        """Return the bytes that the work can still take; 0: not known."""

    def check(self) -> None:
        """Raise MemoryRanOut if the memory has no room for the work. Call this method before the work
        begins."""

    def guard(self, work_pause: Pause) -> Pause:
        """Return a function that calls `work_pause`, and that raises MemoryRanOut if the memory runs out."""


class EndlessRoom:
    """A room without a limit, for work whose memory nobody counts."""

    next_try, bytes_left = 0.0, 0

    def check(self) -> None:
        return

    def guard(self, work_pause: Pause) -> Pause:
        return work_pause


def stop_reason(stop: Stopped, otherwise: str) -> str:
    """Return the reason of a stop for a report: the message of MemoryRanOut, or `otherwise`."""
    return str(stop) if isinstance(stop, MemoryRanOut) else otherwise


def stop_when(cancel: threading.Event | None) -> Pause:
    """Return a function that raises Stopped if `cancel` is set. If `cancel` is None, the function never
    raises an error."""

    def pause() -> None:
        if cancel is not None and cancel.is_set():
            raise Stopped

    return pause


def stop_after(seconds: float) -> Pause:
    """Return a function that raises Stopped if the given number of seconds has passed since the call of
    `stop_after`."""
    deadline = time.monotonic() + seconds

    def pause() -> None:
        if time.monotonic() >= deadline:
            raise Stopped

    return pause


class ThreadedWork(Generic[T]):
    """A computation that runs to its end in a thread of its own. The computation must not use a model,
    because only the runtime's thread can run models."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._result = Future[T]()
        threading.Thread(target=self._run, args=(compute,), name="numbers", daemon=True).start()

    def _run(self, compute: Callable[[], T]) -> None:
        try:
            self._result.set_result(compute())
        except BaseException as error:  # noqa: BLE001 - `wait` raises the error
            self._result.set_exception(error)

    def wait(self, pause: Pause) -> T:
        """Return the result. While the computation runs, call `pause` again and again; `pause` can raise an
        exception to end the wait, and a later call can wait again. Raises the error of the computation."""
        while not wait([self._result], _LOOK_EVERY).done:
            pause()
        return self._result.result()
