"""Python's search for garbage, kept from between a key and its echo.

A full search visits every object of the process and stops the app for 0.2 s in a long chat. It is due after
so many new widgets, so it came while a reply grew. Here what has lived for a moment is set aside, where no
search goes, so each is short; all is searched when nobody is there. Where that never comes, it is late once
there is a fifth more than after the last, and done at the end of a reply; within one only where that is long
beyond all others.
"""

import gc

EVERY = 0.5  # seconds between two times of setting aside
QUIET = 2.0  # seconds without a key or a reply before the full search
NEW, LATE, OVERDUE = 1.02, 1.2, 2.0  # times the objects that the last full search left
A_REPLY = 400_000  # objects that one reply may add before it is interrupted by a full search


class Garbage:
    def __init__(self) -> None:
        self._left = self._aside = 0  # objects: after the last full search, now (at most)

    def set_aside(self) -> None:
        """Some milliseconds: the newest objects are searched, and what is left is not looked at again."""
        gc.collect(1)
        self._aside += len(gc.get_objects())
        gc.freeze()

    def is_more_than(self, times: float, more: int = 0) -> bool:
        allowed = times * self._left + more
        if self._aside > allowed:
            self._aside = gc.get_freeze_count()  # many have gone by themselves
        return self._aside > allowed

    def search(self) -> None:
        """All of it."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._left = self._aside = gc.get_freeze_count()

    def leave(self) -> None:
        """The app has gone: all is as Python would have it."""
        gc.unfreeze()
