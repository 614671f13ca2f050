"""This module handles saved chats in the app: it shows the open chat and lets the user choose another
chat."""

from dataclasses import replace
from functools import partial

from ruvmlx.chats.conversations import ALL_READ

from ..chats_screen import ChatsScreen
from ..commands import typed_text
from ..context import ChatContext
from ..options import ChatOptions
from ..state import system_prompt_of
from ..status import Meter
from ..view_model import Opened
from .edit import EditActions
from .rate import RateActions
from .write import AT_FOUND


class LibraryActions:
    def __init__(self, chat: ChatContext, rate: RateActions, edit: EditActions) -> None:
        self._chat, self._rate, self._edit = chat, rate, edit

    async def begin(self, options: ChatOptions) -> None:
        """Open the chat that the options name, and show its messages."""
        chat = self._chat
        opened = await chat.host.call(lambda runtime: Opened.of(runtime, options))
        chat.state.open_chat(opened.session, system_prompt_of(opened.turns))
        self.show(opened)
        await chat.transcript.restart(opened.turns, opened.model, opened.message, opened.are_newest)
        chat.status.room = ALL_READ
        if chat.transcript.select_found():
            chat.status.flash(AT_FOUND, 6)
        self._rate.look_again()

    def show(self, opened: Opened) -> None:
        """Show the opened chat's model, backend, context length and state of learning in the border of the
        input and in the status line."""
        chat = self._chat
        chat.model = chat.prompt.heading = opened.model
        chat.prompt.earlier = [typed_text(said) for said in opened.said]
        chat.status.backend = opened.backend
        chat.caveat = opened.caveat
        chat.status.meter = Meter(max_context=opened.max_context)
        self._rate.show_learned(opened.learned)

    async def open(self, session: str, message: int | None = None) -> None:
        """Switch to another chat. message: the id of the message of this chat to show first; None: the chat's
        end."""
        with self._chat.switching():
            self._chat.status.message = ""  # the old message is about the chat that the user leaves
            self._edit.leave()
            await self.begin(
                replace(self._chat.options, session=session, replaces_system=False, find="", message=message)
            )

    def choose(self, words: str = "") -> None:
        """Show the list of saved chats. words: the words with which the search in the list begins."""
        self._chat.start(partial(self._choose, words))

    async def _choose(self, words: str) -> None:
        chat = self._chat
        screen = ChatsScreen(chat, words)
        chosen = await chat.ask(screen)
        if chat.phase != "idle":
            return
        if chosen and (chosen.id != chat.state.session or chosen.message is not None):
            await self.open(chosen.id, chosen.message)
        elif screen.has_deleted_open_chat:
            await self.open("new")
