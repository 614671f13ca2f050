"""This module lets the model summarise the oldest messages of a chat as notes. The model then reads the notes
in place of these messages. While the model writes the notes, the status line shows the number of tokens of
the notes, and the key Esc stops the model."""

import threading
from collections.abc import Iterator
from dataclasses import replace

from ruvmlx.engine.types import Chunk
from ruvmlx.runtime import Runtime
from ruvmlx.text import count as count_of

from .. import describe
from ..context import ChatContext
from ..messages import Notice
from ..steps.summarize import summarize
from ..view_model import Standing
from .rate import RateActions

WORKING = "Summing up the oldest messages"


class SummaryActions:
    def __init__(self, chat: ChatContext, rate: RateActions) -> None:
        self._chat, self._rate = chat, rate

    async def summarize(self, argument: str = "") -> None:
        """Let the model summarise the oldest messages of the chat. With the argument "off", drop the notes,
        so that the model reads the summarised messages again, as far as its context has room."""
        if argument:
            self._chat.start(lambda: self._forget(argument))
        else:
            self._chat.start(self._summarize, group="write")

    async def _forget(self, argument: str) -> None:
        state = self._chat.state

        def forget(runtime: Runtime) -> tuple[str, Standing]:
            words = summarize(runtime, state, argument).words
            return words, Standing.of(runtime, state.session, state.options.max_new_tokens)

        if done := await self._chat.attempt(forget):
            await self._show(*done)

    async def _summarize(self) -> None:
        chat, session, limit = self._chat, self._chat.state.session, self._chat.reply_limit
        if chat.phase != "idle":
            return

        def begin(runtime: Runtime, cancel: threading.Event) -> Iterator[Chunk]:
            return runtime.chats.summaries.write(session, cancel, limit)

        def result(runtime: Runtime) -> tuple[str, Standing]:
            words = describe.summary(runtime.chats.summaries.of(session))
            return words, Standing.of(runtime, session, limit)

        chat.phase, chat.status.background, stopped = "replying", f"{WORKING} · Esc stops", False
        try:
            async for chunks in chat.host.write(begin):
                newest = chunks[-1]
                count = f", {count_of(newest.generated, 'token')} of notes" if newest.generated else ""
                chat.status.background = f"{WORKING}{count} · Esc stops"
                stopped = newest.response is not None and newest.response.finish_reason == "cancelled"
            if not stopped:
                await self._show(*await chat.host.call_between(result))
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            await chat.show_error(error)
        finally:
            chat.status.background = ""
            if chat.phase == "replying":
                chat.phase = "idle"
            chat.app.refresh_bindings()

    async def _show(self, words: str, standing: Standing) -> None:
        self._rate.show(standing)
        # The next reply reads another number of tokens, so the status line must not show the old number.
        self._chat.status.meter = replace(self._chat.status.meter, context=0)
        await self._chat.transcript.add(Notice(words))
