"""Long work that can be stopped when the user needs the machine.

Work that takes seconds calls its `pause` between slices of some tens of milliseconds. A pause does nothing,
or raises `Stopped`. The caller catches it and keeps the finished part.
"""

import threading
from collections.abc import Callable

Pause = Callable[[], None]


class Stopped(Exception):
    """The work was stopped, and can be resumed later."""


def stop_when(cancel: threading.Event | None) -> Pause:
    """A pause that raises Stopped once `cancel` is set; None: it never does."""

    def pause() -> None:
        if cancel is not None and cancel.is_set():
            raise Stopped

    return pause
