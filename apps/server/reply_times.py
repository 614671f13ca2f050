"""How long replies take, and so when a place or memory for another one may be free."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

LAST = 32  # replies whose times count
MAX_WAIT_SECONDS = 60  # seconds that a client is told to wait


@dataclass
class ReplyTimes:
    """The times of the last replies, and of those that are being written. To be used in one thread."""

    clock: Callable[[], float] = time.monotonic
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    _begun: dict[int, float] = field(default_factory=dict)
    _count: int = 0

    @contextlib.contextmanager
    def reply(self) -> Iterator[None]:
        """The block writes a reply; its time counts if it ends well."""
        self._count += 1
        number, begun = self._count, self.clock()
        self._begun[number] = begun
        try:
            yield
            self._last.append(self.clock() - begun)
        finally:
            del self._begun[number]

    def until_free(self, share: float) -> int:
        """Whole seconds, 1 to MAX_WAIT_SECONDS, until this share (0 to 1) of what the replies hold is free.

        Replies that began at different times end evenly over the time that one takes. Those that are being
        written count with the time that they have taken so far.
        """
        known = [*self._last, *(self.clock() - begun for begun in self._begun.values())]
        mean = sum(known) / len(known) if known else 0.0
        return min(MAX_WAIT_SECONDS, max(1, math.ceil(mean * min(1.0, max(0.0, share)))))
