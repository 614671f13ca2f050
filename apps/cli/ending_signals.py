"""This module lets the signals SIGTERM and SIGHUP end a verb (a command of `ruvmlx`) in order and soon.

After one of these signals, the verb ends as after Ctrl-C: it removes temporary folders and ends child
processes. If a long computation in a library delays this end, the process exits GRACE seconds after the
signal. An end of the process at any moment does not damage the store.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
GRACE = 1.2  # seconds from the signal until the process exits without further waiting


def end_on_signals() -> None:
    """Handle SIGTERM and SIGHUP from now on. A signal that the process ignores (nohup) stays ignored. Call
    this function in the main thread. The chat and the server later install handlers of their own."""
    taken = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    if not taken:
        return
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in taken:
        signal.signal(number, _unwind)
    # Python calls a signal handler only between two Python instructions. But Python's C code writes the
    # signal's number to this pipe at once.
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(heard,), daemon=True).start()


def _unwind(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second signal of this number ends the process at once
    children = sys.modules.get("ruvmlx.platform.bounded_process")
    if children is not None and hasattr(children, "ending"):  # else the module's import is in progress
        children.ending.set()
        children.stop_requests()
    raise SystemExit(_exit_code(number))


def _end_in_time(heard: int) -> None:
    """End the process GRACE seconds after a signal whose handler is `_unwind`. heard: the pipe from which
    this thread reads the numbers of signals."""
    while number := os.read(heard, 1):
        if signal.getsignal(number[0]) in (_unwind, signal.SIG_DFL) and number[0] in SIGNALS:
            time.sleep(GRACE)
            os._exit(_exit_code(number[0]))


def _exit_code(number: int) -> int:
    """Return the exit code that a shell reports for a process that the signal `number` ended."""
    return 128 + number
