"""This module lets the runtime learn in idle time, while the user does nothing. The first key stops the work.

The work runs in the runtime's thread (`Host.run_idle`), which is free again some tens of milliseconds after a
key. Stopped work continues in the next idle time, or after a restart. This module decides when the work
starts. It shows one line during the work and one line with the result.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ruvmlx.chats import soft_delete
from ruvmlx.errors import error_line
from ruvmlx.platform.courtesy import Courtesy
from ruvmlx.runtime import Runtime

from . import describe
from .actions.rate import EFFECT_SHOWN, RateActions
from .context import ChatContext, call_soon
from .gc_policy import A_REPLY, LATE, NEW, OVERDUE, QUIET, Garbage

IDLE_AFTER = 20.0  # seconds without a key, a click, a reply or a rating
LOOK_EVERY = 0.5  # the maximum number of seconds between two checks for idle time
CLEANING = 0.02  # seconds of work on the search index between two checks for a pressed key
LONGEST_WAIT = 10  # the maximum number of doublings of IDLE_AFTER after failed work, up to six hours


@dataclass(frozen=True)
class Lesson:
    """The result of one idle time.

    said: one line for the user, "" for nothing new. stuck: True if the work failed, or if it ended and the
    same work is still due. waits: True if the work did not begin; `said` then has the reason.
    """

    said: str = ""
    stuck: bool = False
    waits: bool = False


def learn(
    runtime: Runtime, cancel: threading.Event, show: Callable[[str], None], courtesy: Courtesy
) -> Lesson:
    """Do the work that is due, until `cancel` is set. Call this function in the runtime's thread.

    show: a function that shows a line about the work. courtesy: decides whether the machine is free for work.
    """
    while not soft_delete.clean_index(runtime.store, CLEANING) and not cancel.is_set():
        pass
    is_due = runtime.learning.is_due()
    if cancel.is_set() or not (is_due or runtime.tiers.due_when_idle()):
        return Lesson()
    if reason := courtesy.reason_to_wait():
        return Lesson(describe.waiting(reason), waits=True)
    if is_due:
        show(describe.learning())
        watch = _Watch(show, cancel, courtesy)
        report = runtime.learning.consolidate(watch.step, cancel)
        stopped = cancel.is_set() and not report["promoted"]
        return Lesson() if stopped else Lesson(describe.lesson(report), runtime.learning.is_due())
    show(describe.MEASURING)
    report = runtime.tiers.review(cancel)
    stuck = not report["measured"] and not cancel.is_set()
    return Lesson(describe.kv_lesson(report), stuck)


class _Watch:
    """A watch that shows the steps of a training and the time that is left. It stops the training if the
    machine must not work on, for example because it is hot."""

    def __init__(self, show: Callable[[str], None], cancel: threading.Event, courtesy: Courtesy) -> None:
        self._show, self._cancel, self._courtesy = show, cancel, courtesy
        self._first: tuple[int, float] | None = None  # the first step and its time by time.monotonic()

    def step(self, done: int, total: int, _: float) -> None:
        now = time.monotonic()
        self._first = self._first or (done, now)
        steps, seconds = done - self._first[0], now - self._first[1]
        self._show(describe.learning(done, total, (total - done) * seconds / steps if steps else None))
        if self._courtesy.should_stop():
            self._cancel.set()


class IdleLearner:
    """Lets the runtime learn while the user does nothing, and collects Python's garbage between replies."""

    def __init__(self, chat: ChatContext, rate: RateActions) -> None:
        self._chat, self._rate = chat, rate
        self._start_at = 0.0  # the time by time.monotonic() from which work can start
        self._learning = False  # True while work runs and no key has interrupted it
        self.stuck = 0  # the number of lessons in a row that were stuck
        self._lesson = ""  # the result that the status line shows until the user is back
        self._is_waiting = False  # True if the status line shows a reason to wait
        self._courtesy = Courtesy()
        self._interrupted_at = time.monotonic()
        self.garbage = Garbage()

    def phase_changed(self) -> None:
        self.interrupt()
        if self._chat.phase == "idle":
            self._chat.app.call_later(self.tidy)

    def tidy(self) -> None:
        """Collect garbage if a collection is due. The app calls this method after each reply and at
        intervals."""
        self.garbage.set_aside()
        quiet = time.monotonic() - self._interrupted_at > QUIET
        allowed = (OVERDUE, A_REPLY) if self._chat.phase != "idle" else (NEW,) if quiet else (LATE,)
        if self.garbage.is_more_than(*allowed):
            self.garbage.search()

    def interrupt(self) -> None:
        """Stop the work at once because the user is back, and start the waiting time again."""
        status = self._chat.status
        self._chat.host.cancel_idle()
        self._interrupted_at = time.monotonic()
        self._wait()
        if self._learning or self._lesson:
            status.background = ""
        if self._lesson and not self._is_waiting:
            status.flash(self._lesson, EFFECT_SHOWN)
        self._learning, self._lesson = False, ""

    def _wait(self) -> None:
        self._start_at = time.monotonic() + IDLE_AFTER * 2 ** min(self.stuck, LONGEST_WAIT)

    def start(self) -> None:
        """Begin to learn in idle time, until the app ends."""
        self._chat.start(self._run)

    async def _run(self) -> None:
        """Start work in each idle time. After work that was stuck, the next wait is twice as long."""
        while self._chat.phase != "closing":
            await asyncio.sleep(min(LOOK_EVERY, max(0.0, self._start_at - time.monotonic())))
            if time.monotonic() < self._start_at:
                continue
            if self._chat.phase == "idle":
                await self._learn()
            self._wait()

    async def _learn(self) -> None:
        self._learning, loop = True, asyncio.get_running_loop()

        def show(line: str) -> None:
            call_soon(loop, lambda: self._show_work(line))

        try:
            lesson = await self._chat.host.run_idle(
                lambda runtime, cancel: learn(runtime, cancel, show, self._courtesy)
            )
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            lesson = Lesson(describe.not_learned(error_line(error)), stuck=True)
        self.stuck = self.stuck + 1 if lesson.stuck else 0
        if self._chat.phase != "closing":
            self._is_waiting = lesson.waits
            self._show_lesson(lesson.said)

    def _show_work(self, line: str) -> None:
        if self._learning:
            self._chat.status.background = line

    def _show_lesson(self, said: str) -> None:
        """Show the result until the user is back. If the user is back already, show it for some seconds."""
        if self._learning:
            self._chat.status.background = self._lesson = said
        elif said and not self._is_waiting:
            self._chat.status.flash(said, EFFECT_SHOWN)
        self._learning = False
        if said and not self._is_waiting:
            self._rate.look_again()
