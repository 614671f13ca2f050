"""This module measures how long replies take. From these times it estimates when a place or memory for
another reply is free."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

LAST = 32  # number of last replies whose times are used
MAX_WAIT_SECONDS = 60  # the longest wait in seconds that a client is told


@dataclass
class ReplyTimes:
    """The times of the last replies and of the replies in progress. Only one thread may use this class."""

    clock: Callable[[], float] = time.monotonic
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    _begun: dict[int, float] = field(default_factory=dict)
    _count: int = 0

    @contextlib.contextmanager
    def reply(self) -> Iterator[None]:
        """In the `with` block, a reply is written. If the block ends without an error, the time of the reply
        is remembered."""
        self._count += 1
        number, begun = self._count, self.clock()
        self._begun[number] = begun
        try:
            yield
            self._last.append(self.clock() - begun)
        finally:
            del self._begun[number]

    def until_free(self, share: float) -> int:
        """Return whole seconds, 1 to MAX_WAIT_SECONDS, until this share (0 to 1) of the places or memory in
        use is free.

        The estimate assumes that replies which began at different times end evenly over the mean time of a
        reply. A reply in progress counts with the time that it has taken so far.
        """
        known = [*self._last, *(self.clock() - begun for begun in self._begun.values())]
        mean = sum(known) / len(known) if known else 0.0
        return min(MAX_WAIT_SECONDS, max(1, math.ceil(mean * min(1.0, max(0.0, share)))))
