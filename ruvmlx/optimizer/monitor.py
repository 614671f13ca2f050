"""This module keeps the figures of the newest replies: their speed, the wait for the first token, the memory,
and the estimated quality.

The work is done once for each reply, when the reply is stored, and never for a token.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from ..kv.pool import HIGH
from ..platform.cpu import BusySample, busy_sample
from ..store import SpeedRow

WINDOW = 64  # the number of newest replies whose figures the monitor keeps
JUDGED = 8  # the number of newest undisturbed replies from which the speed is computed
LEAST_WRITTEN = 16  # the speed of a reply with fewer tokens says little
# a reply was disturbed if other programs kept more than this number of cores busy meanwhile
BUSY_CORES = 0.5


class PerformanceMonitor:
    """A bounded window of figures of the newest replies of one model on one backend."""

    def __init__(self, rows: Iterable[SpeedRow] = (), window: int = WINDOW):
        """rows: the figures of earlier replies, oldest first"""
        self._rows = deque(rows, maxlen=window)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: SpeedRow) -> None:
        self._rows.append(row)

    def speed(self, since: float = 0.0) -> float | None:
        """Return the median speed, in tokens per second, of the newest JUDGED replies that no other work
        disturbed. Return None if there are fewer such replies. since: a time in seconds since 1970; earlier
        replies do not count."""
        return _median_speed([row for row in self._rows if row.created >= since and is_undisturbed(row)])

    def shared_speed(self, since: float = 0.0) -> float | None:
        """Return the same for replies that were written together with others: the speed of one of them."""
        return _median_speed([row for row in self._rows if row.created >= since and is_shared(row)])

    def quality(self) -> float | None:
        """Return the mean estimated quality of the replies whose quality is known; None if there are none."""
        known = [row.quality for row in self._rows if row.quality is not None]
        return fmean(known) if known else None

    def newest(self) -> SpeedRow | None:
        return self._rows[-1] if self._rows else None

    @property
    def facts(self) -> dict[str, Any]:
        """Return the figures of the window, for JSON and for people."""
        waits = [row.ttft_ms for row in self._rows if row.ttft_ms > 0]
        return {
            "replies": len(self),
            "tokens_per_second": self.speed(),
            "tokens_per_second_together": self.shared_speed(),
            "ttft_ms": median(waits) if waits else None,
            "pressure": max((row.pressure for row in self._rows), default=0.0),
            "kv_bytes": max((row.kv_bytes for row in self._rows), default=0),
            "quality": self.quality(),
        }


def is_undisturbed(row: SpeedRow) -> bool:
    """Return True if the reply was written alone, and the machine was not slower for another reason that the
    row shows: other programs, or a lack of memory. Heat and the battery are asked before a trial."""
    return _says_speed(row) and row.replies == 1


def is_shared(row: SpeedRow) -> bool:
    return _says_speed(row) and row.replies > 1


def _says_speed(row: SpeedRow) -> bool:
    is_free = row.others <= BUSY_CORES and row.pressure <= HIGH
    return is_free and row.written >= LEAST_WRITTEN and row.us_per_token > 0


def _median_speed(rows: Sequence[SpeedRow]) -> float | None:
    if len(rows) < JUDGED:
        return None
    return 1e6 / median(row.us_per_token for row in rows[-JUDGED:])


@dataclass(frozen=True)
class LoadWatch:
    """A measurement of the cores that other programs keep busy, from `begin` on."""

    begun: BusySample
    sample: Callable[[], BusySample] = busy_sample

    @classmethod
    def begin(cls, sample: Callable[[], BusySample] = busy_sample) -> "LoadWatch":
        return cls(sample(), sample)

    def others(self) -> float:
        """Return the mean number of cores that other programs kept busy since `begin`; 0 where the system
        does not tell."""
        wall, busy, own = (b - a for a, b in zip(self.begun, self.sample(), strict=True))
        return max(0.0, (busy - own) / wall) if wall > 0 else 0.0
