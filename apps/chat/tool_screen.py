"""This module is the screen that asks the user for permission to run a tool call."""

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from . import keys
from .steps.tools import ALWAYS, NO, ONCE

# "No" is the first choice, so that a user who types when the question appears does not allow the call by
# mistake.
_CHOICES = ((NO, "No"), (ONCE, "Run once"), (ALWAYS, "Always for this tool in this chat"))


class ToolScreen(ModalScreen[str]):
    """A screen that asks the user for permission to run a tool call. The screen returns ONCE, ALWAYS or NO.

    lines: the lines that describe the call. server: the name of the server that has the tool.
    """

    BINDINGS: ClassVar = [*keys.OF_LISTS]

    def __init__(self, lines: list[str], server: str) -> None:
        super().__init__()
        self._lines, self._server = lines, server

    def compose(self) -> ComposeResult:
        with Vertical(id="tool"):
            with VerticalScroll(can_focus=False):
                yield Static("\n".join(self._lines), markup=False)
            yield OptionList(*(Option(text, id=answer) for answer, text in _CHOICES))
            yield Static(markup=False, id="hints")

    def on_mount(self) -> None:
        self.query_one("#tool").border_title = f"Run this tool of {self._server}?"
        self.query_one("#hints", Static).update(
            f"↑ ↓ Choose   ⏎ Take   {keys.key_label(self.app, 'close', 'esc')} No"
        )
        self.query_one(OptionList).highlighted = 0
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def _answer(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id or NO)

    def action_leave(self) -> None:
        self.dismiss(NO)

    def action_move(self, step: int) -> None:
        options = self.query_one(OptionList)
        options.highlighted = max(0, min((options.highlighted or 0) + step, len(_CHOICES) - 1))
