"""This module lets SIGTERM and SIGHUP end a verb in order and soon.

The verb unwinds as after Ctrl-C: it removes temporary folders and ends child processes. If a long computation
in a library delays the end, the process exits after GRACE seconds. The store is safe at every moment.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
GRACE = 1.2  # seconds until the process exits


def end_on_signals() -> None:
    """Handle these signals from now on. Signals that are ignored (nohup) stay ignored. Call this function in
    the main thread. The chat and the server later replace the handlers."""
    taken = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    if not taken:
        return
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in taken:
        signal.signal(number, _unwind)
    # Python runs a handler only between two instructions. Its C part writes the signal's number to this file
    # at once.
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(heard,), daemon=True).start()


def _unwind(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    if (children := sys.modules.get("ruvmlx.platform.bounded_process")) is not None:
        children.ending.set()
        children.stop_requests()
    raise SystemExit(_exit_code(number))


def _end_in_time(heard: int) -> None:
    """End the process GRACE seconds after a signal whose handler is `_unwind`."""
    while number := os.read(heard, 1):
        if signal.getsignal(number[0]) in (_unwind, signal.SIG_DFL) and number[0] in SIGNALS:
            time.sleep(GRACE)
            os._exit(_exit_code(number[0]))


def _exit_code(number: int) -> int:
    """Return the exit code that a shell reports for a process that this signal ended."""
    return 128 + number
