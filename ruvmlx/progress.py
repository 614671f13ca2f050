"""This module measures the progress of loading a model and reports the progress to a `Watch`.

The command line and the chat app each define their own kind of `Watch`. The thread that loads the model, or
that waits for a download, calls the method `progress` of the watch up to ten times a second. Each method can
raise an error, usually `Interrupted`, to stop the loading.
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

from .text import size

T = TypeVar("T")
TICK = 0.1  # seconds between two reports
WINDOW = 5.0  # seconds over which the units per second are averaged


def parameters(count: int) -> str:
    """Return a number of model parameters as text, such as "135 M", "7.2 B" or "92 k"."""
    if count < 1e6:
        return f"{count / 1e3:.0f} k"
    if count < 0.9995e9:
        return f"{count / 1e6:.0f} M" if count >= 1e7 else f"{count / 1e6:.1f} M"
    return f"{count / 1e9:.1f} B"


def duration(seconds: float) -> str:
    """Return a number of seconds as text, such as "8 s", "3 min 20 s" or "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True)
class Progress:
    """The progress of one part of the loading: `done` of `total` units (for example bytes) are finished.

    total: the number of units in this part; 0: unknown. rate: the number of units per second; 0: not known
        yet."""

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
        """Return one line, such as "Fetching owner/name: 1.2 GB of 4.1 GB, 34 MB/s, 1 min 25 s left"."""
        if not self.total:
            return f"{self.what}…"
        parts = [f"{self.what}: {self._amount}"]
        if self.rate > 0 and self.unit == "bytes":
            parts.append(f"{size(self.rate)}/s")
        left = self.seconds_left
        if left is not None and self.done < self.total:
            parts.append(f"{duration(max(1, left))} left")
        return ", ".join(parts)

    @property
    def _amount(self) -> str:
        if self.unit == "bytes":
            return f"{size(self.done)} of {size(self.total)}"
        return f"{self.done:,} of {self.total:,} {self.unit}"


class Watch:
    """A receiver of the progress of loading a model. The base class ignores all reports of progress.

    held: the number of bytes of memory that the method `note_plan` can free if the new model needs them.
    fetches: True if a `PullWatch` was told of files to download.
    """

    held = 0
    fetches = False

    def note_facts(self, facts: Any) -> None:
        """The loader calls this method when it knows the model's files, before it downloads or reads weights.

        facts: models.config.header_facts.Facts"""

    def note_choice(self, choice: Any) -> None:
        """The loader calls this method when it has chosen a GGUF file of a repository, before the download.

        choice: models.find.variants.FileChoice"""

    def note_plan(self, plan: Any) -> None:
        """The loader calls this method when the memory plan is ready. The loader then measures the free
        memory again, so this method can free memory for the model.

        plan: memory.load_plan.Plan"""

    def progress(self, progress: Progress) -> None: ...


QUIET = Watch()


class Count:
    """A counter of finished units of work that also measures the units per second. Any thread can use the
    counter."""

    def __init__(self, what: str, total: int = 0, unit: str = "bytes"):
        self.what, self.total, self.done, self.unit = what, total, 0, unit
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def add(self, n: int) -> None:
        self.done += n

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Begin to count the next part of the work."""
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
    """A counter whose `add` reports to a watch at most once in TICK seconds, and at the beginning of each new
    part of the work. Call `add` often, in the thread in which the watch must be called."""

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
    """Worker.add raises this error in the worker's thread if the caller no longer waits for the result."""


class Worker(Count):
    """A counter for work in a separate thread. `add` raises `Left` if the caller no longer waits for the
    work."""

    def __init__(self, what: str):
        super().__init__(what)
        self._left = threading.Event()

    def add(self, n: int) -> None:
        super().add(n)
        if self._left.is_set():
            raise Left

    def attend(self, work: Callable[[], T], watch: Watch) -> T:
        """Run work() in a separate thread, report to the watch, and return the result of work().

        If the watch raises an error, the caller stops waiting and the worker's next `add` raises `Left`."""
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
