"""What takes its time while a model is opened, and who is told of it: the command line, the chat.

Whoever waits hands in a `Watch`. Each of its methods may raise, `Interrupted` as a rule: what is being done
then stops where it is. They are called in the thread that opens, a few times a second.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
TICK = 0.1  # seconds between two reports
WINDOW = 5.0  # seconds that a rate is taken over


def megabytes(count: float) -> str:
    """Bytes as `ruvmlx ls` counts them, in powers of ten: "97 MB", "4.1 GB"."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.0f} MB" if count < 0.9995e9 else f"{count / 1e9:.1f} GB"


def parameters(count: int) -> str:
    """ "135 M", "7.2 B"; of small ones "92 k", "1.5 M"."""
    if count < 1e6:
        return f"{count / 1e3:.0f} k"
    if count < 0.9995e9:
        return f"{count / 1e6:.0f} M" if count >= 1e7 else f"{count / 1e6:.1f} M"
    return f"{count / 1e9:.1f} B"


def duration(seconds: float) -> str:
    """ "8 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units, and units per second. total 0: nobody knows; rate 0: not known yet."""

    what: str  # "Fetching owner/name"
    done: int = 0
    total: int = 0
    rate: float = 0.0
    unit: str = "bytes"

    @property
    def seconds_left(self) -> float | None:
        return (self.total - self.done) / self.rate if self.total and self.rate > 0 else None

    @property
    def line(self) -> str:
        """ "Fetching owner/name: 1.2 GB of 4.1 GB, 34 MB/s, 1 min 25 s left"."""
        if not self.total:
            return f"{self.what}…"
        parts = [f"{self.what}: {self._amount}"]
        if self.rate > 0 and self.unit == "bytes":
            parts.append(f"{megabytes(self.rate)}/s")
        left = self.seconds_left
        if left is not None and self.done < self.total:
            parts.append(f"{duration(max(1, left))} left")
        return ", ".join(parts)

    @property
    def _amount(self) -> str:
        if self.unit == "bytes":
            return f"{megabytes(self.done)} of {megabytes(self.total)}"
        return f"{self.done:,} of {self.total:,} {self.unit}"


class Watch:
    """Told of an opening; this one listens to nothing. held: bytes that it gives back when `planned` says
    that they are needed."""

    held = 0

    def found(self, facts: Any) -> None:
        """The model's files are known; none of its weights was fetched or read yet.

        facts: models.facts.Facts"""

    def planned(self, plan: Any) -> None:
        """What the model will need of this machine. What is given back in here is counted as free.

        plan: plan.Plan"""

    def progress(self, progress: Progress) -> None: ...


QUIET = Watch()


class Count:
    """Counts what is done, from any thread, and knows how fast it goes."""

    def __init__(self, what: str, total: int = 0, done: int = 0, unit: str = "bytes"):
        self.what, self.total, self.done, self.unit = what, total, done, unit
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), done)])

    def add(self, n: int) -> None:
        self.done += n

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Another part of the work."""
        self.what, self.total, self.done = what, total, done
        self._seen = deque([(time.monotonic(), done)])

    def now(self) -> Progress:
        at, done = time.monotonic(), self.done
        self._seen.append((at, done))
        while at - self._seen[0][0] > WINDOW:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = max(0.0, (done - before) / (at - since)) if at - since > 2 * TICK else 0.0
        return Progress(self.what, min(done, self.total) if self.total else done, self.total, rate, self.unit)


class Told(Count):
    """A count in the watch's own thread: `add` often, told every TICK."""

    def __init__(self, watch: Watch, what: str, total: int = 0, unit: str = "bytes"):
        super().__init__(what, total, unit=unit)
        self._watch, self._at = watch, 0.0
        self.add(0)

    def add(self, n: int) -> None:
        super().add(n)
        if time.monotonic() - self._at >= TICK:
            self._at = time.monotonic()
            self._watch.progress(self.now())


class Left(Exception):
    """Nobody waits for the work any more."""


class Worker(Count):
    """A count for work in a thread of its own, which is told at each `add` when it is not wanted any more."""

    def __init__(self, what: str):
        super().__init__(what)
        self._left = threading.Event()

    def add(self, n: int) -> None:
        super().add(n)
        if self._left.is_set():
            raise Left

    def attend(self, work: Callable[[], T], watch: Watch) -> T:
        """work() in a thread of its own, whatever it waits for; the watch is told, and may leave."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again for the caller
                done.set_exception(error)

        threading.Thread(target=run, name="fetch", daemon=True).start()
        try:
            while not done.done():
                with contextlib.suppress(TimeoutError):
                    done.exception(TICK)
                watch.progress(self.now())
        except BaseException:
            self._left.set()
            raise
        return done.result()
