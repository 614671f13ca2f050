"""This module keeps the order of keys that arrive at once, for example from a slow connection, or while a
long frame is drawn.

Textual runs a key's binding only after the key has bubbled from the focused widget to the app. Meanwhile the
widget has inserted the letters that follow: "teh", two Backspaces and "he" would leave "t".
"""

import unicodedata
from typing import TYPE_CHECKING, Any

from textual.events import Key
from textual.widget import Widget
from textual.widgets import Input

from ruvmlx.text import sanitize

if TYPE_CHECKING:
    _Base = Widget
else:  # do not subclass Widget here, because Textual's CSS would take this mixin as the base class
    _Base = object


def typed_character(event: Key) -> str:
    """Return the character that a key types, or "" if the key types no character. Textual takes only
    characters that Python calls printable: no joiner of Persian words and emoji, no space of Japanese and
    French keyboards, and no emoji that is newer than this Python."""
    character = event.character or ""
    # a terminal with the kitty protocol sends some keys without a character as private characters ("Co")
    is_text = len(character) == 1 and unicodedata.category(character) not in ("Cc", "Co")
    return sanitize(character) if is_text else ""


class OrderedKeys(_Base):
    """A mixin for widgets in which the user types. The widget runs the binding of a key before the widget
    handles the next key. Put the mixin before the widget in the list of base classes."""

    async def _on_key(self, event: Key) -> None:
        """Run the key's binding now, of this widget or of its parents. A character that Textual would ignore
        replaces the selected text. Textual calls the method of each base class, so this one does not call the
        next."""
        if event.is_printable:
            return
        if character := typed_character(event):
            widget: Any = self  # an Input or a TextArea; each has `replace` and `selection`
            widget.replace(character, *sorted(widget.selection))
        elif not await self.app._check_bindings(event.key):
            return
        event.stop()
        event.prevent_default()


class OrderedInput(OrderedKeys, Input):
    """A field of one line, whose keys keep their order."""
