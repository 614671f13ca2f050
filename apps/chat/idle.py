"""This module lets the runtime learn while the user does nothing (idle time). The first key that the user
presses stops the learning.

The idle work (the learning, and measurements of the KV cache) runs in the runtime's thread (`Host.run_idle`),
which is free again some tens of milliseconds after a key. If a key stopped the idle work, it continues in the
next idle time, or after a restart. This module decides when the idle work starts. The module shows one line
during the idle work and one line with its result.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ruvmlx.chats import soft_delete
from ruvmlx.errors import error_line
from ruvmlx.pausing import Stopped, stop_when
from ruvmlx.platform.courtesy import Courtesy
from ruvmlx.runtime import LearnStatus, Runtime

from . import describe
from .actions.rate import EFFECT_SHOWN, RateActions
from .context import ChatContext, call_soon
from .gc_policy import A_REPLY, LATE, NEW, OVERDUE, QUIET, Garbage
from .view_model import learn_status

IDLE_AFTER = 20.0  # seconds without a key, a click, a reply or a rating, after which the work starts
LOOK_EVERY = 0.5  # the maximum number of seconds between two checks whether the work can start
LONGEST_WAIT = 10  # the wait doubles at most this number of times after failed work, to at most six hours


@dataclass(frozen=True)
class Lesson:
    """The result of the work in one idle time.

    said: one line for the user, or "" if there is nothing new. stuck: True if the work failed, or if the work
    ended and the same work is still due. waits: True if the work did not begin; in this case `said` has the
    reason.
    """

    said: str = ""
    stuck: bool = False
    waits: bool = False


def learn(
    runtime: Runtime,
    cancel: threading.Event,
    show: Callable[[str], None],
    courtesy: Courtesy,
    session: str = "",
    learns: bool = True,
) -> Lesson:
    """Do the idle work. First, erase deleted chats from the search index. Then train the adapter, if a
    training is due. If no training is due, measure the KV cache, or try what makes slow replies faster, if
    either is due. The work stops when the event `cancel` is set. Call this function in the runtime's thread.

    show: a function that shows a line about the work. courtesy: the object that decides whether the machine
    is free for the work.
    session: the id of the open chat, or "" for none; if the training changed layers below the output head,
        the model reads this chat again, so that the next reply need not wait for the reading
    learns: False if the setting learn_when_idle is off; the function then only erases deleted chats
    """
    soft_delete.clean_in_idle_time(runtime.store, cancel)
    if cancel.is_set() or not learns:
        return Lesson()
    is_due = runtime.learning.is_due()
    is_measuring_due = runtime.tiers.due_when_idle()
    if not (is_due or is_measuring_due or runtime.optimizer.due_when_idle()):
        return Lesson()
    if reason := courtesy.reason_to_wait():
        return Lesson(describe.waiting(reason), waits=True)
    if is_due:
        show(describe.learning())
        watch = _Watch(show, cancel, courtesy)
        report = runtime.learning.consolidate(watch.step, cancel)
        stopped = cancel.is_set() and not report["promoted"]
        with suppress(Stopped):
            runtime.engine.sessions.read_again(session, stop_when(cancel))
        return Lesson() if stopped else Lesson(describe.lesson(report), runtime.learning.is_due())
    if not is_measuring_due:
        show(describe.TRYING)
        tuned = runtime.optimizer.work(cancel)
        stuck = tuned["outcome"] == "none" and not cancel.is_set()
        return Lesson(describe.tuning_lesson(tuned), stuck)
    show(describe.MEASURING)
    report = runtime.tiers.review(cancel)
    stuck = not report["measured"] and not cancel.is_set()
    return Lesson(describe.kv_lesson(report), stuck)


class _Watch:
    """An observer that shows the steps of a training and the remaining time. The observer stops the training
    if the machine must not work on, for example because the machine is hot."""

    def __init__(self, show: Callable[[str], None], cancel: threading.Event, courtesy: Courtesy) -> None:
        self._show, self._cancel, self._courtesy = show, cancel, courtesy
        # number and time (time.monotonic()) of the training's first step that the observer saw; None: no step
        # yet
        self._first: tuple[int, float] | None = None

    def step(self, done: int, total: int, _: float) -> None:
        now = time.monotonic()
        self._first = self._first or (done, now)
        steps, seconds = done - self._first[0], now - self._first[1]
        self._show(describe.learning(done, total, (total - done) * seconds / steps if steps else None))
        if self._courtesy.should_stop():
            self._cancel.set()


class IdleLearner:
    """The part of the app that lets the runtime learn while the user does nothing. The class also collects
    Python's garbage, in most cases between replies (`tidy`)."""

    def __init__(self, chat: ChatContext, rate: RateActions, learns: bool) -> None:
        self._chat, self._rate, self._learns = chat, rate, learns
        self._start_at = 0.0  # the time (time.monotonic()) from which the work can start
        self._learning = False  # True while the work runs and no key has stopped it
        self.stuck = 0  # the number of stuck results (`Lesson.stuck`) in a row
        # the text of the result, which the status line shows until the user types or clicks
        self._lesson = ""
        self._is_waiting = False  # True if the status line says why the work does not begin
        self._courtesy = Courtesy()
        self._interrupted_at = time.monotonic()
        self.garbage = Garbage()

    def phase_changed(self) -> None:
        self.interrupt()
        if self._chat.phase == "idle":
            self._chat.app.call_later(self.tidy)

    def tidy(self) -> None:
        """Collect the newest garbage of Python, and all garbage if the limits of gc_policy.py require it. The
        app calls this method after each reply and every `gc_policy.EVERY` seconds."""
        self.garbage.set_aside()
        quiet = time.monotonic() - self._interrupted_at > QUIET
        allowed = (OVERDUE, A_REPLY) if self._chat.phase != "idle" else (NEW,) if quiet else (LATE,)
        if self.garbage.is_more_than(*allowed):
            self.garbage.search()

    def interrupt(self) -> None:
        """Stop the idle work, because the user typed or clicked, or because a reply began or ended. The
        waiting time before the next idle work starts from zero again."""
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
        """Start the coroutine that learns in each idle time, until the app ends."""
        self._chat.start(self._run, group="idle")

    async def _run(self) -> None:
        """Start the work in each idle time. After each stuck result in a row (`Lesson.stuck`: the work failed
        or is still due), the waiting time is twice as long, up to a limit."""
        while self._chat.phase != "closing":
            await asyncio.sleep(min(LOOK_EVERY, max(0.0, self._start_at - time.monotonic())))
            if time.monotonic() < self._start_at:
                continue
            if self._chat.phase == "idle":
                await self._learn()
            self._wait()

    async def _learn(self) -> None:
        self._learning, loop = True, asyncio.get_running_loop()
        session = self._chat.state.session

        def show(line: str) -> None:
            call_soon(loop, lambda: self._show_work(line))

        def work(runtime: Runtime, cancel: threading.Event) -> tuple[Lesson, LearnStatus | None]:
            lesson = learn(runtime, cancel, show, self._courtesy, session, self._learns)
            return lesson, learn_status(runtime)

        learned = shown = self._chat.status.learned
        try:
            lesson, learned = await self._chat.host.run_idle(work)
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            lesson = Lesson(describe.not_learned(error_line(error)), stuck=True)
        if learned != shown:  # this idle work changed the adapter, or another process did
            self._rate.look_again()
        self.stuck = self.stuck + 1 if lesson.stuck else 0
        if self._chat.phase != "closing":
            self._show_lesson(lesson)

    def _show_work(self, line: str) -> None:
        if self._learning:
            self._chat.status.background = line

    def _show_lesson(self, lesson: Lesson) -> None:
        """Show the result of the idle work until the user types or clicks. If the user typed or clicked
        during the work, show the result for some seconds. If the work has no result, keep the earlier result
        on the screen."""
        earlier = "" if self._is_waiting else self._lesson
        said, self._is_waiting = lesson.said, lesson.waits
        if self._learning:
            self._chat.status.background = self._lesson = said or earlier
        elif said and not lesson.waits:
            self._chat.status.flash(said, EFFECT_SHOWN)
        self._learning = False
