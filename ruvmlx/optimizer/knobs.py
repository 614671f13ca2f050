"""This module lists what the optimizer can change to make replies faster. Each knob is one property of the
runtime with a few values. The knobs of KNOBS change no token of a reply; the precision of the KV cache does,
so kv_tuning/ decides it within the limit of KL.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from ..backends.base import Drafting, Threaded
from ..engine import LLMInferenceEngine
from ..engine.draft_length import draft_length
from ..engine.scheduler import PLACES, Scheduler
from ..settings import Settings

DRAFTS = ("auto", "off", "2", "4", "7")  # the tried values of the setting `speculate`


class Knob(Protocol):
    """A property of the runtime. name: the knob's name in the log and in `learn status`. usual: the value
    without the optimizer."""

    name: str
    usual: str

    def reason_against(self) -> str:
        """Return why the optimizer must leave the knob alone; "" if it may change it."""

    def values(self) -> Sequence[str]:
        """Return all values that can be tried."""

    def apply(self, value: str) -> None:
        """Put a value in force, from the next token on. Raises ValueError for an unknown value."""


class SpeculateKnob:
    """The number of guessed tokens (engine/drafts.py)."""

    name = "speculate"

    def __init__(self, engine: LLMInferenceEngine, settings: Settings):
        self._engine, self.usual = engine, settings.speculate
        self._own = engine.draft_length  # the rule for `usual`, with what it has measured so far

    def reason_against(self) -> str:
        if not isinstance(self._engine.backend, Drafting):
            return "this backend checks no guesses"
        return "" if self.usual == "auto" else "the setting speculate decides"

    def values(self) -> Sequence[str]:
        return DRAFTS

    def apply(self, value: str) -> None:
        self._engine.draft_length = self._own if value == self.usual else draft_length(value)


class ThreadsKnob:
    """The number of cores that compute."""

    name = "threads"

    def __init__(self, engine: LLMInferenceEngine, settings: Settings):
        self._backend, self._asked = engine.backend, settings.threads
        self.usual = str(engine.backend.threads) if isinstance(engine.backend, Threaded) else ""

    def reason_against(self) -> str:
        if not self.usual:
            return "this backend chooses its threads itself"
        if self._asked is not None:
            return "the setting threads decides"
        return "" if self.usual != "1" else "there is one core"

    def values(self) -> Sequence[str]:
        most = int(self.usual)
        return [str(n) for n in sorted({most, most - 1, most // 2, 1} - {0}, reverse=True)]

    def apply(self, value: str) -> None:
        cast(Threaded, self._backend).limit_threads(int(value))


class BatchKnob:
    """The maximum number of requests whose replies are written at the same time."""

    name = "batch"
    usual = str(PLACES)

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler

    def reason_against(self) -> str:
        return ""

    def values(self) -> Sequence[str]:
        return [str(2**n) for n in range(PLACES.bit_length()) if 2**n <= PLACES]

    def apply(self, value: str) -> None:
        self._scheduler.width = int(value)
