"""This module is a Textual driver for a terminal at the other end of a connection. Keys arrive from the
connection, and the app's frames go to the connection.

The client sets the terminal's modes (terminal.py), so this driver writes only the frames of the app.
"""

from typing import Any

from textual import events
from textual.app import App
from textual.driver import Driver
from textual.geometry import Size
from textual.message import Message

from ..chat.keyboard import Keyboard, send_now
from .connection import Outbox


class AttachedDriver(Driver):
    """A driver that uses a connection as its terminal. Only the app's thread uses the driver."""

    def __init__(self, app: App[Any], outbox: Outbox, **settings: Any) -> None:
        super().__init__(app, **settings)
        self._outbox, self._drawn = outbox, list[str]()
        self.keyboard = Keyboard(app, self.process_message)

    def start_application_mode(self) -> None:
        assert self._size is not None, "run the app with a size"
        self.resize(self._size)

    def disable_input(self) -> None:
        """Do nothing, because the client closes the connection after the app has ended."""

    def stop_application_mode(self) -> None:
        self.flush()

    def write(self, data: str) -> None:
        if not self._drawn:
            self._loop.call_soon(self.flush)  # some writes, for example a bell, have no flush by Textual
        self._drawn.append(data)

    def flush(self) -> None:
        drawn, self._drawn = "".join(self._drawn), []
        if drawn:
            self._outbox.put(drawn.encode("utf-8", "replace"))

    def send_message(self, message: Message) -> None:
        send_now(self, message)

    def resize(self, size: tuple[int, int]) -> None:
        """Set the terminal's size (columns, rows), and draw the whole screen."""
        self._size = size
        self.send_message(events.Resize(Size(*size), Size(*size)))
        self._app.call_later(self._app.refresh, layout=True)

    def open_url(self, url: str, new_tab: bool = True) -> None:
        """Do nothing. A browser would open on the server's screen, and not on the user's."""
