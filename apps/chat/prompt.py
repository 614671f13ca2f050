"""This module is the app's input. The key Enter sends the message. The key Ctrl+J begins a new line, and
every terminal can send this key.

Shift+Enter begins a new line too, in terminals that distinguish it from Enter (by the kitty keyboard
protocol, or by xterm's modifyOtherKeys, which gives the key name "shift+\\r" below). In other terminals,
Shift+Enter and Alt+Enter send the message as Enter does.
"""

from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.binding import Binding
from textual.content import Content
from textual.events import Key, Paste
from textual.message import Message
from textual.reactive import var
from textual.widgets import TextArea
from textual.widgets.text_area import Edit, EditResult

from ruvmlx.text import sanitize

from .keys import PAGE_DOWN, PAGE_UP
from .ordered_keys import OrderedKeys

# the maximum number of characters of a message; in a longer line, each key would take over half a second
MAX_MESSAGE_CHARACTERS = 200_000
EDITING = "Editing your question · Enter sends, Esc cancels"
REWRITING = "Rewriting the reply · Enter saves your version, Esc cancels"
CHOOSING = "Choosing a reply · keys act on it, Esc goes back to writing"
NEWLINE_KEYS = frozenset(("ctrl+j", "shift+enter", "shift+\r", "alt+enter", "ctrl+enter"))


class Prompt(OrderedKeys, TextArea):
    BINDINGS: ClassVar = [
        Binding("enter", "submit", "Send", key_display="⏎"),
        Binding("ctrl+j", "newline", "New line", key_display="^j"),
        Binding("escape", "app.do('edit.cancel')", "Don't edit", key_display="esc"),
        Binding("tab,shift+tab", "app.do('draft.complete_or_choose')", "Choose", key_display="tab"),
        Binding("ctrl+e", "app.do('draft.edit')", "Editor", show=False, id="editor"),
        Binding("ctrl+d", "delete_right_or_leave", "Leave", show=False),
        Binding(PAGE_UP, "app.do('select.scroll', -1)", "Scroll up", show=False),
        Binding(PAGE_DOWN, "app.do('select.scroll', 1)", "Scroll down", show=False),
        Binding("ctrl+home", "app.do('select.scroll', -1000)", "To the top", show=False),
        Binding("ctrl+end", "app.do('select.scroll', 1000)", "To the end", show=False),
    ]

    is_choosing: var[bool] = var(False)  # True while a reply has the focus, so that keys act on the reply

    class Submitted(Message):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(
        self,
        flash: Callable[[str], object] = lambda words: None,
        moved: Callable[[], None] = lambda: None,
        complete: Callable[[], bool] = lambda: False,
    ) -> None:
        """flash: a function that shows a line for some seconds. moved: a function that the input calls after
        each change of the text or of the cursor's place. complete: a function that puts the next suggestion
        into the input, and returns False if no suggestion would change the input."""
        super().__init__(
            soft_wrap=True,
            tab_behavior="focus",
            highlight_cursor_line=False,
            show_line_numbers=False,
            placeholder="Ask anything",
        )
        self._title = self._doing = ""
        self._flash, self._moved, self._complete = flash, moved, complete
        self._earlier: list[str] = []
        self._unsent: list[str] = []  # the texts that `set_aside` has moved to the history, the newest first
        self._at = -1  # the index of the shown message in `earlier`; -1: the draft
        # index in `earlier` -> the text that the input showed when the user left this place of the history
        self._left: dict[int, str] = {}
        self.returned = ""  # an unsent message that came back into the input, until the user changes the text
        self._aside: str | None = None  # the draft while the user edits a message; None: no message is edited

    @property
    def earlier(self) -> list[str]:
        """The user's earlier messages (the history), the newest first."""
        return self._earlier

    @earlier.setter
    def earlier(self, messages: list[str]) -> None:
        self._leave_history()
        self._earlier = [*(text for text in self._unsent if text not in messages), *messages]

    @property
    def heading(self) -> str:
        return self._title

    @heading.setter
    def heading(self, text: str) -> None:
        """Show `text`, the name of the model, in the border of the input."""
        self._title = text
        self._head()

    def _head(self) -> None:
        """While the user chooses a reply or edits a message, show in the input's border what the keys do.
        When the user does neither, show the model's name in the border. The text is `Content` and no markup,
        because a model's name can contain brackets."""
        self.set_class(self.is_choosing, "choosing")
        self.border_title = Content(CHOOSING if self.is_choosing else self._doing or self._title)

    watch_is_choosing = _head

    async def _on_key(self, event: Key) -> None:
        if event.key in NEWLINE_KEYS:
            action = self.action_newline
        elif event.key == "enter":
            action = self.action_submit
        # complete now, so that letters that are typed later follow the suggestion
        elif event.key == "tab" and self._complete():
            event.stop()
            event.prevent_default()
            return
        else:
            return  # Textual calls the methods of the base classes next
        event.stop()
        event.prevent_default()
        action()

    async def _on_paste(self, event: Paste) -> None:
        """Insert the text of a paste with its newlines. A newline in a paste does not send the message."""
        event.text = sanitize(event.text)
        await super()._on_paste(event)
        event.prevent_default()

    @on(TextArea.Changed)
    @on(TextArea.SelectionChanged)
    def _tell(self) -> None:
        self._moved()

    def edit(self, edit: Edit) -> EditResult:
        """Apply a change to the text of the input. If the text becomes too long for a message, insert only
        the first characters. Put a space between an unsent message that came back and a word after it."""
        returned, self.returned = self.returned, ""
        is_word = edit.top == edit.bottom == self.document.end and edit.text[:1].isalnum()
        if returned and self.text == returned and is_word:
            edit.text = f" {edit.text}"
        replaced = self.document.get_text_range(edit.top, edit.bottom)
        room = max(0, MAX_MESSAGE_CHARACTERS - len(self.text) + len(replaced))
        if len(edit.text) > room:
            edit.text = edit.text[:room]
            self._flash(
                f"A message has at most {MAX_MESSAGE_CHARACTERS:,} characters; the rest was left out."
            )
        return super().edit(edit)

    def put_back(self, text: str) -> None:
        """Put an unsent message back into the input. The message stands before the text that the user has
        typed in the meantime."""
        if self.text.strip():
            self.insert(f"{text}\n\n", (0, 0))
        else:
            self.text = text
            self.move_cursor(self.document.end)

    # Methods for earlier messages

    def action_cursor_up(self, select: bool = False) -> None:
        """Move the cursor up. If the cursor is in the first line, show the previous message of the history
        (the user's earlier messages)."""
        if select or not self.navigator.is_first_wrapped_line(self.cursor_location):
            super().action_cursor_up(select)
        elif self._at + 1 < len(self.earlier):
            self._go_to(self._at + 1)

    def action_cursor_down(self, select: bool = False) -> None:
        if select or not self.navigator.is_last_wrapped_line(self.cursor_location):
            super().action_cursor_down(select)
        elif self._at >= 0:
            self._go_to(self._at - 1)

    def _go_to(self, place: int) -> None:
        """Show the message of the history with the index `place`. At index -1, show the draft again. If
        the user has changed the text at an index, keep the changed text at this index."""
        self._left[self._at] = self.text
        self.text = self._left.get(place, sanitize(self.earlier[place]) if place >= 0 else "")
        self._at = place
        self.move_cursor(self.document.end)

    def _leave_history(self) -> None:
        """Show the draft in place of an earlier message, unless the user has changed this message: then the
        changed text is the draft."""
        if self._at >= 0 and self.text == sanitize(self.earlier[self._at]):
            self.text = self._left.get(-1, "")
            self.move_cursor(self.document.end)
        self._at, self._left = -1, {}

    def add_to_history(self, text: str) -> None:
        """Put `text` at the beginning of the history of messages. If the input shows a message of the
        history, show the draft again, because the places of these messages change."""
        self._leave_history()
        if text in self.earlier:
            self.earlier.remove(text)
        self.earlier.insert(0, text)

    def set_aside(self) -> None:
        """Move the unsent text from the input to the history, and tell the user."""
        if self.clear_into_history():
            self._flash("The text that you had typed is kept: ↑ shows it.")

    def clear_into_history(self) -> bool:
        """Move the unsent text from the input to the history. Return False if the input has no text."""
        self._leave_history()
        kept = bool(self.text.strip())
        if kept:
            self._unsent.insert(0, self.text)
            self.add_to_history(self.text)
        self.text = ""
        return kept

    def begin_command(self, text: str) -> None:
        """Put the first words of a command into the input, in place of the draft."""
        self.set_aside()
        self.text = text
        self.move_cursor(self.document.end)
        self.screen.set_focus(self)

    def begin_edit(self, text: str, heading: str = EDITING) -> None:
        """Put an earlier message into the input, where the user can edit it. `end_edit` shows the draft
        again."""
        self._leave_history()
        self._aside = self.text
        self.text, self._doing = text, heading
        self._head()
        self.move_cursor(self.document.end)
        self.screen.set_focus(self)

    def end_edit(self) -> None:
        if self._aside is not None:
            self.text, self._at, self._left = self._aside, -1, {}
            self.move_cursor(self.document.end)
        self._aside, self._doing = None, ""
        self._head()

    # Methods that the app calls for keys

    def action_delete_to_start_of_line(self) -> None:
        """Delete the text of the line before the cursor. A line ends at a newline. TextArea would delete only
        the row on the screen. At the start of a line, delete the newline before it."""
        row, column = self.cursor_location
        if column == 0:
            super().action_delete_to_start_of_line()
        else:
            self._delete_via_keyboard((row, 0), (row, column))

    def action_delete_to_end_of_line(self) -> None:
        """Delete the text of the line after the cursor, to the next newline."""
        row, column = self.cursor_location
        self._delete_via_keyboard((row, column), (row, len(self.document.get_line(row))))

    def action_newline(self) -> None:
        self.insert("\n")

    def action_submit(self) -> None:
        """Send the text. Remove the text from the input at once, so that the next key begins another message.
        If the text came from the history of messages, or if it was an edit of a message, the input shows the
        draft again."""
        text = self.text
        if text.strip():
            if self._aside is None:
                self.text = self._left.get(-1, "") if self._at >= 0 else ""
                self._at, self._left = -1, {}
                self.move_cursor(self.document.end)
            self.end_edit()
            self.post_message(self.Submitted(text))

    @property
    def line_start(self) -> str:
        """The text of the cursor's line before the cursor."""
        row, column = self.cursor_location
        return self.document.get_line(row)[:column]

    def action_delete_right_or_leave(self) -> None:
        """Delete the character to the right of the cursor. If the input is empty, handle the key like
        Ctrl+C."""
        if self.text:
            self.action_delete_right()
        else:
            self.app.action_interrupt()  # type: ignore[attr-defined]
