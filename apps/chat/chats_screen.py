"""This module is the screen with the list of saved chats. The letters that the user types search all
messages, and Enter opens a chat."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ruvmlx.runtime import Runtime

from . import chat_files, keys
from .context import ChatContext
from .errors import chat_error_line
from .ordered_keys import OrderedInput
from .stream import wait_until_drawn

SEARCH = "Search all chats"
# The number of chats in the list when the list appears, counted from the highlighted chat. The app adds the
# other chats later. The app needs 0.1 ms to add one chat, so hundreds of chats would delay the list.
FIRST_ROWS = 64
PAUSE = 0.05  # seconds; the screen handles the user's first keys before the other chats follow


class ChatsScreen(ModalScreen[chat_files.ChatEntry | None]):
    """A screen that returns the chat that the user chose, with the message that the search found. The screen
    returns None if the user closes it."""

    BINDINGS: ClassVar = [
        *keys.OF_LISTS,
        Binding("ctrl+t", "rename", "Rename", show=False, priority=True, id="chat_rename"),
        Binding("ctrl+f", "pin", "Pin", show=False, priority=True, id="chat_pin"),
        Binding("ctrl+x", "delete", "Delete", show=False, priority=True, id="chat_delete"),
        Binding("ctrl+z", "bring_back", "Bring back", show=False, priority=True, id="chat_bring_back"),
    ]

    def __init__(self, chat: ChatContext, words: str = "") -> None:
        super().__init__()
        self._chat = chat
        self._words = words
        self._entries: list[chat_files.ChatEntry] = []
        # the chat whose new name the user types; None: the user renames no chat
        self._naming: chat_files.ChatEntry | None = None
        self.has_deleted_open_chat = False
        self._is_opening = False  # True after Enter: later letters do not change the choice
        # the event is set when the list shows the result of the search for the typed words
        self._found = asyncio.Event()

    def compose(self) -> ComposeResult:
        with Vertical(id="chats"):
            yield OrderedInput(self._words, placeholder=SEARCH, select_on_focus=False)
            yield OptionList()
            yield Static(self._hints, markup=False, id="hints")

    def on_mount(self) -> None:
        self.query_one("#chats").border_title = "Chats"

    def _key(self, name: str, default: str) -> str:
        return keys.key_label(self.app, name, default)

    @property
    def _hints(self) -> str:
        rename, delete = self._key("chat_rename", "^t"), self._key("chat_delete", "^x")
        pin = self._key("chat_pin", "^f")
        back, close = self._key("chat_bring_back", "^z"), self._key("close", "esc")
        return f"⏎ Open  {rename} Rename  {pin} Pin  {delete} Delete  {back} Bring back  {close} Close"

    @property
    def options(self) -> OptionList:
        return self.query_one(OptionList)

    @property
    def highlighted_chat(self) -> chat_files.ChatEntry | None:
        at = self.options.highlighted
        return self._entries[at] if at is not None and at < len(self._entries) else None

    async def _settled_choice(self) -> chat_files.ChatEntry | None:
        """Return the highlighted chat, after the search for all typed letters has ended. The wait is
        necessary because Textual handles a key with a priority binding, for example Ctrl+T, before letters
        that wait in the input's queue."""
        # wait until the input has handled the typed letters, then until the screen has handled the input's
        # event Changed
        for pump in (self.query_one(Input), self):
            heard = asyncio.Event()
            pump.call_later(heard.set)
            await heard.wait()
        await self._found.wait()
        return self.highlighted_chat

    def _search(self, keep: str | None = None) -> None:
        """Show the chats that contain the typed words. keep: the id of the chat to highlight; None: the first
        chat of the list."""
        self._found.clear()
        self._show(self._words, keep)

    @work(exclusive=True, group="search")
    async def _show(self, words: str, keep: str | None) -> None:
        try:
            self._entries = await self._chat.host.call_between(lambda r: chat_files.entries(r, words))
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            self._say(chat_error_line(error))
            self._found.set()
            return
        places = [n for n, entry in enumerate(self._entries) if entry.id == keep]
        place = (places or [0])[0]
        options = self.options
        options.clear_options()
        options.add_options(
            [Option(self._row(entry)) for entry in self._entries[: place + FIRST_ROWS]]
            or [Option("No chat has these words" if words.strip() else "No chats yet", disabled=True)]
        )
        options.highlighted = place if self._entries else None
        self._found.set()
        await wait_until_drawn(self)
        await asyncio.sleep(PAUSE)
        if options.is_attached:  # the user can have closed the screen meanwhile
            options.add_options(Option(self._row(entry)) for entry in self._entries[place + FIRST_ROWS :])

    def _row(self, entry: chat_files.ChatEntry) -> Content:
        """Return the row of a chat, cut to the list's width. The left side has the folder's name and the
        title. The folder's name takes at most half of this side. The right edge has the number of messages
        and the date. If a search found the chat, a second line has the excerpt."""
        is_open = entry.id == self._chat.state.session
        mark = f"{'●' if is_open else ' '}{'★' if entry.is_pinned else ' '} "
        facts = f"{entry.turns:>6} · {entry.when:>6}"
        room = max(10, self.options.size.width - cell_len(mark + facts) - 2)
        short = replace(entry, folder=_cut(entry.folder, room // 2))
        title = set_cell_size(_cut(short.name, room), room)
        row = Content.assemble((mark, "$accent"), title, (facts, "$secondary"))
        return Content.assemble(row, (f"\n    {entry.said}", "$secondary")) if entry.said else row

    def on_resize(self) -> None:
        """Fill the list. At first, the open chat has the highlight, so that a key such as Delete does not act
        on another chat by accident."""
        shown = self.highlighted_chat
        self._search(shown.id if shown else self._chat.state.session)

    @on(Input.Changed)
    def _filter_chats(self, event: Input.Changed) -> None:
        if not self._naming:
            self._filter(event.value)

    def _filter(self, words: str) -> None:
        if not self._is_opening and words != self._words:
            self._words = words
            self._search()

    @on(Input.Submitted)
    def _accept_input(self, event: Input.Submitted) -> None:
        if self._naming:
            self._give_title(self._naming, event.value)
        else:
            self._is_opening = True
            self._open()

    @work(exclusive=True, group="open")
    async def _open(self) -> None:
        if entry := await self._settled_choice():
            self.dismiss(entry)
            return
        self._is_opening = False
        self._filter(self.query_one(Input).value)

    @on(OptionList.OptionSelected)
    def _open_highlighted(self) -> None:
        if self.highlighted_chat:
            self.dismiss(self.highlighted_chat)

    def action_leave(self) -> None:
        if self._naming:
            self._end_naming()
        else:
            self.dismiss(None)

    def action_move(self, step: int) -> None:
        if self._entries and not self._naming:
            at = (self.options.highlighted or 0) + step
            self.options.highlighted = max(0, min(at, len(self._entries) - 1))

    # Methods that change chats

    @work
    async def action_rename(self) -> None:
        if not self._naming and (entry := await self._settled_choice()):
            self._naming, field = entry, self.query_one(Input)
            field.value, field.placeholder = entry.title, "Title"
            field.cursor_position = len(entry.title)
            self._say(f"⏎ Save the title   {self._key('close', 'esc')} Cancel")

    def _end_naming(self) -> None:
        self._naming, field = None, self.query_one(Input)
        field.value, field.placeholder = self._words, SEARCH
        self._say(self._hints)

    @work
    async def _give_title(self, entry: chat_files.ChatEntry, title: str) -> None:
        self._end_naming()
        if await self._done(lambda runtime: chat_files.rename(runtime, entry.id, title)):
            self._search(entry.id)

    @work
    async def action_pin(self) -> None:
        if self._naming or not (entry := await self._settled_choice()):
            return
        said: list[str] = []
        if await self._done(lambda runtime: said.append(chat_files.pin(runtime, entry.id))):
            self._search(entry.id)
            self._say(f"{said[0]}: {entry.title}" if entry.is_pinned else said[0])

    @work
    async def action_delete(self) -> None:
        if self._naming or not (entry := await self._settled_choice()):
            return
        at = self._entries.index(entry)
        near = self._entries[at + 1 :] or self._entries[:at][-1:]
        if await self._done(lambda runtime: runtime.store.chats.soft_delete(entry.id)):
            self.has_deleted_open_chat |= entry.id == self._chat.state.session
            self._search(near[0].id if near else None)
            back = self._key("chat_bring_back", "^z")
            self._say(f"Deleted: {entry.title} · for a day, {back} brings it back")

    @work
    async def action_bring_back(self) -> None:
        if self._naming:
            return
        found: list[str] = []
        if await self._done(lambda runtime: found.append(chat_files.restore_newest(runtime))):
            self.has_deleted_open_chat &= found[0] != self._chat.state.session
            self._search(found[0])
            self._say(self._hints)

    async def _done(self, work: Callable[[Runtime], object]) -> bool:
        try:
            await self._chat.host.call_between(work)
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            self._say(chat_error_line(error))
            return False
        return True

    def _say(self, text: str) -> None:
        self.query_one("#hints", Static).update(Content(text))


def _cut(text: str, room: int) -> str:
    """Return the text, cut to `room` cells."""
    return text if cell_len(text) <= room else set_cell_size(text, room - 1) + "…"
