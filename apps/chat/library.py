"""Saved chats in the app: opening another one, naming, copying, deleting, files, and the clipboard."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from textual import work

from ruvmlx.errors import NotFound

from . import chat_files, commands
from .chats_screen import ChatsScreen
from .contract import ChatOptions, ChatRuntime, OpenRuntime
from .messages import Notice, Reply
from .status import Meter
from .view_model import Opened
from .writing import WritingApp

T = TypeVar("T")


class LibraryApp(WritingApp):
    def __init__(self, open_runtime: OpenRuntime, options: ChatOptions) -> None:
        super().__init__(open_runtime, options)
        self.system: str | None = options.system
        self.caveat = ""  # of the runtime in use
        self._waiting = ""  # sent while the model was opening
        self._deleted: list[str] = []  # chats that /restore brings back, the last at the end

    async def _begin(self, options: ChatOptions) -> None:
        """Show a session: the first, or another one later."""
        opened = await self.runtime.call(lambda runtime: Opened.of(runtime, options))
        self.system = next((t.content for t in opened.turns if t.role == "system"), options.system)
        self._show_opened(opened)
        await self.transcript.restart(opened.turns, opened.model)
        self.phase = "idle"
        self._send_waiting()

    def _show_opened(self, opened: Opened) -> None:
        """All but the conversation."""
        self.session = opened.session
        self.model = self.prompt.heading = opened.model
        self.prompt.earlier = opened.said
        self.status.backend = opened.backend
        self.caveat = opened.caveat
        self.status.meter = Meter(max_context=opened.max_context)
        self._learned(opened.learned)

    def _send_waiting(self) -> None:
        """What was sent while a model was opening, if nobody has changed it since."""
        if self._waiting and self._waiting == self.prompt.text:
            self.prompt.action_submit()
        self._waiting = ""

    async def _open_chat(self, session: str) -> None:
        if self.editing:
            self.action_cancel_edit()
        await self._begin(replace(self.options, session=session, system=None))

    async def _open_new(self) -> None:
        await self._begin(replace(self.options, session="new", system=self.system))

    def action_chats(self) -> None:
        self._choose_chat("")

    @work
    async def _choose_chat(self, words: str) -> None:
        screen = ChatsScreen(words)
        chosen = await self.push_screen_wait(screen)
        self._deleted += screen.deleted
        if self.phase != "idle":
            return
        if chosen and chosen != self.session:
            await self._open_chat(chosen)
        elif self.session in screen.deleted:
            await self._open_new()

    async def _with_chat(self, work: Callable[[ChatRuntime, str], T]) -> T:
        """work(runtime, this chat)."""
        session = self.session
        return await self.runtime.call(lambda runtime: work(runtime, session))

    # Slash commands

    async def do_chats(self, argument: str) -> None:
        self._choose_chat(argument)

    async def do_open(self, argument: str) -> None:
        await self._open_chat(await self.runtime.call(lambda runtime: chat_files.find(runtime, argument)))

    async def do_new(self, _: str) -> None:
        await self._open_new()

    async def do_title(self, argument: str) -> None:
        said = await self._with_chat(lambda runtime, session: chat_files.rename(runtime, session, argument))
        self.status.flash(said)

    async def do_fork(self, _: str) -> None:
        """Up to the chosen reply, if one is selected."""
        chosen = self.focused.message_id if isinstance(self.focused, Reply) else None
        await self._open_chat(await self._with_chat(lambda r, session: r.store.chats.fork(session, chosen)))
        self.status.flash("This is the copy; the other chat stays as it was")

    async def do_delete(self, _: str) -> None:
        session = self.session
        await self.runtime.call(lambda runtime: runtime.deleted_chats.soft_delete(session))
        self._deleted.append(session)
        await self._open_new()
        self.status.flash("Deleted · /restore brings it back, until you leave", 10)

    async def do_restore(self, _: str) -> None:
        if not self._deleted:
            raise NotFound("nothing was deleted since you came")
        session = self._deleted[-1]
        await self.runtime.call(lambda runtime: runtime.deleted_chats.restore(session))
        self._deleted.pop()
        await self._open_chat(session)

    async def do_export(self, argument: str) -> None:
        said = await self._with_chat(lambda runtime, session: chat_files.export(runtime, session, argument))
        await self.transcript.add(Notice(said))

    async def do_import(self, argument: str) -> None:
        await self._open_chat(await self.runtime.call(lambda runtime: chat_files.take_up(runtime, argument)))

    # The clipboard

    def action_copy(self) -> None:
        self.run_worker(self._obey(commands.Command("copy")))

    def action_copy_code(self) -> None:
        """The chosen reply's first code block; pressed again the next one."""
        reply = self._chosen()
        blocks = reply.code_blocks if reply else []
        if reply is None or not blocks:
            self.status.flash("That reply has no code in it")
            return
        reply.copied = reply.copied % len(blocks) + 1
        self.run_worker(self._obey(commands.Command("copy", str(reply.copied))))

    async def do_copy(self, argument: str) -> None:
        """The chosen reply, or one of its code blocks."""
        reply = self._chosen()
        if reply is None:
            raise NotFound("there is no reply to copy yet")
        blocks = reply.code_blocks
        number = commands.parse_number(argument, len(blocks), "code blocks")
        self.copy_to_clipboard(reply.text if number is None else blocks[number - 1])
        self._notice([reply.reply_id], "copied")
        self.status.flash("Copied" if number is None else f"Copied code block {number} of {len(blocks)}")
