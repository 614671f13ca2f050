"""Decides when Python collects garbage: not between a key press and its echo.

A full collection visits every object of the process and stops the app for 0.2 s in a long chat. By itself
Python starts one while a reply grows, because that makes many new widgets. Here, objects that survive a short
collection are frozen (gc.freeze), so later short collections skip them, and a full collection runs when
nobody types. If somebody always types, it runs at the end of a reply once there are a fifth more objects than
after the last full collection; within a reply, only if the reply is very long.
"""

import gc

EVERY = 0.5  # seconds between two calls of `set_aside`
QUIET = 2.0  # seconds without a key or a reply before the full collection
NEW, LATE, OVERDUE = 1.02, 1.2, 2.0  # times the objects after the last full collection
A_REPLY = 400_000  # objects that one reply may add before a full collection interrupts it


class Garbage:
    def __init__(self) -> None:
        self._left = self._aside = 0  # objects left by the last full collection; objects frozen now, at most

    def set_aside(self) -> None:
        """Collect the newest objects and freeze those that survive; takes some milliseconds."""
        gc.collect(1)
        self._aside += len(gc.get_objects())
        gc.freeze()

    def is_more_than(self, times: float, more: int = 0) -> bool:
        allowed = times * self._left + more
        if self._aside > allowed:
            self._aside = gc.get_freeze_count()  # many are freed already
        return self._aside > allowed

    def search(self) -> None:
        """Collect everything."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._left = self._aside = gc.get_freeze_count()

    def leave(self) -> None:
        """The app has ended: unfreeze everything for Python's own collector."""
        gc.unfreeze()
