"""This module does the server's idle work, which is work for which no client waits, while no request runs.
The module first prepares replies for their ratings: it computes the data that a rating of the reply needs,
and after a first rating it writes replies that nobody sees, which the learner compares with rated replies.
After the preparation, the module trains the adapter on the ratings if a training is due, or else measures the
KV cache if a measurement is due."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ruvmlx.chats import soft_delete
from ruvmlx.errors import error_line
from ruvmlx.platform.courtesy import Courtesy
from ruvmlx.runtime import Runtime

from .memory_look import look_between
from .serving import Serving

LOOK_EVERY = 0.1  # seconds between two checks whether a request runs
IDLE_AFTER = 20.0  # seconds without a request, after which the server starts to train or to measure
# after work that failed or stays due, the wait IDLE_AFTER doubles at most this number of times, to at most
# six hours
LONGEST_WAIT = 10


def learn(
    runtime: Runtime,
    cancel: threading.Event,
    begins: Callable[[str], None],
    courtesy: Courtesy,
    learns: bool = True,
) -> tuple[dict[str, Any], bool]:
    """Erase deleted chats from the search index. Then do the first of these works that is due: train the
    adapter, measure the KV cache, or try what makes slow replies faster. The event `cancel` ends the work. If
    `courtesy` says that the machine is not free, only erase. Only the runtime's thread can call this
    function.

    begins: a function that is called with the name of the work
    learns: False if the setting learn_when_idle is off; the function then only erases deleted chats

    Return facts for the log, which are empty if the function did no work. Also return True if the work ran to
    its end but is still due, and False in all other cases.
    """
    soft_delete.clean_in_idle_time(runtime.store, cancel)
    if cancel.is_set() or not learns:
        return {}, False
    is_due, is_measuring_due = runtime.learning.is_due(), runtime.tiers.due_when_idle()
    if not (is_due or is_measuring_due or runtime.optimizer.due_when_idle()) or courtesy.reason_to_wait():
        return {}, False
    if is_due:
        begins("training")

        def look(done: int, total: int, loss: float) -> None:
            if courtesy.should_stop():
                cancel.set()

        report = runtime.learning.consolidate(look, cancel)
        ended = not cancel.is_set()
        return {"promoted": report["promoted"]}, ended and runtime.learning.is_due()
    begins("measuring")
    if not is_measuring_due:
        tuned = runtime.optimizer.work(cancel)
        facts = {"tuned": tuned["knob"] or "", "outcome": tuned["outcome"]}
        return facts, tuned["outcome"] == "none" and not cancel.is_set()
    report = runtime.tiers.review(cancel)
    return {"measured": report["measured"]}, not (report["measured"] or cancel.is_set())


@dataclass
class IdleWork:
    """The object that does the idle work for one model of a server between the server's requests. A request
    to an endpoint (unless `Endpoint.is_look`), or a key in an attached chat, stops the work at its next
    pause; the work pauses every few tens of milliseconds."""

    serving: Serving
    learns: bool = True
    idle_after: float = IDLE_AFTER
    # the value of `serving.written` when the idle work last prepared the replies for ratings; -1: a request
    # stopped this preparation
    _settled: int = 0
    _stuck: int = 0  # the number of times in a row that the idle work failed, or was still due after its end
    _courtesy: Courtesy = field(default_factory=Courtesy)
    _busy_at: float = field(default_factory=time.monotonic)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """In the `with` block, let a task do the idle work."""
        task = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            task.cancel()
            self.serving.host.cancel_idle()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while not self.serving.stopping:
            await asyncio.sleep(LOOK_EVERY)
            if self.serving.unloaded:
                continue
            if self.serving.is_busy:
                self._busy_at = time.monotonic()
                continue
            try:
                await self._work()
            except Exception as error:  # noqa: BLE001 - the server goes on after any error
                self._stuck += 1
                self._busy_at = time.monotonic()
                self.serving.log.write("idle", {"failed": json.dumps(error_line(error))})

    async def _work(self) -> None:
        if self._settled != self.serving.written:
            self._settled = self.serving.written
            self.serving.last_look = await look_between(self.serving.host)
            with self._name_work("preparing"):
                if not await self.serving.host.settle():
                    # a request stopped the preparation, so the idle work prepares the remaining replies later
                    self._settled = -1
        wait = self.idle_after * 2 ** min(self._stuck, LONGEST_WAIT)
        if time.monotonic() - max(self._busy_at, self.serving.host.used_at) > wait:
            with self._name_work("") as begins:
                facts, stuck = await self.serving.host.run_idle(
                    lambda runtime, cancel: learn(runtime, cancel, begins, self._courtesy, self.learns)
                )
            self._stuck = self._stuck + 1 if stuck else 0
            self._busy_at = time.monotonic()
            if facts:
                self.serving.log.write("idle", facts)

    @contextlib.contextmanager
    def _name_work(self, work: str) -> Iterator[Callable[[str], None]]:
        """In the `with` block, let the status and the metrics show `work` as the idle work. The context
        manager yields a function that changes the name of the idle work."""

        def begins(work: str) -> None:
            self.serving.idle_work = work

        begins(work)
        try:
            yield begins
        finally:
            begins("")
