"""Ratings in the chat app: giving them, taking them back, and seeing those of other processes."""

import asyncio
import contextlib
import time
from collections.abc import Iterable

from textual import events, work

from ruvmlx.kv.cache import KVStats
from ruvmlx.platform.sensors import SensorReading, Sensors
from ruvmlx.runtime import LearnStatus

from . import commands, describe
from .base import ChatBase
from .contract import OpenRuntime
from .messages import Reply
from .panel import View
from .view_model import Standing

EFFECT_SHOWN = 5.0  # seconds that a rating's effect stands in the status line as well
SENSE_EVERY = 5.0  # seconds between two looks at the machine while the panel is open
LOOK_AGAIN = 2.0  # seconds after which a key press makes the app look what other processes have rated


class RatingApp(ChatBase):
    def __init__(self, open_runtime: OpenRuntime) -> None:
        super().__init__(open_runtime)
        self._looked_at = time.monotonic()
        self.kv: KVStats | None = None  # of the newest reply's cache
        self._sensors = Sensors()
        self._reading = SensorReading()

    def action_rate(self, rating: str) -> None:
        self._rate(rating, "")

    @work
    async def _rate(self, rating: str, note: str) -> None:
        reply = None if self._is_too_early() else self._chosen()
        if reply is None or reply.reply_id is None:
            self.status.flash("There is no reply to rate yet")
            return
        reply_id, session, reply.progress = reply.reply_id, self.session, "rating"
        done = await self._attempt(
            lambda runtime: (runtime.rate(reply_id, rating, note), Standing.of(runtime, session))
        )
        reply.progress = ""
        if done:
            reply.rated(done[0])
            self._show_standing(done[1])
            self.status.flash(describe.effect(done[0]), EFFECT_SHOWN)

    @work
    async def _notice(self, replies: Iterable[str | None], what: str) -> None:
        """Tell what was done with replies, for what it is worth. Nobody asked: a failure is not shown."""
        for reply_id in filter(None, replies):
            with contextlib.suppress(Exception):
                await self.runtime.call_between(lambda runtime, id_=reply_id: runtime.notice(id_, what))

    def _is_too_early(self) -> bool:
        """While a reply comes, a rating would hit the one before it, unless that is selected; while a model
        opens, that could not learn from it."""
        return self.phase == "opening" or (self.phase == "replying" and not isinstance(self.focused, Reply))

    def _learned(self, learned: LearnStatus | None) -> None:
        self.status.learned = learned
        self.key_hints.can_take_back = bool(learned and learned.ratings)
        self._fill_panel()
        self.refresh_bindings()

    def action_panel(self) -> None:
        self.panel.display = not self.panel.display
        self._fill_panel()
        self._sense()

    @work(exclusive=True, group="panel")
    async def _fill_panel(self) -> None:
        """As the runtime has it now, if it can be seen."""
        if self.panel.display and self.session:
            view = await self._attempt(View.of)
            if view:
                self.panel.show(view.later(self._reading), self.kv)

    @work(exclusive=True, group="sense")
    async def _sense(self) -> None:
        """Heat, power and memory, as long as the panel is open. Not through the runtime: that would disturb
        what it does in idle time."""
        while self.panel.display and self.phase != "closing":
            self._reading = await asyncio.to_thread(self._sensors.read)
            if self.panel.view:
                self.panel.show(self.panel.view.later(self._reading), self.kv)
            await asyncio.sleep(SENSE_EVERY)

    async def do_learning(self, _: str) -> None:
        self.action_panel()

    async def do_rollback(self, argument: str) -> None:
        version, session = commands.parse_version(argument), self.session
        done = await self._attempt(lambda r: (r.rollback(version), Standing.of(r, session)))
        if done:
            self._show_standing(done[1])
            self.status.flash(describe.rolled_back(done[0]))

    def _show_standing(self, standing: Standing) -> None:
        self.transcript.show_standing(standing)
        self._learned(standing.learned)

    @work(exclusive=True, group="look")
    async def _look(self) -> None:
        """Another process may have rated: show what the store has now. What cannot be seen is not missed."""
        session = self.session
        with contextlib.suppress(Exception):
            self._show_standing(await self.runtime.call_between(lambda r: Standing.of(r, session)))

    def _look_again(self) -> None:
        self._looked_at = time.monotonic()
        if self.session and self.phase != "closing":
            self._look()

    def on_app_focus(self) -> None:
        self._look_again()

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key) and time.monotonic() - self._looked_at > LOOK_AGAIN:
            self._look_again()
        await super().on_event(event)

    def _chosen(self) -> Reply | None:
        """The selected reply, else the newest."""
        replies = self.transcript.replies
        if isinstance(self.focused, Reply) and self.focused in replies:
            return self.focused
        return replies[-1] if replies else None

    @work
    async def action_undo(self) -> None:
        session = self.session
        done = await self._attempt(lambda runtime: (runtime.undo(), Standing.of(runtime, session)))
        if done:
            self._show_standing(done[1])
            self.status.flash(describe.undone(done[0]))
