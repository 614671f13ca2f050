"""Replies in the chat app: to a message, to one in other words, once more, and the rest of a cut one."""

import threading
from collections.abc import Awaitable, Callable
from typing import Any

from textual import work

from ruvmlx.errors import RuvmlxError
from ruvmlx.runtime import Turn

from . import commands, describe
from .contract import ChatOptions, ChatRuntime, OpenRuntime
from .idle import IdleApp
from .messages import Notice, Reply, UserMessage
from .stream import show_reply
from .worker import Writing


class WritingApp(IdleApp):
    def __init__(self, open_runtime: OpenRuntime, options: ChatOptions) -> None:
        super().__init__(open_runtime)
        self.options = options
        self.model = ""
        self.editing: UserMessage | None = None  # what the input puts in other words

    # What is asked for

    @work
    async def _reply(self, typed: str) -> None:
        """The user sends a message, or an earlier one in other words."""
        text, edited = commands.message_text(typed.strip()), self._edited()
        instead = {"instead_of": edited.message_id} if edited else {}
        session = self.session
        message, reply = UserMessage(text), Reply()

        async def place() -> None:
            if edited:
                await self.transcript.cut(edited)
                await edited.remove()
            await self.transcript.add(message, reply)

        await self._write(
            lambda runtime, cancel: runtime.chats.say(session, text, **self._how(cancel), **instead),
            reply,
            place,
            message,
            typed,
        )

    @work
    async def action_again(self) -> None:
        """Another reply to the question of the chosen one, beside it."""
        old, session, reply = self._chosen(), self.session, Reply()
        message = old.message_id if old else None

        async def place() -> None:
            if old:
                await self.transcript.cut(old)
                await old.remove()
            await self.transcript.add(reply)

        await self._write(
            lambda runtime, cancel: runtime.chats.again(session, **self._how(cancel), message=message),
            reply,
            place,
        )

    @work
    async def action_more(self) -> None:
        """The rest of the chosen reply."""
        reply, session = self._chosen(), self.session
        if reply is None or not reply.is_cut:
            self.status.flash("That reply came to its own end; /again writes another one")
            return
        message = reply.message_id

        async def place() -> None:
            await self.transcript.cut(reply)
            reply.go_on()

        await self._write(
            lambda runtime, cancel: runtime.chats.continue_reply(
                session, **self._how(cancel), message=message
            ),
            reply,
            place,
        )

    def _how(self, cancel: threading.Event) -> dict[str, Any]:
        options = self.options
        return {
            "sampling": options.sampling,
            "max_new_tokens": options.max_new_tokens,
            "cancel": cancel,
        }

    async def _write(
        self,
        begin: Writing,
        reply: Reply,
        place: Callable[[], Awaitable[None]],
        message: UserMessage | None = None,
        typed: str = "",
    ) -> None:
        """Show a reply as it comes; `place` makes room for it once it is under way."""
        if self.phase != "idle":
            return
        self.phase, self.status.message = "replying", ""
        session, arriving = self.session, self.runtime.write(begin)
        await place()
        self.prompt.focus()
        try:
            response = await show_reply(reply, arriving, self.status)
            if response:
                self.kv = response.kv
                await reply.finish(response.text, response.finish_reason)
                turns = await self.runtime.call(lambda runtime: runtime.chats.turns(session))
                self._place_last(turns, reply, message)
                await self.transcript.trim(turns)
                self._settle()
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            if self.phase != "closing":
                await self._reply_failed(error, reply, message, typed)
        finally:
            if self.phase == "replying":
                self.phase = "idle"
            self.refresh_bindings()

    @staticmethod
    def _place_last(turns: list[Turn], reply: Reply, message: UserMessage | None) -> None:
        reply.place(turns[-1])
        if message and len(turns) > 1:
            message.place(turns[-2])

    async def _reply_failed(
        self, error: Exception, reply: Reply, message: UserMessage | None, typed: str
    ) -> None:
        """Nothing is lost: words that came stay; a message that was refused is in the input again, and what
        made room for a reply that never came is back."""
        if reply.text:
            await reply.finish(reply.text, "")
        else:
            await reply.remove()
        refused = isinstance(error, RuvmlxError) and not reply.begun
        if message and refused:
            await message.remove()
        if typed and (refused or (not reply.text and not self.prompt.text)):
            self.prompt.put_back(typed)
        if refused:
            await self._show_turns()
        await self.transcript.add(Notice(describe.error_line(error), "error"))

    async def _show_turns(self) -> list[Turn]:
        """The conversation as the store has it now."""
        session = self.session
        turns = await self.runtime.call(lambda runtime: runtime.chats.turns(session))
        await self.transcript.show(turns, self.model)
        return turns

    def action_stop(self) -> None:
        if self.phase in ("replying", "opening"):
            self.runtime.stop()
            self.status.flash("Stopping", 0.5)

    @work
    async def _settle(self) -> None:
        """After the reply is shown; a message sent meanwhile waits its turn in the runtime's thread."""
        if self.phase != "closing":
            try:
                await self.runtime.settle()
            except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
                await self._fail(error)
            self._look_again()

    # In other words

    def action_edit(self) -> None:
        """Take the question of the chosen reply into the input."""
        self._begin_edit()

    def _begin_edit(self) -> bool:
        reply = self._chosen()
        message = self.transcript.question_of(reply) if reply else None
        message = message or next(
            (m for m in reversed(self.transcript.messages) if isinstance(m, UserMessage)), None
        )
        if self.phase != "idle" or message is None or message.message_id is None:
            self.status.flash("There is no question to put in other words yet")
            return False
        self.editing = message
        self.prompt.begin_edit(message.text)
        return True

    def action_cancel_edit(self) -> None:
        self.editing = None
        self.prompt.end_edit()
        self.refresh_bindings()

    def _edited(self) -> UserMessage | None:
        """The message that is put in other words, if it is still there; from now on none is."""
        edited = self.editing
        if edited:
            self.action_cancel_edit()
        return edited if edited and edited.is_attached else None

    # Alternatives

    @work
    async def action_flip(self, step: int) -> None:
        """The next reply, or wording, in the place of the chosen one."""
        chosen, session = self._chosen(), self.session
        if self.phase != "idle" or not session:
            return
        message = chosen.message_id if chosen else None

        def flip(runtime: ChatRuntime) -> tuple[int, list[Turn]]:
            return runtime.chats.next_sibling(session, step, message), runtime.chats.turns(session)

        done = await self._attempt(flip)
        if done:
            had_focus = isinstance(self.focused, Reply)
            await self.transcript.show(done[1], self.model)
            shown = next((r for r in self.transcript.replies if r.message_id == done[0]), None)
            self._tell_place(done[1], done[0])
            if shown and had_focus:
                shown.focus()

    def _tell_place(self, turns: list[Turn], message: int) -> None:
        turn = next((turn for turn in turns if turn.id == message), None)
        if turn is None or turn.branches == 1:
            self.status.flash("There is only this one here; /again writes another one")

    def _may(self, action: str) -> bool:
        """Would the action do something to the chosen reply?"""
        reply = self._chosen()
        if action == "more":
            return reply is not None and reply.is_cut
        if action == "flip":
            return reply is not None and reply.branch[1] > 1
        return bool(self.transcript.messages)

    # Slash commands

    async def do_again(self, _: str) -> None:
        self.action_again()

    async def do_more(self, _: str) -> None:
        self.action_more()

    async def do_edit(self, argument: str) -> None:
        if self._begin_edit() and argument:
            self.prompt.end_edit()
            self._reply(argument)

    async def do_next(self, _: str) -> None:
        self.action_flip(1)

    async def do_prev(self, _: str) -> None:
        self.action_flip(-1)
