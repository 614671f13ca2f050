"""This module parses typed keys only as fast as the app handles them.

Without this module, Textual turns each key into a message at once. A paste of very many keys would fill the
app's message queue, which has no limit, and a signal that ends the app would wait behind these messages. So
this module keeps keys as text until the app's queue has room.
"""

import asyncio
import fcntl
import os
import selectors
import struct
import sys
import termios
import time
from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import Any

from textual import constants
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

from ruvmlx.text import Sanitizer

from .prompt import MAX_MESSAGE_CHARACTERS

# while more than this number of messages wait in the app's queues, `Keyboard` passes no keys to the app
WAITING = 4
PIECE = 4  # number of typed characters that the parser gets at a time
PASTE_PIECE = 4096  # number of pasted characters that the parser gets at a time
BUSY_PAUSE = 0.002  # seconds until the next check whether a busy app has become free
TURN = 0.01  # the maximum number of seconds of parsing before the app does other work
# while more than this number of characters wait for the parser, the module does not read the terminal
UNREAD = 1 << 16
_PASTE, _END = "\x1b[200~", "\x1b[201~"
_ESCAPE = constants.ESCAPE_DELAY + 0.001  # seconds after which a lone ESC byte is the Esc key


class Keyboard:
    """The keys of the terminal: the object holds the typed text and parses it in the app's thread. The thread
    that reads the terminal uses only the property `unread`."""

    def __init__(self, app: App, process: Callable[[Message], None]):
        """process: a function that the object calls with each message of the parser."""
        self._app, self._process = app, process
        self._parser, self._decoder = XTermParser(), getincrementaldecoder("utf-8")("replace")
        self._typed, self._last = "", ""  # the unparsed text; the last parsed characters outside a paste
        self._pasted: int | None = None  # number of parsed characters of the open paste; None: no paste
        self._sanitizer = Sanitizer()  # the sanitiser of the open paste
        self._is_going = False

    @property
    def unread(self) -> int:
        """The number of typed characters that the parser has not parsed yet."""
        return len(self._typed)

    def feed(self, data: bytes) -> None:
        """Take the bytes that the terminal sent, and parse them when the app is free."""
        self._typed += self._decoder.decode(data)
        if not self._is_going:
            self._go_on()

    def _go_on(self) -> None:
        loop, until = asyncio.get_running_loop(), time.monotonic() + TURN
        self._is_going = False
        if getattr(self._app, "ended_by", 0):  # a signal ends the app, so the app drops the keys
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
        """Return the next piece of typed text for the parser, or "" if more bytes of the terminal must arrive
        first."""
        if self._pasted is not None:
            return self._next_of_paste()
        begun = (self._last + self._typed[:PIECE]).find(_PASTE)
        size = PIECE if begun < 0 else begun + len(_PASTE) - len(self._last)
        piece, self._typed = self._typed[:size], self._typed[size:]
        self._last = (self._last + piece)[1 - len(_PASTE) :]
        if begun >= 0:
            self._pasted, self._last, self._sanitizer = 0, "", Sanitizer()
        return piece

    def _next_of_paste(self) -> str:
        """Return a piece of the pasted text, or the escape sequence that ends the paste. The parser gets at
        most MAX_MESSAGE_CHARACTERS + 1 characters of a paste, so that the input can see that the paste is too
        long. The method drops all further characters of the paste.

        The parser gets no escape sequence and no control character of the paste: it would take them for keys,
        and pass on the text after them before the text in front of them.
        """
        assert self._pasted is not None
        end = self._typed.find(_END)
        if end == 0:
            self._typed, self._pasted = self._typed[len(_END) :], None
            return _END
        # If the text has no _END, the text's last characters can be the first characters of an _END.
        whole = end if end > 0 else max(0, len(self._typed) - len(_END) + 1)
        room = MAX_MESSAGE_CHARACTERS + 1 - self._pasted
        size = min(whole, PASTE_PIECE) if room > 0 else whole
        piece, self._typed = self._typed[: min(size, room)], self._typed[size:]
        self._pasted += len(piece)
        return self._sanitizer.feed(piece) or (self._next_piece() if size else "")


class TerminalDriver(LinuxDriver):
    """The Textual driver of this process's terminal. The driver reads keys only as fast as the app handles
    them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # the number of bytes that the terminal got before it sent single keys, and that nobody has read yet
        self._early_bytes = 0
        # Textual draws on the standard error stream, which can be a file (`chat 2>FILE`)
        if sys.__stdout__ and not (sys.__stderr__ and sys.__stderr__.isatty()):
            self._file = sys.__stdout__

    def send_message(self, message: Message) -> None:
        send_now(self, message)

    def start_application_mode(self) -> None:
        """Count the bytes of the lines that the user typed before this call. Then let Textual put the
        terminal into the mode in which each key is sent at once. Before this change of the mode, the terminal
        makes the byte of Ctrl+J of each Enter key. The count says which bytes of Ctrl+J were Enter keys."""
        self._early_bytes = early_bytes(self.fileno)
        super().start_application_mode()

    def run_input_thread(self) -> None:
        """Read the terminal until the app ends. Textual runs this method in a separate thread."""
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
                    early, self._early_bytes = self._early_bytes, max(0, self._early_bytes - len(data))
                    data = data[:early].replace(b"\n", b"\r") + data[early:]
                    self._loop.call_soon_threadsafe(keyboard.feed, data)


def early_bytes(fileno: int) -> int:
    """Return the number of bytes of the whole lines that a terminal has and that nobody has read. Return 0 if
    the terminal does not turn the Enter key (carriage return) into a newline."""
    try:
        iflag, _, _, lflag, *_ = termios.tcgetattr(fileno)
        if not (iflag & termios.ICRNL and lflag & termios.ICANON):
            return 0
        return struct.unpack("i", fcntl.ioctl(fileno, termios.FIONREAD, bytes(4)))[0]
    except (termios.error, OSError):  # this is no terminal
        return 0


def send_now(driver: Driver, message: Message) -> None:
    """Put a message into the app's queue at once, so that the queue's size includes it. Textual's own drivers
    add a message only in a later turn of the event loop."""
    driver._app.post_message(message)
