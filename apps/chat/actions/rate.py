"""This module handles ratings in the app. The module gives the user's ratings to the runtime, and shows the
ratings that the store (the database) has. Other processes can also write ratings into the store."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial

from ruvmlx.chats.choices import Continuation
from ruvmlx.errors import NotFound
from ruvmlx.progress import QUIET, Watch
from ruvmlx.runtime import LearnStatus, PreferenceResult, RatingResult, Runtime
from ruvmlx.sona.adapter_history import AdapterHistory

from .. import describe, keys
from ..arguments import parse_rating, parse_reason
from ..context import ChatContext, StatusWatch
from ..messages import Notice, ReplyMessage
from ..steps.rate import undo_newest
from ..view_model import RatingPlace, Standing
from .panel import PanelActions

EFFECT_SHOWN = 5.0  # seconds for which the status line shows what a rating changed
STILL_WRITTEN = "The reply is still being written. Rate it once it is complete, or stop it with Esc"
LOOK_AGAIN = 2.0  # seconds; after a read of the store, a key press in this time causes no new read


class RateActions:
    def __init__(self, chat: ChatContext, panel: PanelActions) -> None:
        self._chat, self._panel = chat, panel
        self.looked_at = time.monotonic()
        self._in_order = asyncio.Lock()  # a reason waits for its rating

    def rate_as_typed(self, argument: str) -> None:
        self.rate(*parse_rating(argument))

    def rate(self, rating: str, note: str = "") -> None:
        """Rate the selected reply, or else the lowest reply on the screen."""
        reply = self._reply_to_rate()
        if reply:
            reply.coming_rating = rating
            self._chat.start(lambda: self._rate(reply, rating, note))

    async def _rate(self, reply: ReplyMessage, rating: str, note: str) -> None:
        watch = StatusWatch(self._chat.status)
        await self._learn(
            reply, lambda runtime, reply_id: runtime.rate(reply_id, rating, note, watch=watch), watch
        )
        watch.end()

    def give_reason_as_typed(self, argument: str) -> None:
        self.give_reason(parse_reason(argument))

    def give_reason(self, reason: str) -> None:
        """Add a reason to the bad rating that the user gave the same reply, or that is being stored."""
        if reply := self._reply_to_rate():
            give = lambda runtime, reply_id: runtime.choices.give_reason(reply_id, reason)  # noqa: E731
            self._chat.start(lambda: self._learn(reply, give))

    def take_back(self) -> None:
        """Take back the rating of the selected reply. If this reply has no rating, say where the newest
        rating is, and change nothing."""
        self._chat.start(self._take_back)

    async def _take_back(self) -> None:
        chat, reply, key = self._chat, self._chat.chosen_reply(), self._key
        if reply is None or reply.reply_id is None:
            return
        reply_id, session, limit = reply.reply_id, chat.state.session, chat.reply_limit

        def take_back(runtime: Runtime) -> tuple[str, Standing | None]:
            found = take_back_rating(runtime, session, reply_id)
            if isinstance(found, RatingPlace):
                return describe.nothing_to_undo(found, key), None
            return found, Standing.of(runtime, session, limit)

        done = await chat.attempt(take_back)
        if done:
            said, standing = done
            if standing:
                chat.state.lesson = None
                self.show(standing)
            chat.status.flash(said, EFFECT_SHOWN)

    def _reply_to_rate(self) -> ReplyMessage | None:
        """Return the reply that the user rates. If no reply can be rated now, tell the user the reason and
        return None."""
        reply = None if self.is_too_early else self._chat.reply_in_view()
        if reply is None or reply.reply_id is None:
            is_growing = self._chat.phase == "replying" and not self._chat.selected_reply()
            self._chat.status.flash(STILL_WRITTEN if is_growing else "There is no reply to rate yet")
            return None
        return reply

    async def _learn(
        self, reply: ReplyMessage, learn: Callable[[Runtime, str], RatingResult], watch: Watch = QUIET
    ) -> None:
        """Call `learn(runtime, reply_id)`, which rates a reply. Then show what the rating changed. watch: the
        object that gets the progress if the model must be measured first."""
        chat, reply_id = self._chat, reply.reply_id
        assert reply_id is not None
        session, limit = chat.state.session, chat.reply_limit
        reply.progress = "rating"
        async with self._in_order:
            done = await chat.attempt_measured(
                lambda runtime: (learn(runtime, reply_id), _standing(runtime, session, limit)), watch
            )
        reply.progress = reply.coming_rating = ""
        if done:
            chat.state.lesson = done[0]
            self.ask_why_no_more()
            reply.show_rating(done[0], self._key)
            if done[1] is not None:
                self.show(done[1])
            chat.status.flash(describe.effect(done[0], self._key), EFFECT_SHOWN)
            await self._sum_up()

    @property
    def is_storing(self) -> bool:
        """True if the store does not have the newest rating yet."""
        return self._in_order.locked()

    async def wait(self) -> None:
        """Wait until the store has the ratings of the user."""
        async with self._in_order:
            pass

    async def _sum_up(self) -> None:
        """Show a notice that says which replies the user seems to like, or that the ratings show nothing
        clear yet. The notice appears once for each adapter, after its first ten ratings and preferences."""
        found = await self._chat.attempt(lambda runtime: runtime.learning.first_summary())
        if words := describe.first_summary(found):
            # `mount` does not scroll the conversation, so the screen of a user who reads earlier messages
            # does not move.
            await self._chat.transcript.mount(Notice(words))

    def ask_why_no_more(self) -> None:
        """Hide the question "Why?" below the replies that the user rated bad. The app calls this method
        before the model writes a reply, and after a rating."""
        for reply in self._chat.transcript.replies:
            reply.asks_why = False

    def show_preference(self, message: int | None, learned: PreferenceResult) -> None:
        """Show below the preferred reply what the model learned from the user's preference. message: the
        message id of the preferred reply."""
        self._chat.state.lesson = learned
        for reply in self._chat.transcript.replies:
            if reply.message_id == message:
                reply.show_preference(learned, self._key)

    def tell_preference(self, learned: PreferenceResult, what: str) -> None:
        """Show what the model learned from the user's choice between two replies. If the model learned
        something, also show the key that undoes the choice.

        what: the words that name the chosen reply, for example "the reply with what was learned".
        """
        self._chat.status.flash(describe.learned_choice(learned, what, self._key), EFFECT_SHOWN)

    async def tell_continuation(self, session: str) -> None:
        """If the user's last message taught the model something, because the user went on from one of several
        replies, say so."""
        limit = self._chat.reply_limit

        def take(runtime: Runtime) -> tuple[Continuation, Standing] | None:
            found = runtime.choices.take_continuation(session)
            return (found, Standing.of(runtime, session, limit)) if found else None

        done = await self._chat.attempt(take)
        if done and self._chat.state.session == session:
            self.show(done[1])
            self.show_preference(done[0].message, done[0].learned)
            self.tell_preference(done[0].learned, describe.WENT_ON)

    @property
    def _key(self) -> str:
        """The label of the key that undoes a rating."""
        return keys.key_label(self._chat.app, "undo", "Ctrl+R")

    @property
    def is_too_early(self) -> bool:
        """True if a rating must wait. While the model writes a reply and no reply is selected, a rating would
        go to the reply before the growing reply. While a model opens, the model cannot learn from a
        rating. While another chat opens, the screen still shows the replies of the former chat."""
        phase = self._chat.phase
        return phase in ("opening", "switching") or (phase == "replying" and not self._chat.selected_reply())

    def notice(self, replies: Iterable[str | None], what: str) -> None:
        """Tell the runtime what the user did with the given replies, for example `what` = "copied" (implicit
        feedback). The app shows no error of this call, because the app makes the call without a request of
        the user."""
        ids = [reply_id for reply_id in replies if reply_id]
        self._chat.start(lambda: self._notice(ids, what))

    async def _notice(self, ids: list[str], what: str) -> None:
        for reply_id in ids:
            with contextlib.suppress(Exception):
                await self._chat.host.call_between(partial(_tell_runtime, reply_id, what))

    def show(self, standing: Standing) -> None:
        """Show the ratings of the replies and the state of learning."""
        self._chat.transcript.show_standing(standing)
        self._chat.status.room = standing.room
        self.show_learned(standing.learned)

    def show_learned(self, learned: LearnStatus | None) -> None:
        self._chat.status.learned = learned
        self._chat.key_hints.can_take_back = bool(learned and learned.ratings + learned.preferences)
        self._panel.fill()
        self._chat.app.refresh_bindings()

    def look_again(self) -> None:
        """Read the ratings of the store and show them. Another process can have added ratings."""
        self.looked_at = time.monotonic()
        if self._chat.state.session and self._chat.phase != "closing":
            self._chat.start(self._look, group="look", exclusive=True)

    def look_after_a_while(self) -> None:
        if time.monotonic() - self.looked_at > LOOK_AGAIN:
            self.look_again()

    async def _look(self) -> None:
        session, limit = self._chat.state.session, self._chat.reply_limit
        with contextlib.suppress(Exception):  # the user did not ask for this read, so its error stays hidden
            self.show(await self._chat.host.call_between(lambda it: Standing.of(it, session, limit)))


def take_back_rating(runtime: Runtime, session: str, reply_id: str) -> str | RatingPlace:
    """Take back the rating of one reply, and return the words that say so. If the reply has the newest
    feedback, this is an undo. If the adapter in use has learned from no rating of the reply, change nothing,
    and return the place of the newest feedback. session: the id of the open chat. Raise NotFound if there is
    no feedback at all."""
    newest = runtime.newest_feedback()
    if newest is None or newest == reply_id:
        return undo_newest(runtime, session)[1]
    # with --model auto, another model than the one in use can have written the reply
    fingerprint = runtime.store.replies.get(reply_id).fingerprint
    name = runtime.learning.require_learner().history.name
    history = AdapterHistory(runtime.store, fingerprint, name)
    if not history.steps_of_reply(history.version(), reply_id):
        return RatingPlace.of(runtime, session, newest)
    return describe.reply_undone(runtime.unrate(reply_id))


def _standing(runtime: Runtime, session: str, limit: int) -> Standing | None:
    """Return what the app shows of the chat and the adapter; None if another process has deleted the chat."""
    try:
        return Standing.of(runtime, session, limit)
    except NotFound:
        return None


def _tell_runtime(reply_id: str, what: str, runtime: Runtime) -> bool:
    return runtime.learning.notice(reply_id, what)
