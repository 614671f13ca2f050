"""Ratings in the app: give them, and show those in the store, also from other processes."""

import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial

from ruvmlx.runtime import LearnStatus, PreferenceResult, RatingResult, Runtime

from .. import describe, keys
from ..arguments import parse_rating, parse_reason
from ..context import ChatContext, StatusWatch
from ..messages import Notice
from ..view_model import Standing
from .panel import PanelActions

EFFECT_SHOWN = 5.0  # seconds that the status line also shows a rating's effect
LOOK_AGAIN = 2.0  # seconds after which a key press makes the app read other processes' ratings


class RateActions:
    def __init__(self, chat: ChatContext, panel: PanelActions) -> None:
        self._chat, self._panel = chat, panel
        self.looked_at = time.monotonic()

    def rate_as_typed(self, argument: str) -> None:
        self.rate(*parse_rating(argument))

    def rate(self, rating: str, note: str = "") -> None:
        """Rate the chosen reply."""
        self._chat.start(lambda: self._rate(rating, note))

    async def _rate(self, rating: str, note: str) -> None:
        watch = StatusWatch(self._chat.status)
        await self._learn(lambda runtime, reply_id: runtime.rate(reply_id, rating, note, watch=watch))
        watch.end()

    def give_reason_as_typed(self, argument: str) -> None:
        self.give_reason(parse_reason(argument))

    def give_reason(self, reason: str) -> None:
        """Say why the chosen reply was rated bad."""
        self._chat.start(
            lambda: self._learn(lambda runtime, reply_id: runtime.choices.give_reason(reply_id, reason))
        )

    async def _learn(self, learn: Callable[[Runtime, str], RatingResult]) -> None:
        """Rate the chosen reply by `learn(runtime, reply_id)`, and show what that did."""
        chat = self._chat
        reply = None if self.is_too_early else chat.chosen()
        if reply is None or reply.reply_id is None:
            chat.status.flash("There is no reply to rate yet")
            return
        reply_id, session, reply.progress = reply.reply_id, chat.state.session, "rating"
        done = await chat.attempt(lambda runtime: (learn(runtime, reply_id), Standing.of(runtime, session)))
        reply.progress = ""
        if done:
            chat.state.lesson = done[0]
            self.ask_why_no_more()
            reply.rated(done[0], self._key)
            self.show(done[1])
            chat.status.flash(describe.effect(done[0], self._key), EFFECT_SHOWN)
            await self._sum_up()

    async def _sum_up(self) -> None:
        """Tell once, in the conversation, what the first ratings say."""
        found = await self._chat.attempt(lambda runtime: runtime.learning.first_summary())
        if words := describe.first_summary(found):
            await self._chat.transcript.mount(
                Notice(words)
            )  # where the reader is not at the end, nothing moves

    def ask_why_no_more(self) -> None:
        """The question below a reply that was rated bad goes with the next message or rating."""
        for reply in self._chat.transcript.replies:
            reply.asks_why = False

    def show_preference(self, message: int | None, learned: PreferenceResult) -> None:
        """Show under a reply what was learned from the choice of it."""
        self._chat.state.lesson = learned
        for reply in self._chat.transcript.replies:
            if reply.message_id == message:
                reply.preferred(learned, self._key)

    def tell_preference(self, learned: PreferenceResult, what: str) -> None:
        """Say what was learned, and the key that takes it back."""
        self._chat.status.flash(describe.learned_choice(learned, what, self._key), EFFECT_SHOWN)

    @property
    def _key(self) -> str:
        """What takes a rating back."""
        return keys.shown(self._chat.app, "undo", "Ctrl+R")

    @property
    def is_too_early(self) -> bool:
        """While a reply is written and none is selected, a rating would go to the reply before it. While a
        model opens, that model could not learn from it."""
        phase = self._chat.phase
        return phase == "opening" or (phase == "replying" and not self._chat.selected())

    def notice(self, replies: Iterable[str | None], what: str) -> None:
        """Tell the runtime what the user did with replies (implicit feedback). Errors are not shown: the user
        did not ask for this."""
        ids = [reply_id for reply_id in replies if reply_id]
        self._chat.start(lambda: self._notice(ids, what))

    async def _notice(self, ids: list[str], what: str) -> None:
        for reply_id in ids:
            with contextlib.suppress(Exception):
                await self._chat.host.call_between(partial(_tell_runtime, reply_id, what))

    def show(self, standing: Standing) -> None:
        """Show the ratings and the state of learning."""
        self._chat.transcript.show_standing(standing)
        self._chat.status.left_out = max(0, len(standing.left_out) - standing.summed_up)
        self._chat.status.summed_up = standing.summed_up
        self.show_learned(standing.learned)

    def show_learned(self, learned: LearnStatus | None) -> None:
        self._chat.status.learned = learned
        self._chat.key_hints.can_take_back = bool(learned and learned.ratings + learned.preferences)
        self._panel.fill()
        self._chat.app.refresh_bindings()

    def look_again(self) -> None:
        """Show the ratings in the store: another process may have rated."""
        self.looked_at = time.monotonic()
        if self._chat.state.session and self._chat.phase != "closing":
            self._chat.start(self._look, group="look", exclusive=True)

    def look_after_a_while(self) -> None:
        if time.monotonic() - self.looked_at > LOOK_AGAIN:
            self.look_again()

    async def _look(self) -> None:
        session = self._chat.state.session
        with contextlib.suppress(Exception):  # the user did not ask for this
            self.show(await self._chat.host.call_between(lambda runtime: Standing.of(runtime, session)))


def _tell_runtime(reply_id: str, what: str, runtime: Runtime) -> bool:
    return runtime.notice(reply_id, what)
