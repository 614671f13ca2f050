"""This module sets the modes that the app needs on the client's terminal: raw input, reports of the mouse and
of pastes, and the alternate screen.

The app in the server never changes these modes. So the client can restore the modes of the terminal without
the server, even if the server fails.
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

_MODES = (1000, 1003, 1015, 1006, 1004, 2004)  # four mouse modes, focus reports, bracketed paste
_KITTY_KEYS = 1 | 8 | 16  # flags of the kitty protocol: report every key as its own code, with its text
# This text turns on the alternate screen and the modes of `_MODES`, hides the cursor, and turns off line
# wrap. `enter` also asks the terminal whether it knows synchronised updates (mode 2026).
_ENTER = "\x1b[?1049h" + "".join(f"\x1b[?{mode}h" for mode in _MODES) + "\x1b[?25l\x1b[?7l"
_LEAVE = (
    # end a synchronised update (a frame that the terminal shows at once), because the app's last frame can be
    # incomplete
    "\x1b[?2026l"
    + "".join(f"\x1b[?{mode}l" for mode in reversed(_MODES))
    + "\x1b[?7h\x1b[<u\x1b[?1049l\x1b[?25h\x1b[0m"
)


def _raw(attributes: list[Any]) -> list[Any]:
    """Return the terminal's attributes without echo, line mode, signal keys and flow control, so that every
    typed byte goes to the app."""
    raw = [*attributes[: tty.CC], [*attributes[tty.CC]]]
    raw[tty.LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
    raw[tty.IFLAG] &= ~(termios.IXON | termios.IXOFF | termios.ICRNL | termios.INLCR | termios.IGNCR)
    raw[tty.CC][termios.VMIN], raw[tty.CC][termios.VTIME] = 1, 0
    return raw


class Terminal:
    """The terminal at standard input and output. In a `with` block, the terminal has the modes that the app
    needs."""

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
        """Set the modes of the terminal that the app needs."""
        self._entered = True
        termios.tcsetattr(self.keys, termios.TCSANOW, _raw(self._before))
        sequences = _ENTER
        if os.environ.get("TEXTUAL_DISABLE_KITTY_KEY") != "1":
            sequences += f"\x1b[>{_KITTY_KEYS}u"
        # Apple's terminal does not know the question about mode 2026 and would print its last letter, "p"
        if os.environ.get("TERM_PROGRAM") != "Apple_Terminal":
            sequences += "\x1b[?2026$p"
        self.write(sequences.encode())

    def leave(self) -> None:
        """Restore the modes of the terminal, and drop keys that the user typed for the app. If the terminal
        is gone, do nothing."""
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
        """The terminal's size as (columns, rows). If the terminal does not report its size, the size is (80,
        24)."""
        try:
            found = fcntl.ioctl(self._screen, termios.TIOCGWINSZ, b"\0" * 8)
            rows, columns, _, _ = struct.unpack("HHHH", found)
        except OSError:
            rows = columns = 0
        return (columns or 80, rows or 24)
