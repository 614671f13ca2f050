"""This module lets long work stop when the user needs the machine.

Work that takes seconds receives a function `pause`. The work calls `pause` every few tens of milliseconds.
`pause` returns at once, or raises `Stopped` if the work must stop. The caller of the work catches `Stopped`
and keeps the results that are finished.
"""

import threading
from collections.abc import Callable

Pause = Callable[[], None]


class Stopped(Exception):
    """Another thread asked the work to stop. The caller can resume the work later."""


def stop_when(cancel: threading.Event | None) -> Pause:
    """Return a function that raises Stopped if `cancel` is set. If `cancel` is None, the function never
    raises an error."""

    def pause() -> None:
        if cancel is not None and cancel.is_set():
            raise Stopped

    return pause
