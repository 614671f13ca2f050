"""Ends from outside: the terminal is closed, a signal ends the process, a pipe's reader closes it.

The callers stop the reply, which commits what was written so far, and then leave. So nothing is lost.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

SIGNALS = (signal.SIGHUP, signal.SIGTERM)


def exit_code(signum: int) -> int:
    """The exit code that a shell reports for a process ended by this signal."""
    return 128 + signum


@contextlib.contextmanager
def heard(handler: Callable[[int], None], signals: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[None]:
    """Call handler(signum) in the main thread for these signals. Ignored signals (nohup) stay ignored."""
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
    """Flush the streams. A stream without a reader is redirected to /dev/null, or Python's exit would
    fail."""
    for stream in streams:
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
