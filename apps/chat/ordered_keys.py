"""This module keeps the order of keys that arrive at once, for example from a slow connection, or while a
long frame is drawn.

Textual runs a key's binding only after the key has bubbled from the focused widget to the app. Meanwhile the
widget has inserted the letters that follow: "teh", two Backspaces and "he" would leave "t".
"""

from typing import TYPE_CHECKING

from textual.events import Key
from textual.widget import Widget
from textual.widgets import Input

if TYPE_CHECKING:
    _Base = Widget
else:  # do not subclass Widget here, because Textual's CSS would take this mixin as the base class
    _Base = object


class OrderedKeys(_Base):
    """A mixin for widgets in which the user types. The widget runs the binding of a key before the widget
    handles the next key. Put the mixin before the widget in the list of base classes."""

    async def _on_key(self, event: Key) -> None:
        """Run the key's binding now, of this widget or of its parents. Textual calls the method of each base
        class, so this one does not call the next."""
        if not event.is_printable and await self.app._check_bindings(event.key):
            event.stop()
            event.prevent_default()


class OrderedInput(OrderedKeys, Input):
    """A field of one line, whose keys keep their order."""
