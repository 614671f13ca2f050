"""Progress of opening a model, and the `Watch` that receives it for the command line or the chat.

Each method of a watch may raise, usually `Interrupted`, to stop the opening. They are called in the thread
that opens, a few times a second.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
TICK = 0.1  # seconds between two reports
WINDOW = 5.0  # seconds over which a rate is averaged


def megabytes(count: float) -> str:
    """Bytes as text, in powers of ten: "97 MB", "4.1 GB"."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.0f} MB" if count < 0.9995e9 else f"{count / 1e9:.1f} GB"


def parameters(count: int) -> str:
    """A number of parameters as text: "135 M", "7.2 B", "92 k", "1.5 M"."""
    if count < 1e6:
        return f"{count / 1e3:.0f} k"
    if count < 0.9995e9:
        return f"{count / 1e6:.0f} M" if count >= 1e7 else f"{count / 1e6:.1f} M"
    return f"{count / 1e9:.1f} B"


def duration(seconds: float) -> str:
    """Seconds as text: "8 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units; total 0: unknown. rate: units per second; 0: not known yet."""

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
    """Receives the progress of opening a model; this one ignores it.

    held: bytes that it can free in `planned`, if the plan needs them.
    """

    held = 0

    def found(self, facts: Any) -> None:
        """The model's files are known; no weights were fetched or read yet.

        facts: models.config.header_facts.Facts"""

    def chosen(self, choice: Any) -> None:
        """A GGUF file of a repository is chosen; nothing of it was fetched yet.

        choice: models.find.variants.FileChoice"""

    def planned(self, plan: Any) -> None:
        """The plan is made. Memory that is freed in this call counts as free.

        plan: plan.Plan"""

    def progress(self, progress: Progress) -> None: ...


QUIET = Watch()


class Count:
    """Counts finished units, from any thread, and measures the rate."""

    def __init__(self, what: str, total: int = 0, done: int = 0, unit: str = "bytes"):
        self.what, self.total, self.done, self.unit = what, total, done, unit
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), done)])

    def add(self, n: int) -> None:
        self.done += n

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Start counting another part of the work."""
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
    """A count that reports to the watch every TICK and at each new part. Call `add` often, in the watch's
    thread."""

    def __init__(self, watch: Watch, what: str, total: int = 0, unit: str = "bytes"):
        super().__init__(what, total, unit=unit)
        self._watch, self._at = watch, -math.inf
        self.add(0)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        super().begin(what, total, done)
        self._at = -math.inf
        self.add(0)

    def add(self, n: int) -> None:
        super().add(n)
        if time.monotonic() - self._at >= TICK:
            self._at = time.monotonic()
            self._watch.progress(self.now())


class Left(Exception):
    """Raised in a worker's thread: nobody waits for its result any more."""


class Worker(Count):
    """A count for work in a thread of its own; `add` raises `Left` when nobody waits any more."""

    def __init__(self, what: str):
        super().__init__(what)
        self._left = threading.Event()

    def add(self, n: int) -> None:
        super().add(n)
        if self._left.is_set():
            raise Left

    def attend(self, work: Callable[[], T], watch: Watch) -> T:
        """Run work() in a thread of its own, and report to the watch, which may raise to stop waiting."""
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
