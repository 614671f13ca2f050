"""This module decides when Python collects garbage, so that a collection seldom delays the echo of a key.

A full collection visits every object of the process and stops the app for 0.2 s in a long chat. Python alone
would start a full collection while a reply grows, because a reply makes many new widgets. This module freezes
objects that survive a short collection (gc.freeze), so that later short collections skip them. A full
collection runs when the user makes a pause, once the process has 2 percent more memory blocks than after the
last full collection. If the user never pauses, a full collection runs between two replies, once the process
has a fifth more memory blocks than after the last full collection. While the model writes a reply, a full
collection runs only if the reply has added very many blocks (see A_REPLY).

The module counts memory blocks, not objects, because `gc.get_objects` would break other threads: while its
list exists, a tuple that another thread is building has one reference more, and Python raises SystemError.
"""

import gc
import sys

EVERY = 0.5  # seconds between two calls of `IdleLearner.tidy`, which calls `Garbage.set_aside`
QUIET = 2.0  # seconds after the last key, click, begin or end of a reply, from which on the limit NEW applies
# A full collection runs above these multiples of the number of memory blocks that the last full collection
# left: NEW in a pause of the user, LATE between two replies, OVERDUE (plus A_REPLY) during a reply.
NEW, LATE, OVERDUE = 1.02, 1.2, 2.0
# number of blocks above the limit OVERDUE at which a full collection interrupts a reply
A_REPLY = 1_000_000


class Garbage:
    def __init__(self) -> None:
        self._left = 0  # the number of memory blocks that the last full collection left

    def set_aside(self) -> None:
        """Collect the newest objects as garbage if nothing uses them, and freeze the objects that are still
        in use. The call takes some milliseconds."""
        gc.collect(1)
        gc.freeze()

    def is_more_than(self, times: float, more: int = 0) -> bool:
        """Return True if the process has over `times` as many memory blocks as the last full collection left,
        plus `more` blocks."""
        return sys.getallocatedblocks() > times * self._left + more

    def search(self) -> None:
        """Run a full collection, then freeze all objects that are left."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._left = sys.getallocatedblocks()

    def leave(self) -> None:
        """Unfreeze all objects after the end of the app, so that Python's own collector sees them again."""
        gc.unfreeze()
