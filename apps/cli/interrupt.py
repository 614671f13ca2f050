"""This module lets the user stop long work with Ctrl-C and keep its result."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ruvmlx.platform.bounded_process import stop_requests


@contextmanager
def ctrl_c_sets(cancel: threading.Event) -> Iterator[None]:
    """In the `with` block, let the first Ctrl-C set the event `cancel`, so that the work stops in order and
    its result is kept. The second Ctrl-C raises KeyboardInterrupt. Call this function only in the main
    thread."""

    def stop(signum: int, frame: object) -> None:
        cancel.set()
        stop_requests()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
