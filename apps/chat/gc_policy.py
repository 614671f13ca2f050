"""This module decides when Python collects garbage, so that no collection delays the echo of a key.

A full collection visits every object of the process and stops the app for 0.2 s in a long chat. Python alone
would start a full collection while a reply grows, because a reply makes many new widgets. This module freezes
objects that survive a short collection (gc.freeze), so that later short collections skip them. A full
collection runs when the user makes a pause, once the process has 2 percent more objects than after the last
full collection. If the user never pauses, a full collection runs between two replies, once the process has a
fifth more objects than after the last full collection. While the model writes a reply, a full collection runs
only if the reply has added very many objects (see A_REPLY).
"""

import gc

EVERY = 0.5  # seconds between two calls of `IdleLearner.tidy`, which calls `Garbage.set_aside`
QUIET = 2.0  # seconds without a key or a reply after which a full collection can run
# A full collection runs above these numbers of objects: NEW in a pause of the user, LATE between two replies,
# OVERDUE (plus A_REPLY) during a reply. 1.0 means the number of objects that the last full collection left.
NEW, LATE, OVERDUE = 1.02, 1.2, 2.0
# number of objects, beyond OVERDUE, that one reply can add before a full collection interrupts the reply
A_REPLY = 400_000


class Garbage:
    def __init__(self) -> None:
        # _left: the number of objects that the last full collection left. _aside: an upper bound of the
        # number of frozen objects.
        self._left = self._aside = 0

    def set_aside(self) -> None:
        """Collect the newest objects as garbage if nothing uses them, and freeze the objects that are still
        in use. The call takes some milliseconds."""
        gc.collect(1)
        self._aside += len(gc.get_objects())
        gc.freeze()

    def is_more_than(self, times: float, more: int = 0) -> bool:
        # The limit is a multiple of the number of objects that the last full collection left, plus `more`
        # objects.
        allowed = times * self._left + more
        if self._aside > allowed:
            # get the exact number, because Python can have freed many frozen objects
            self._aside = gc.get_freeze_count()
        return self._aside > allowed

    def search(self) -> None:
        """Run a full collection, then freeze all objects that are left."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._left = self._aside = gc.get_freeze_count()

    def leave(self) -> None:
        """Unfreeze all objects after the end of the app, so that Python's own collector sees them again."""
        gc.unfreeze()
