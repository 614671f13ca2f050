"""This module has the app's comparisons of two replies: /compare and /effect show two replies on a screen. If
the user closes the screen of /compare without a choice, the command /choose can make the choice later."""

from functools import partial

from ruvmlx.runtime import PreferenceResult, Runtime

from .. import compare
from ..compare_screen import CompareScreen
from ..context import ChatContext
from ..view_model import Standing
from .rate import RateActions
from .write import WriteActions


class CompareActions:
    def __init__(self, chat: ChatContext, rate: RateActions, write: WriteActions) -> None:
        self._chat, self._rate, self._write = chat, rate, write

    async def ask(self, argument: str) -> None:
        """Let the model answer a question once with the adapter and once without it. The screen does not say
        which reply used the adapter. After the user's choice, the status line says whether the chosen reply
        used the adapter.

        argument: the question; "" for the last question of the chat.
        """
        await self._begin(argument, is_blind=True)

    async def show_effect(self, argument: str) -> None:
        """Let the model answer a question once with the adapter and once without it. The screen says which
        reply used the adapter, and asks for no choice."""
        await self._begin(argument, is_blind=False)

    async def _begin(self, text: str, is_blind: bool) -> None:
        session = self._chat.state.session
        await self._chat.host.call(lambda runtime: compare.check(runtime, session, text))
        self._chat.start(partial(self._compare, text, is_blind))

    async def _compare(self, text: str, is_blind: bool) -> None:
        chat = self._chat
        if chat.phase != "idle":
            return
        chat.phase = "replying"
        screen, session = CompareScreen(chat, text, is_blind), chat.state.session
        try:
            before = await chat.host.call(lambda runtime: compare.shown_reply_id(runtime, session, text))
        except BaseException:
            if chat.phase == "replying":  # and not "closing"
                chat.phase = "idle"
            raise
        chosen = await chat.ask(screen)
        if chat.phase == "replying":
            chat.phase = "idle"
            if chosen is None:
                await chat.host.call(lambda runtime: compare.show_again(runtime, session, before))
            chat.state.comparison = await chat.host.call(
                lambda runtime: compare.ReplyComparison.at_end(runtime, session, screen.offered)
            )
            await self._write.show_turns()
            self._write.settle()
            if chosen is not None:
                await self.choose(str(chosen + 1))

    async def choose(self, argument: str) -> None:
        chat, session, limit = self._chat, self._chat.state.session, self._chat.reply_limit
        comparison = chat.state.comparison

        def prefer(runtime: Runtime) -> tuple[compare.Candidate, PreferenceResult, Standing]:
            chosen, other = comparison.choice(argument, runtime, session)
            learned = runtime.chats.prefer(session, chosen.message, other.message)
            return chosen, learned, Standing.of(runtime, session, limit)

        done = await chat.attempt(prefer)
        if done:
            chosen, learned, standing = done
            await self._write.show_turns()
            self._rate.show(standing)
            self._rate.show_preference(chosen.message, learned)
            self._rate.tell_preference(learned, compare.choice_text(chosen))
