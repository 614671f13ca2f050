"""Comparisons in the app: /compare, and /choose for who left without choosing."""

import threading
from typing import Any

from textual import work

from . import compare, describe
from .compare_screen import CompareScreen
from .contract import ChatOptions, OpenRuntime
from .rating import EFFECT_SHOWN
from .switching import SwitchingApp
from .view_model import Standing


class ComparingApp(SwitchingApp):
    def __init__(self, open_runtime: OpenRuntime, options: ChatOptions) -> None:
        super().__init__(open_runtime, options)
        self._candidates: list[compare.Candidate] = []  # of the newest comparison

    async def _changed(self) -> None:
        """Another model cannot be told which of two that it did not write is better."""
        self._candidates = []
        await super()._changed()

    def how(self, cancel: threading.Event) -> dict[str, Any]:
        """Sampling, and what stops the reply."""
        return self._how(cancel)

    async def do_compare(self, argument: str) -> None:
        session = self.session
        await self.runtime.call(lambda runtime: compare.check(runtime, session, argument))
        self._compare(argument)

    @work
    async def _compare(self, text: str) -> None:
        if self.phase != "idle":
            return
        self.phase = "replying"
        screen = CompareScreen(text)
        chosen = await self.push_screen_wait(screen)
        self._candidates = screen.candidates
        if self.phase == "replying":
            self.phase = "idle"
            await self._show_turns()
            self._settle()
            if chosen is not None:
                await self._prefer(self._candidates[chosen])

    async def do_choose(self, argument: str) -> None:
        await self._prefer(compare.choice(argument, self._candidates))

    async def _prefer(self, chosen: compare.Candidate) -> None:
        session = self.session
        done = await self._attempt(
            lambda runtime: (
                runtime.chats.prefer(session, chosen.message),
                Standing.of(runtime, session),
            )
        )
        if done:
            await self._show_turns()
            for reply in self.transcript.replies:
                if reply.message_id == chosen.message:
                    reply.rated(done[0])
            self._show_standing(done[1])
            self.status.flash(
                f"{compare.told(chosen)} · {describe.milliseconds(done[0].apply_us)}", EFFECT_SHOWN
            )
