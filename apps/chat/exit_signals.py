"""This module handles events that end the chat from outside: a closed terminal, a signal, and a pipe without
a reader.

After one of these events, the app and plain mode stop the reply, save the words that the model has written so
far, and then end. So the user loses no text of the reply.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

SIGNALS = (signal.SIGHUP, signal.SIGTERM)


def exit_code(signum: int) -> int:
    """Return the exit code that a shell reports for a process that the signal `signum` ended."""
    return 128 + signum


@contextlib.contextmanager
def heard(handler: Callable[[int], None], signals: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[None]:
    """Within the `with` block, call handler(signum) in the main thread for each signal of `signals`. A signal
    that the process ignores already (nohup) stays ignored. In another thread than the main thread, the block
    runs without the handler."""
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


@contextlib.contextmanager
def wakeups() -> Iterator[int | None]:
    """Make a pipe, and yield the end of the pipe that the caller can read. In the `with` block, Python writes
    one byte to the pipe for each signal that has a handler. If this thread is not the main thread, make no
    pipe, and yield None."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield heard
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        os.close(wake)
        os.close(heard)


def let_go(*streams: TextIO | None) -> None:
    """Flush the given streams. If a stream has no reader any more, redirect it to /dev/null, because Python's
    own flush at the exit would fail."""
    for stream in streams:
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
