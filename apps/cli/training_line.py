"""This module shows the progress of a training on one line of stderr, from the first moment on."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ruvmlx.progress import Progress

from ..progress import TerminalLine

PREPARING = "Preparing: reading your ratings"
TESTING = "Testing the result on ratings that it did not see"


class TrainingLine:
    """The line that shows the progress. what: the plural noun for the units of progress, for example
    "steps"."""

    def __init__(self, line: TerminalLine, what: str):
        self._line, self._what = line, what
        self._began: tuple[float, int] | None = None  # the time of the first report, and its `done`
        line.show_at_once(f"{PREPARING} …")

    def step(self, done: int, total: int, loss: float | None = None) -> None:
        """Show that `done` of `total` units are finished. loss: the training loss; NaN before the first step;
        None if the work has no loss."""
        now = time.monotonic()
        since, first = self._began = self._began or (now, done)
        rate = (done - first) / (now - since) if done > first and now > since else 0.0
        more = "" if loss is None or math.isnan(loss) else f", loss {loss:+.4f}"
        self._line.show_at_once(Progress("Learning", done, total, rate, self._what).line + more)
        if done == total and loss is not None:
            self._line.show_at_once(f"{TESTING} …")


@contextmanager
def training_line(what: str) -> Iterator[TrainingLine | None]:
    """In the `with` block, show the line of progress. Yield the line, or None if stderr is no terminal. After
    the block, erase the line."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    line = TerminalLine(sys.stderr)
    try:
        yield TrainingLine(line, what)
    finally:
        line.erase()
