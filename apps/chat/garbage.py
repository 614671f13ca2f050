"""Python's search for garbage, kept from between a key and its echo.

A full search visits every object of the process and stops the app for 0.2 s in a long chat. It is due after
so many new widgets, so it came while a reply grew. Here what has lived for a moment is set aside, where no
search goes, so each is short; and all is searched when nobody is there, or at the end of a reply after a
minute without such a time.
"""

import gc
import time

EVERY = 0.5  # seconds between two times of setting aside
QUIET = 5.0  # seconds without a key or a reply before the full search
AT_LEAST_EVERY = 60.0  # seconds


class Garbage:
    def __init__(self) -> None:
        self._aside = False  # something has been since the last full search
        self._searched_at = time.monotonic()

    def set_aside(self) -> None:
        """Some milliseconds: the newest objects are searched, and what is left is not looked at again."""
        gc.collect(1)
        gc.freeze()
        self._aside = True

    def search(self) -> None:
        """All of it, if there is anything new."""
        if self._aside:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            self._aside, self._searched_at = False, time.monotonic()

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._searched_at > AT_LEAST_EVERY

    def leave(self) -> None:
        """The app has gone: all is as Python would have it."""
        gc.unfreeze()
