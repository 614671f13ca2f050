"""This module keeps the order of keys that arrive at once, for example from a slow connection, or while a
long frame is drawn.

Textual runs a key's binding only after the key has bubbled from the focused widget to the app. Meanwhile the
widget has inserted the letters that follow: "teh", two Backspaces and "he" would leave "t".
"""

from typing import TYPE_CHECKING, Any

from textual.events import Key
from textual.widget import Widget
from textual.widgets import Input

if TYPE_CHECKING:
    _Base = Widget
else:  # do not subclass Widget here, because Textual's CSS would take this mixin as the base class
    _Base = object


# The zero width non-joiner and the zero width joiner. Keyboards for Persian and Hindi and lists of emoji type
# them. Textual ignores these keys, because the characters are not printable.
JOINERS = ("\u200c", "\u200d")


class OrderedKeys(_Base):
    """A mixin for widgets in which the user types. The widget runs the binding of a key before the widget
    handles the next key. Put the mixin before the widget in the list of base classes."""

    async def _on_key(self, event: Key) -> None:
        """Run the key's binding now, of this widget or of its parents. A joiner replaces the selected text.
        Textual calls the method of each base class, so this one does not call the next."""
        if event.character in JOINERS:
            widget: Any = self  # an Input or a TextArea; each has `replace` and `selection`
            widget.replace(event.character, *sorted(widget.selection))
        elif event.is_printable or not await self.app._check_bindings(event.key):
            return
        event.stop()
        event.prevent_default()


class OrderedInput(OrderedKeys, Input):
    """A field of one line, whose keys keep their order."""
