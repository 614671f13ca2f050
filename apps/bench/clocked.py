"""This module measures the time of decode steps. A decode step reads one token and computes the logits of the
next token."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ruvmlx.backends.base import Backend


class Clocked:
    """A backend that adds up the time of its decode steps in `seconds`."""

    def __init__(self, backend: Backend):
        self._backend, self.seconds = backend, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        return partial(self._time_step, found) if name in ("decode", "decode_batch") else found

    def _time_step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return step(*arguments)
        finally:
            self.seconds += time.perf_counter() - started


def steps(times: Sequence[float]) -> tuple[float, list[float]]:
    """Return the duration of the first step, and the durations of the other steps. times: the time before the
    first step, and the time after each step."""
    first, *others = (after - before for before, after in itertools.pairwise(times))
    return first, others
