"""The client's terminal while the app is on it: raw, with mouse and paste reports, on the other screen.

The app itself never changes these modes, so the client alone restores them, whatever happens to the server.
"""

import contextlib
import fcntl
import os
import struct
import sys
import termios
import tty
from typing import Any, Self

from .wire import Size

_MODES = (1000, 1003, 1015, 1006, 1004, 2004)  # mouse in four forms, focus, bracketed paste
_KITTY_KEYS = 1 | 8 | 16  # distinguish all keys, and report the text that they type
# Other screen, modes, no cursor, no wrapping; then: does it know synchronised updates (2026)?
_ENTER = "\x1b[?1049h" + "".join(f"\x1b[?{mode}h" for mode in _MODES) + "\x1b[?25l\x1b[?7l"
_LEAVE = (
    "\x1b[?2026l"  # a frame may have been cut
    + "".join(f"\x1b[?{mode}l" for mode in reversed(_MODES))
    + "\x1b[?7h\x1b[<u\x1b[?1049l\x1b[?25h\x1b[0m"
)


def _raw(attributes: list[Any]) -> list[Any]:
    """The terminal's attributes without echo, lines, signals and flow control: each byte goes to the app."""
    raw = [*attributes[: tty.CC], [*attributes[tty.CC]]]
    raw[tty.LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
    raw[tty.IFLAG] &= ~(termios.IXON | termios.IXOFF | termios.ICRNL | termios.INLCR | termios.IGNCR)
    raw[tty.CC][termios.VMIN], raw[tty.CC][termios.VTIME] = 1, 0
    return raw


class Terminal:
    """Standard input and output. In a `with` block they are the app's."""

    def __init__(self) -> None:
        self.keys, self._screen = sys.stdin.fileno(), sys.stdout.fileno()
        self._before = termios.tcgetattr(self.keys)
        self._entered = False

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Hand the terminal to the app."""
        self._entered = True
        termios.tcsetattr(self.keys, termios.TCSANOW, _raw(self._before))
        sequences = _ENTER
        if os.environ.get("TEXTUAL_DISABLE_KITTY_KEY") != "1":
            sequences += f"\x1b[>{_KITTY_KEYS}u"
        if os.environ.get("TERM_PROGRAM") != "Apple_Terminal":  # it would show a "p"
            sequences += "\x1b[?2026$p"
        self.write(sequences.encode())

    def leave(self) -> None:
        """Restore the terminal; drop what was typed for the app. Does nothing if the terminal is gone."""
        if not self._entered:
            return
        self._entered = False
        with contextlib.suppress(OSError):
            self.write(_LEAVE.encode())
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self.keys, termios.TCSAFLUSH, self._before)

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._screen, data) :]

    @property
    def size(self) -> Size:
        """Columns and rows; 80 and 24 if the terminal does not know."""
        try:
            found = fcntl.ioctl(self._screen, termios.TIOCGWINSZ, b"\0" * 8)
            rows, columns, _, _ = struct.unpack("HHHH", found)
        except OSError:
            rows = columns = 0
        return (columns or 80, rows or 24)
