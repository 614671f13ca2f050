"""The input. Enter sends; Ctrl+J, which every terminal delivers, begins a new line.

Shift+Enter does too where the terminal tells it from Enter (the kitty keyboard protocol; xterm's
modifyOtherKeys gives the odd key name below). Alt+Enter arrives as plain Enter in other terminals.
"""

from typing import ClassVar

from textual.binding import Binding
from textual.events import Key, Paste
from textual.message import Message
from textual.widgets import TextArea

from ruvmlx.text import sanitize

NEWLINE_KEYS = frozenset(("ctrl+j", "shift+enter", "shift+\r", "alt+enter", "ctrl+enter"))


class Prompt(TextArea):
    BINDINGS: ClassVar = [
        Binding("enter", "submit", "Send", key_display="⏎"),
        Binding("ctrl+j", "newline", "New line", key_display="^j"),
        Binding("tab,shift+tab", "app.select(0)", "Choose", key_display="tab"),
        Binding("ctrl+d", "delete_right_or_leave", "Leave", show=False),
        Binding("pageup", "app.scroll(-1)", "Scroll up", show=False),
        Binding("pagedown", "app.scroll(1)", "Scroll down", show=False),
        Binding("ctrl+home", "app.scroll(-1000)", "To the top", show=False),
        Binding("ctrl+end", "app.scroll(1000)", "To the end", show=False),
    ]

    class Submitted(Message):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True,
            tab_behavior="focus",
            highlight_cursor_line=False,
            show_line_numbers=False,
            placeholder="Ask anything",
        )

    async def _on_key(self, event: Key) -> None:
        if event.key in NEWLINE_KEYS:
            action = self.action_newline
        elif event.key == "enter":
            action = self.action_submit
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        action()

    async def _on_paste(self, event: Paste) -> None:
        """Newlines of a paste stay newlines; nothing is sent until Enter."""
        event.text = sanitize(event.text)
        await super()._on_paste(event)
        event.prevent_default()

    def put_back(self, text: str) -> None:
        """What was not sent is here again, before anything that was typed since."""
        if self.text.strip():
            self.insert(f"{text}\n\n", (0, 0))
        else:
            self.text = text
            self.move_cursor(self.document.end)

    def action_newline(self) -> None:
        self.insert("\n")

    def action_submit(self) -> None:
        if self.text.strip():
            self.post_message(self.Submitted(self.text))

    def action_delete_right_or_leave(self) -> None:
        """Ctrl+D deletes; at an empty input it is the end of the input, as in a shell."""
        if self.text:
            self.action_delete_right()
        else:
            self.app.action_interrupt()  # type: ignore[attr-defined]
