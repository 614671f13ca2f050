"""What is typed, parsed at the app's pace.

Textual makes a message of each key at once. A flood of keys would fill the app's queue, which has no limit,
and a signal to end would wait behind them. Here what the app has not parsed waits as text.
"""

import asyncio
import os
import selectors
import time
from codecs import getincrementaldecoder
from collections.abc import Callable

from textual import constants
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

from .prompt import MAX_MESSAGE_CHARACTERS

WAITING = 4  # messages; an app in which more wait gets no keys
PIECE = 4  # characters that are parsed together
PASTE_PIECE = 4096
BUSY_PAUSE = 0.002  # seconds until the next look at a busy app
TURN = 0.01  # seconds of parsing, then the app's other work has its turn
UNREAD = 1 << 16  # characters: while more wait, nothing is read from the terminal
_PASTE, _END = "\x1b[200~", "\x1b[201~"
_ESCAPE = constants.ESCAPE_DELAY + 0.001  # seconds after which a lone ESC is the key


class Keyboard:
    """Lives in the app's thread."""

    def __init__(self, app: App, process: Callable[[Message], None]):
        """process: takes each message of the parser."""
        self._app, self._process = app, process
        self._parser, self._decoder = XTermParser(), getincrementaldecoder("utf-8")("replace")
        self._typed, self._last = "", ""  # not parsed yet; the last characters that were, outside a paste
        self._pasted: int | None = None  # characters of the paste that has begun; None: there is none
        self._is_going = False

    @property
    def unread(self) -> int:
        """Characters that wait."""
        return len(self._typed)

    def feed(self, data: bytes) -> None:
        """Bytes that the terminal sent."""
        self._typed += self._decoder.decode(data)
        if not self._is_going:
            self._go_on()

    def _go_on(self) -> None:
        loop, until = asyncio.get_running_loop(), time.monotonic() + TURN
        self._is_going = False
        if getattr(self._app, "ended_by", 0):  # a signal, or a terminal that is gone: no key matters any more
            self._typed = ""
            return
        while not self._app_is_busy() and (piece := self._next_piece()):
            for message in self._parser.feed(piece):
                self._process(message)
            if time.monotonic() > until:
                break
        else:
            if not self._app_is_busy():
                loop.call_later(_ESCAPE, self._tick)
                return
        self._is_going = True
        loop.call_later(BUSY_PAUSE, self._go_on)

    def _tick(self) -> None:
        for message in self._parser.tick():
            self._process(message)

    def _app_is_busy(self) -> bool:
        stack = self._app._screen_stack if self._app.is_running else []
        queues = [self._app, *stack, *(screen.focused for screen in stack if screen.focused)]
        return sum(queue.message_queue_size for queue in queues) > WAITING

    def _next_piece(self) -> str:
        """What the parser gets next; "" if it needs more bytes."""
        if self._pasted is not None:
            return self._next_of_paste()
        begun = (self._last + self._typed[:PIECE]).find(_PASTE)
        size = PIECE if begun < 0 else begun + len(_PASTE) - len(self._last)
        piece, self._typed = self._typed[:size], self._typed[size:]
        self._last = (self._last + piece)[1 - len(_PASTE) :]
        if begun >= 0:
            self._pasted, self._last = 0, ""
        return piece

    def _next_of_paste(self) -> str:
        """A piece of the paste, or its end. One character more than MAX_MESSAGE_CHARACTERS is kept,
        so that the input can tell; the rest is dropped."""
        assert self._pasted is not None
        end = self._typed.find(_END)
        if end == 0:
            self._typed, self._pasted = self._typed[len(_END) :], None
            return _END
        whole = end if end > 0 else max(0, len(self._typed) - len(_END) + 1)  # the rest may begin the end
        room = MAX_MESSAGE_CHARACTERS + 1 - self._pasted
        size = min(whole, PASTE_PIECE) if room > 0 else whole
        piece, self._typed = self._typed[: min(size, room)], self._typed[size:]
        self._pasted += len(piece)
        return piece or (self._next_piece() if size else "")


class TerminalDriver(LinuxDriver):
    """The driver of this process's terminal. It reads keys only as fast as the app handles them."""

    def send_message(self, message: Message) -> None:
        send_now(self, message)

    def run_input_thread(self) -> None:
        """Read what is typed until the app ends. In a thread of its own."""
        keyboard = Keyboard(self._app, self.process_message)
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if keyboard.unread > UNREAD:
                    self.exit_event.wait(BUSY_PAUSE)
                elif selector.select(0.1):
                    data = os.read(self.fileno, 4096)
                    if not data:
                        return
                    self._loop.call_soon_threadsafe(keyboard.feed, data)


def send_now(driver: Driver, message: Message) -> None:
    """Put a message into the app's queue at once, so that it counts; Textual's drivers need a turn of the
    loop for it."""
    driver._app.post_message(message)
