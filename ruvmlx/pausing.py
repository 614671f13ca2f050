"""Long work yields to somebody who needs the machine.

Work that takes seconds calls its `pause` between slices of some tens of milliseconds. A pause does nothing,
or raises `Stopped`. The caller catches it; what is done by then is kept.
"""

import threading
from collections.abc import Callable

Pause = Callable[[], None]


class Stopped(Exception):
    """Somebody needs the machine; the work goes on later."""


def stop_when(cancel: threading.Event | None) -> Pause:
    """A pause that raises Stopped once `cancel` is set; None: it never does."""

    def pause() -> None:
        if cancel is not None and cancel.is_set():
            raise Stopped

    return pause
