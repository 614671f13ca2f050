"""This module has the app's actions that let the model write: a reply to a message, a reply to an edited
message, another reply to the same message, and the rest of a cut reply."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial

from ruvmlx.engine.types import Chunk
from ruvmlx.errors import RuvmlxError
from ruvmlx.host.serving import BeginReply
from ruvmlx.runtime import Runtime, Turn
from ruvmlx.text import one_line

from ..commands import message_text
from ..context import ChatContext, StatusWatch
from ..errors import chat_error_line
from ..mentions import has_mention, with_files
from ..messages import Notice, ReplyMessage, UserMessage
from ..status import Meter
from ..steps.branch import return_to, turns_with
from ..steps.tools import answer_results, named_question
from ..steps.write import say, write_again, write_more
from ..stream import show_reply
from ..transcript import Transcript
from .edit import EditActions, text_to_edit
from .rate import RateActions
from .tools import ToolActions

AT_FOUND = "The message that was searched for · Esc goes to the end of the chat"
ON_ANOTHER_BRANCH = "The later messages are on another branch: Tab, then ← or → shows them"
SAME_WORDS = "The model wrote the same words again; /set temperature 1 lets replies differ more"


def watch_later(transcript: Transcript, edited: int | None = None) -> Callable[[], bool]:
    """Return a function that returns True if the chat has messages after the screen's new end, on another
    branch. edited: the id of a question that a new one replaces."""
    others = [m for m in transcript.query_children(UserMessage) if m.message_id != edited]
    had_later = transcript.has_later
    return lambda: had_later > transcript.has_later or not all(m.is_attached for m in others)


class WriteActions:
    def __init__(self, chat: ChatContext, rate: RateActions, tools: ToolActions, edit: EditActions) -> None:
        self._chat, self._rate, self._tools, self._edit = chat, rate, tools, edit
        self._showing_end = asyncio.Lock()

    # Methods that begin a reply

    def send(self, typed: str, edited: UserMessage | None = None) -> None:
        """Send the typed text as a message. edited: an earlier message that the text replaces."""
        self._chat.start_reply(partial(self._send, message_text(typed.strip()), typed, edited=edited))

    def call_tool(self, argument: str) -> None:
        """Send a message that the model must answer with a call of one tool. argument: "NAME TEXT", the name
        of the tool and the message."""
        function, text = named_question(argument)
        self._chat.state.tools.offer(function)  # `offer` raises UsageError if this tool is not on
        self._chat.start_reply(partial(self._send, text, f"/tool {argument}", function))

    async def _send(
        self, text: str, typed: str, function: str = "", edited: UserMessage | None = None
    ) -> None:
        chat, notes = self._chat, list[Notice]()
        if has_mention(text):
            files = chat.state.options.files
            found = await chat.attempt(lambda runtime: with_files(text, files, runtime.chats.count_tokens))
            if found is None or chat.phase != "replying":
                self._edit.put_back(typed, edited.message_id if edited else None)
                return
            text, notes = found.text, [Notice(note) for note in found.notes]
        if edited and not edited.is_attached:
            edited = None
        message, reply = UserMessage(text), ReplyMessage()

        async def place() -> None:
            if edited:
                await chat.transcript.cut(edited)
                await edited.remove()
            await chat.transcript.add(message, *notes, reply)

        replaced = edited.message_id if edited else None
        begin = say(chat.state, text, replaced, function)
        await self._write(begin, reply, place, message, typed, replaced)

    def again(self, _: str = "") -> None:
        """Write another reply to the question that the chosen reply answers. The store keeps both replies as
        branches (alternatives)."""
        self._chat.start_reply(self._again)

    async def _again(self) -> None:
        chat, reply = self._chat, ReplyMessage()
        old = chat.chosen_reply()

        async def place() -> None:
            if old:
                first = chat.transcript.begin_of_answer(old)
                await chat.transcript.cut(first)
                await first.remove()
            await chat.transcript.add(reply)

        await self._write(write_again(chat.state, old.message_id if old else None), reply, place)
        if old and reply.finished and reply.text == old.text:
            chat.status.flash(SAME_WORDS)

    def more(self, _: str = "") -> None:
        """Let the model continue the chosen reply, if this reply was cut or stopped."""
        self._chat.start_reply(self._more)

    async def _more(self) -> None:
        chat, reply = self._chat, self._chat.chosen_reply()
        if reply is None or not reply.is_cut:
            chat.status.flash("That reply is complete; /again writes another one")
            return

        async def place() -> None:
            await chat.transcript.cut(reply)
            reply.reopen()

        await self._write(write_more(chat.state, reply.message_id), reply, place)

    def stop(self) -> None:
        """Stop the reply that the model writes, the tool call of this reply, or the opening of a model.
        Cancel a list that the app does not show yet."""
        self._chat.cancel_list()
        if self._chat.phase in ("replying", "opening"):
            self._tools.stop()
            self._chat.host.stop()
            self._chat.status.flash("Stopping", 0.5)

    # Methods that show and end a reply

    async def _write(
        self,
        begin: BeginReply,
        reply: ReplyMessage,
        place: Callable[[], Awaitable[None]],
        message: UserMessage | None = None,
        typed: str = "",
        edited: int | None = None,
    ) -> None:
        """Show a reply while the model writes it, and run the reply's tool calls.

        begin: a function that starts the reply. place: a function that puts the reply's widget into the
        conversation. message: the widget of the user's message. typed: the text that the user typed; after
        some errors, `_restore_after_error` puts this text back into the input. edited: the id of the earlier
        message that the user's message replaces, or None.
        """
        chat = self._chat
        chat.status.message = ""
        self._rate.ask_why_no_more()
        session = chat.state.session
        arriving = self._telling(session, chat.host.write(self._after_the_shown_end(begin)))
        hides_later = watch_later(chat.transcript, edited)
        await place()
        if hides_later():
            chat.status.flash(ON_ANOTHER_BRANCH)
        self._edit.leave_hidden()
        chat.prompt.focus()
        try:
            while response := await show_reply(reply, arriving, chat.status):
                chat.state.response = response
                await reply.finish(response.text, response.ending)
                if response.choice is not None:
                    await self._show_writer()
                await self._place_turns(session, response.request_id, reply, message)
                if response.calls and not response.text:
                    await reply.remove()
                if not await self._tools.run_calls(session, response):
                    break
                reply, message, typed = ReplyMessage(), None, ""
                await chat.transcript.add(reply)
                arriving = chat.host.write(answer_results(chat.state))
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            if chat.phase != "closing":
                await self._restore_after_error(error, reply, message, typed, edited)

    async def _telling(
        self, session: str, arriving: AsyncIterator[list[Chunk]]
    ) -> AsyncIterator[list[Chunk]]:
        """Yield the chunks of a reply. At the first chunk, the runtime has taken the user's message: tell
        what the model learned from it."""
        has_told = False
        async for chunks in arriving:
            if not has_told:
                has_told = True
                self._chat.start(partial(self._rate.tell_continuation, session))
            yield chunks

    async def _show_writer(self) -> None:
        """Show the name of the model that the selector chose in the border of the input."""
        chat = self._chat
        name, context = await chat.host.call(lambda runtime: (runtime.model.name, runtime.model.context))
        chat.model = chat.prompt.heading = one_line(name)
        chat.status.meter = replace(chat.status.meter, max_context=context)

    def _after_the_shown_end(self, begin: BeginReply) -> BeginReply:
        """Return a function that begins a reply after the last message on the screen, even if another
        terminal has continued the chat meanwhile. If the screen does not show the end of the chat, return
        `begin`."""
        session, transcript = self._chat.state.session, self._chat.transcript
        end = next((m.message_id for m in reversed(transcript.messages) if m.message_id is not None), None)
        if end is None or transcript.has_later:
            return begin

        def begin_there(runtime: Runtime, cancel: threading.Event) -> Iterator[Chunk]:
            return_to(runtime, session, end)
            return begin(runtime, cancel)

        return begin_there

    async def _place_turns(
        self, session: str, reply_id: str, reply: ReplyMessage, message: UserMessage | None
    ) -> None:
        """Give the widgets of a reply and of its question the ids that these messages have in the store."""
        turns = await self._chat.host.call(lambda runtime: turns_with(runtime, session, reply_id))
        reply.place(turns[-1])
        if message and len(turns) > 1:
            message.place(turns[-2])
        await self._chat.transcript.trim(turns)
        self.settle()

    async def _restore_after_error(
        self,
        error: Exception,
        reply: ReplyMessage,
        message: UserMessage | None,
        typed: str,
        edited: int | None,
    ) -> None:
        """Clean up after an error. Keep the words of the reply that arrived before the error. If the runtime
        refused the user's message, put its text back into the input, and show again the messages that the
        function `place` of `_write` removed. If the refused text was an edit of an earlier message, the user
        continues this edit."""
        chat = self._chat
        if not reply.text:
            await reply.remove()
        elif reply.begun:
            await reply.finish(reply.text, "")
        else:
            reply.finished, reply.progress = True, ""
        refused = isinstance(error, RuvmlxError) and not reply.begun
        if message and refused:
            await message.remove()
        if refused:
            # another process can have erased the chat, or can still hold the store
            with contextlib.suppress(RuvmlxError):
                await self.show_turns()
        if typed and (refused or (not reply.text and not chat.prompt.text)):
            self._edit.put_back(typed, edited)
        await chat.transcript.add(Notice(chat_error_line(error), "error"))

    async def show_turns(self) -> None:
        """Read the messages of the chat from the store and show them."""
        session = self._chat.state.session
        turns = await self._chat.host.call(lambda runtime: runtime.chats.turns(session))
        await self._chat.transcript.show(turns, self._chat.model)
        self._edit.leave_hidden()

    async def show_end(self) -> None:
        """Show the end of the chat again, if the screen shows an earlier message because a search found
        it."""
        async with self._showing_end:
            if self._chat.transcript.has_later:
                await self.show_turns()
            self._chat.transcript.follow_end()
            self._chat.status.end_message(AT_FOUND)

    def settle(self) -> None:
        """Let the runtime compute in advance the data that a rating of the newest replies needs. If the user
        sends a message during this work, the runtime ends the work early."""
        self._chat.start(self._settle)

    async def _settle(self) -> None:
        if self._chat.phase != "closing":
            watch = StatusWatch(self._chat.status)
            try:
                await self._chat.host.settle(watch)
            except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
                await self._chat.show_error(error)
            finally:
                watch.end()
            self._rate.look_again()

    # Methods that edit a question

    def edit_as_typed(self, argument: str) -> None:
        """Run the command `/edit [argument]`: send the argument in place of a question. Without an argument,
        put the question into the input, where the user can edit it."""
        question = self._question_to_edit()
        if question and argument:
            self.send(argument, question)
        elif question:
            self._edit.begin(question, text_to_edit(question))

    def edit(self) -> None:
        self.edit_as_typed("")

    def _question_to_edit(self) -> UserMessage | None:
        """Return the question of the chosen reply. If no reply is chosen, return the last question on the
        screen. If the user cannot edit a question now, tell the user and return None."""
        chat = self._chat
        reply = chat.chosen_reply()
        message = chat.transcript.question_of(reply) if reply else None
        message = message or next(
            (m for m in reversed(chat.transcript.messages) if isinstance(m, UserMessage)), None
        )
        if chat.phase != "idle" or message is None or message.message_id is None:
            chat.status.flash("There is no question to edit yet")
            return None
        return message

    # Methods that switch between the replies to one question

    def next(self, _: str = "") -> None:
        self.flip(1)

    def previous(self, _: str = "") -> None:
        self.flip(-1)

    def flip(self, step: int) -> None:
        """Show another branch (alternative) of the chosen reply or of its question. step: 1 shows the next
        branch, -1 shows the previous branch."""
        self._chat.start(partial(self._flip, step), group="write")

    async def _flip(self, step: int) -> None:
        chat = self._chat
        chosen, session = chat.chosen_reply(), chat.state.session
        if chat.phase != "idle" or not session:
            return
        message = chosen.message_id if chosen else None
        before = {message.message_id for message in chat.transcript.messages}

        def flip(runtime: Runtime) -> tuple[int, list[Turn]]:
            return runtime.chats.next_sibling(session, step, message), runtime.chats.turns(session)

        done = await chat.attempt(flip)
        if done:
            had_focus = chat.selected_reply() is not None
            # the figures are those of the reply on the other branch
            chat.status.meter = Meter(max_context=chat.status.meter.max_context)
            await chat.transcript.show(done[1], chat.model)
            self._edit.leave_hidden()
            shown = next((r for r in chat.transcript.replies if r.message_id == done[0]), None)
            if done[0] in before:
                chat.status.flash("This is the only reply here; /again writes another one")
            if shown and had_focus:
                shown.focus()

    def may(self, action: str) -> bool:
        """Return False if the messages on the screen show that the method `action` would do nothing now.
        action: "again", "more", "edit" or "flip"."""
        reply = self._chat.chosen_reply()
        if action == "more":
            return reply is not None and reply.is_cut
        if action == "flip":
            question = reply and self._chat.transcript.question_of(reply)
            return any(shown is not None and shown.branch[1] > 1 for shown in (reply, question))
        return bool(self._chat.transcript.messages)
