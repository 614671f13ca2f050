"""The end that comes from outside: the terminal is closed, the process is told to end, a reader leaves.

What was said so far is kept in every case; the callers stop the reply, which commits it, and then leave.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

SIGNALS = (signal.SIGHUP, signal.SIGTERM)


def exit_code(signum: int) -> int:
    """As a shell reports a process that a signal ended."""
    return 128 + signum


@contextlib.contextmanager
def heard(handler: Callable[[int], None], signals: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[None]:
    """handler(signum) in the main thread while this lasts. A signal that is ignored (nohup) stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signals}
    taken = [number for number, old in before.items() if old not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, lambda signum, _: handler(signum))
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def let_go(*streams: TextIO | None) -> None:
    """A stream whose other side has gone holds nothing back: at exit Python would fail to flush it."""
    for stream in streams:
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
