"""Idle time: while nobody writes and nothing is waited for, the runtime learns, and stops at the first key.

The work is done in the runtime's thread (`RuntimeThread.rest`), which is free again some tens of milliseconds
after it was disturbed; what was stopped goes on in the next idle time, or after a restart. Here is only when,
and what is shown of it: one quiet line while it lasts, one of what came of it.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from textual import events, work

from . import describe
from .base import later
from .contract import ChatRuntime, OpenRuntime
from .gc_policy import A_REPLY, LATE, NEW, OVERDUE, QUIET, Garbage
from .rating import EFFECT_SHOWN, RatingApp

IDLE_AFTER = 20.0  # seconds without a key, a click, a reply or a rating
LOOK_EVERY = 0.5  # seconds
LONGEST_WAIT = 10  # doublings of it, where trying again brings nothing: six hours


@dataclass(frozen=True)
class Lesson:
    """What came of one idle time. said: one line, "" for nothing new. stuck: as much is due as before, though
    nobody stopped it."""

    said: str = ""
    stuck: bool = False


def learn(runtime: ChatRuntime, cancel: threading.Event, show: Callable[[str], None]) -> Lesson:
    """Do what is due, in the runtime's thread, until `cancel` is set. show: takes the line that says so."""
    if cancel.is_set():
        return Lesson()
    if runtime.learning.due():
        show(describe.learning())
        report = runtime.consolidate(lambda done, total, _: show(describe.learning(done, total)), cancel)
        stopped = cancel.is_set() and not report["promoted"]
        return Lesson() if stopped else Lesson(describe.lesson(report), runtime.learning.due())
    if runtime.tiers.due():
        show(describe.MEASURING)
        report = runtime.tiers.review(cancel)
        stuck = not report["measured"] and not cancel.is_set()
        return Lesson(describe.kv_lesson(report), stuck)
    return Lesson()


class IdleApp(RatingApp):
    def __init__(self, open_runtime: OpenRuntime) -> None:
        super().__init__(open_runtime)
        self._rest_at = 0.0  # time.monotonic() from which on it may learn
        self._resting = False  # and nothing has disturbed it yet
        self._stuck = 0  # times in a row that it was stuck
        self._lesson = ""  # shown, until somebody is there to see it
        self._disturbed_at = time.monotonic()
        self._garbage = Garbage()

    async def on_event(self, event: events.Event) -> None:
        """Keys, clicks, the wheel and pastes are somebody's; a mouse is moved by accident, too."""
        moved = isinstance(event, events.MouseMove)
        if isinstance(event, events.InputEvent | events.Paste) and not moved:
            self._disturb()
        await super().on_event(event)

    def watch_phase(self) -> None:
        self._disturb()
        if self.phase == "idle":
            self.call_later(self._tidy)

    def _tidy(self) -> None:
        """After a reply, and from time to time."""
        self._garbage.set_aside()
        quiet = time.monotonic() - self._disturbed_at > QUIET
        allowed = (OVERDUE, A_REPLY) if self.phase != "idle" else (NEW,) if quiet else (LATE,)
        if self._garbage.is_more_than(*allowed):
            self._garbage.search()

    def _disturb(self) -> None:
        """Somebody is there: stop learning at once, and wait anew."""
        self.runtime.disturb()
        self._disturbed_at = time.monotonic()
        self._wait_for_rest()
        if self._resting or self._lesson:
            self.status.background = ""
        if self._lesson:
            self.status.flash(self._lesson, EFFECT_SHOWN)
        self._resting, self._lesson = False, ""

    def _wait_for_rest(self) -> None:
        self._rest_at = time.monotonic() + IDLE_AFTER * 2 ** min(self._stuck, LONGEST_WAIT)

    @work
    async def _learn_when_idle(self) -> None:
        """As long as the app runs. What keeps failing is tried less and less often."""
        while self.phase != "closing":
            await asyncio.sleep(min(LOOK_EVERY, max(0.0, self._rest_at - time.monotonic())))
            if time.monotonic() < self._rest_at:
                continue
            if self.phase == "idle":
                await self._rest()
            self._wait_for_rest()

    async def _rest(self) -> None:
        self._resting, here = True, asyncio.get_running_loop()

        def show(line: str) -> None:
            later(here, lambda: self._show_work(line))

        try:
            lesson = await self.runtime.rest(lambda runtime, cancel: learn(runtime, cancel, show))
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            lesson = Lesson(describe.not_learned(describe.error_line(error)), stuck=True)
        self._stuck = self._stuck + 1 if lesson.stuck else 0
        if self.phase != "closing":
            self._show_lesson(lesson.said)

    def _show_work(self, line: str) -> None:
        if self._resting:
            self.status.background = line

    def _show_lesson(self, said: str) -> None:
        """It stays until somebody is there; whoever came meanwhile sees it for a moment."""
        if self._resting:
            self.status.background = self._lesson = said
        elif said:
            self.status.flash(said, EFFECT_SHOWN)
        self._resting = False
        if said:
            self._look_again()
