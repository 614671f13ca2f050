"""Runs independent parts of an experiment in several processes, each with a model of its own.

One process decodes a batch with all cores, but it fits tastes and commits ratings with one core. Two
processes with one core each do both at once.
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
_opened: list[Any] = []  # what this process works with


@dataclass(frozen=True)
class Workers:
    """open: makes what a process works with; it is called once in each of at most `count` processes."""

    open: Callable[[], Any]
    count: int

    def results(self, work: Callable[[Any, Part], Result], parts: Sequence[Part]) -> Iterator[Result]:
        """work(open(), part) for each part, as the parts finish. `open`, `work`, parts and results are
        pickled if there are several processes. The first error ends all of them."""
        count = min(self.count, len(parts))
        if count <= 1:
            opened = self.open() if parts else None
            yield from (work(opened, part) for part in parts)
            return
        context = get_context("spawn")  # a fork would copy locks of threads that the child does not have
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
    """In the block, no signal ends this process: a process that is half started would print a traceback.
    After the block, the process gets the signals that came. Processes that are started in it block them."""
    came: list[int] = []
    # The mask is for the processes that are started. Another thread of this process can take a signal, and
    # Python calls the handler in the main thread all the same: so the handlers are exchanged, too.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process gets it, too, and ends this one
    end_with_parent()
    _opened.append(open_worker())


def _work(work: Callable[[Any, Part], Result], part: Part) -> Result:
    return work(_opened[0], part)


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the processes now; they hold nothing that must be saved."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
