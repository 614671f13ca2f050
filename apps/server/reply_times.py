"""This module measures how long replies take. From these times it estimates when the server will have a place
or memory for another reply."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

LAST = 32  # the number of last replies whose times the estimate uses
MAX_WAIT_SECONDS = 60  # the longest wait in seconds that the server tells a client


@dataclass
class ReplyTimes:
    """The times of the last replies and of the replies in progress. The class has no lock, so all calls of an
    object must come from the same thread."""

    clock: Callable[[], float] = time.monotonic
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    _begun: dict[int, float] = field(default_factory=dict)
    _count: int = 0

    @contextlib.contextmanager
    def reply(self) -> Iterator[None]:
        """In the `with` block, the caller writes a reply. If the block ends without an error, save the time
        that the reply took, for the estimate."""
        self._count += 1
        number, begun = self._count, self.clock()
        self._begun[number] = begun
        try:
            yield
            self._last.append(self.clock() - begun)
        finally:
            del self._begun[number]

    def until_free(self, share: float) -> int:
        """Return the estimated time until the share `share` (0 to 1) of the places or memory in use is free,
        in whole seconds from 1 to MAX_WAIT_SECONDS.

        The estimate assumes that the replies in progress end at even intervals within the mean time of a
        reply. The mean is over the last replies and over the replies in progress, with the time that each of
        these has taken so far.
        """
        known = [*self._last, *(self.clock() - begun for begun in self._begun.values())]
        mean = sum(known) / len(known) if known else 0.0
        return min(MAX_WAIT_SECONDS, max(1, math.ceil(mean * min(1.0, max(0.0, share)))))
