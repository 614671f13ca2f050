"""Comparisons in the app: /compare, and /choose for a user who closed the screen without choosing."""

from functools import partial

from .. import compare, describe
from ..compare_screen import CompareScreen
from ..context import ChatContext
from ..view_model import Standing
from .rate import EFFECT_SHOWN, RateActions
from .write import WriteActions


class CompareActions:
    def __init__(self, chat: ChatContext, rate: RateActions, write: WriteActions) -> None:
        self._chat, self._rate, self._write = chat, rate, write

    async def ask(self, argument: str) -> None:
        """Answer the question, "" for the last one, with and without what was learned."""
        session = self._chat.state.session
        await self._chat.host.call(lambda runtime: compare.check(runtime, session, argument))
        self._chat.start(partial(self._compare, argument))

    async def _compare(self, text: str) -> None:
        chat = self._chat
        if chat.phase != "idle":
            return
        chat.phase = "replying"
        screen = CompareScreen(chat, text)
        chosen = await chat.ask(screen)
        chat.state.candidates = screen.candidates
        if chat.phase == "replying":
            chat.phase = "idle"
            await self._write.show_turns()
            self._write.settle()
            if chosen is not None:
                await self._prefer(chat.state.candidates[chosen])

    async def choose(self, argument: str) -> None:
        await self._prefer(compare.choice(argument, self._chat.state.candidates))

    async def _prefer(self, chosen: compare.Candidate) -> None:
        chat, session = self._chat, self._chat.state.session
        done = await chat.attempt(
            lambda runtime: (runtime.chats.prefer(session, chosen.message), Standing.of(runtime, session))
        )
        if done:
            await self._write.show_turns()
            for reply in chat.transcript.replies:
                if reply.message_id == chosen.message:
                    reply.rated(done[0])
            self._rate.show(done[1])
            chat.status.flash(
                f"{compare.told(chosen)} · {describe.milliseconds(done[0].apply_us)}", EFFECT_SHOWN
            )
