"""This module is the screen that shows two replies to one question side by side."""

from functools import partial
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from ruvmlx.errors import error_line

from . import compare, keys
from .context import ChatContext
from .messages import ReplyMessage
from .stream import show_reply


class CompareScreen(ModalScreen[int | None]):
    """A screen with two replies. The screen returns 0 if the user chose the left reply, 1 for the right
    reply, or None for no choice. Between two equal replies there is no choice.

    candidates: the replies that the model has finished. offered: the two replies between which the user can
    choose, or []. is_blind: True if the screen shows numbers in place of the replies' names, puts the replies
    in random order, and lets the user choose a reply.
    """

    AUTO_FOCUS = ""  # neither of the two replies has the focus at first
    BINDINGS: ClassVar = [
        Binding("escape", "leave", "Neither", show=False, priority=True, id="close"),
        Binding("ctrl+c", "leave", "Neither", show=False, priority=True),
        Binding("ctrl+q", "app.leave", "Quit", show=False, priority=True, id="quit"),
        Binding("1,left", "choose(0)", "Left", show=False, priority=True, id="choose_left"),
        Binding("2,right", "choose(1)", "Right", show=False, priority=True, id="choose_right"),
        Binding("up", "scroll(-5)", "Up", show=False, priority=True, id="list_up"),
        Binding("down", "scroll(5)", "Down", show=False, priority=True, id="list_down"),
        Binding(keys.PAGE_UP, "scroll(-20)", "Page up", show=False, priority=True, id="list_page_up"),
        Binding(keys.PAGE_DOWN, "scroll(20)", "Page down", show=False, priority=True, id="list_page_down"),
    ]

    def __init__(self, chat: ChatContext, text: str, is_blind: bool = True) -> None:
        super().__init__()
        self._chat, self._text, self.is_blind = chat, text, is_blind
        self._sides = compare.order() if is_blind else [False, True]
        self._seed: int | None = None if is_blind else compare.draw_seed()
        self.candidates: list[compare.Candidate] = []
        self.offered: list[compare.Candidate] = []
        self._busy, self._stopped = True, False

    def compose(self) -> ComposeResult:
        with Vertical(id="compare"):
            with Horizontal():
                for number, learned in enumerate(self._sides, 1):
                    side = VerticalScroll(ReplyMessage(), can_focus=False, classes="side")
                    side.border_title = str(number) if self.is_blind else compare.SIDES[learned]
                    yield side
            yield Static(f"{self._close_key} Stop", markup=False, id="hints")

    @property
    def _close_key(self) -> str:
        return keys.key_label(self.app, "close", "esc")

    @property
    def _choices(self) -> str:
        left, right = (
            keys.key_label(self.app, "choose_left", "1 or ←"),
            keys.key_label(self.app, "choose_right", "2 or →"),
        )
        return f"{left} the left is better   {right} the right   {self._close_key} Neither"

    def on_mount(self) -> None:
        for reply in self.query(ReplyMessage):
            reply.can_focus = False
        self._write()

    @work
    async def _write(self) -> None:
        """Write the two replies one after the other, because only one model is open. After an error, clear
        the list of candidates, so that the user can choose no reply."""
        chat, session = self._chat, self._chat.state.session
        try:
            sides = zip(self.query(ReplyMessage), self._sides, strict=True)
            for first, (reply, learned) in enumerate(sides):
                begin = compare.writing(
                    session, self._text, first == 0, learned, chat.state.options, self._seed
                )
                response = await show_reply(reply, chat.host.write(begin), chat.status)
                if response:
                    await reply.finish(response.text, response.ending)
                    reply.ending = ""
                    written = partial(compare.candidate, session=session, with_learned=learned)
                    self.candidates.append(await chat.host.call(written))
                if self._stopped:
                    break
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            self._say(f"{error_line(error)}   {self._close_key} Close")
            self.candidates = []
            return
        finally:
            self._busy = False
        if len(self.candidates) < 2:
            self._say(f"Stopped   {self._close_key} Close")
        elif self.is_blind and not self.candidates[0].is_like(self.candidates[1]):
            self._say(self._choices)
            self.offered = self.candidates
        else:
            words = compare.lengths(*(candidate.text for candidate in self.candidates))
            self._say(f"{words}   {self._close_key} Close")

    def action_choose(self, side: int) -> None:
        if self.offered:
            self.dismiss(side)

    def action_leave(self) -> None:
        """If the model still writes the replies, stop them. If the model writes no reply any more, close the
        screen."""
        if self._busy:
            self._stopped = True
            self._chat.host.stop()
        else:
            self.dismiss(None)

    def action_scroll(self, lines: int) -> None:
        for side in self.query(VerticalScroll):
            side.scroll_relative(y=lines, animate=False)

    def _say(self, text: str) -> None:
        self.query_one("#hints", Static).update(Content(text))
