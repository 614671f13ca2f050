"""This module runs independent parts of an experiment in several processes. Each process loads the model.

One process uses all cores to decode a batch, but only one core to fit taste models and to save ratings. So
several processes with one core each use more of the processor's time than one process does.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

from ruvmlx.platform.parent import end_with_parent

Part = TypeVar("Part")
Result = TypeVar("Result")

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_opened: list[Any] = []  # the result of `Workers.open` in this process


@dataclass(frozen=True)
class Workers:
    """A set of at most `count` processes. open: a function that makes the object with which a process works,
    for example a model; each process calls this function once."""

    open: Callable[[], Any]
    count: int

    def results(self, work: Callable[[Any, Part], Result], parts: Sequence[Part]) -> Iterator[Result]:
        """Yield `work(opened, part)` for each part, in the order in which the parts end. `opened` is the
        result of `open` in the part's process. With several processes, `open`, `work`, parts and results are
        pickled. The first error ends all processes."""
        count = min(self.count, len(parts))
        if count <= 1:
            opened = self.open() if parts else None
            yield from (work(opened, part) for part in parts)
            return
        # do not fork, because a fork copies locks of threads that the child does not have
        context = get_context("spawn")
        with ProcessPoolExecutor(count, context, _open, (self.open,)) as pool:
            try:
                with _deferred_signals():
                    waiting = [pool.submit(_work, work, part) for part in parts]
                for done in as_completed(waiting):
                    yield done.result()
            except BaseException:
                _stop(pool)
                raise


@contextmanager
def _deferred_signals() -> Iterator[None]:
    """In the with-block, hold back the signals that end this process, because a child process that is half
    started would print a traceback. After the with-block, raise the signals that arrived. Processes that are
    started in the with-block inherit a mask that blocks these signals."""
    came: list[int] = []
    # The mask protects only the started processes. In this process, another thread can take a signal, and
    # Python then calls the signal's handler in the main thread. So this function also replaces the handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    handlers = {number: signal.getsignal(number) for number in _ENDS}
    try:
        for number, handler in handlers.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for late in came:
            signal.raise_signal(late)


def _open(open_worker: Callable[[], Any]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process gets SIGINT, too, and ends this process
    end_with_parent()
    _opened.append(open_worker())


def _work(work: Callable[[Any, Part], Result], part: Part) -> Result:
    return work(_opened[0], part)


def _stop(pool: ProcessPoolExecutor) -> None:
    """Kill the pool's processes at once. The processes hold no data that must be saved."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
