"""This module runs a program on a pseudo-terminal, sends keys to the program, and records the program's
output with its times."""

import fcntl
import os
import pty
import random
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from typing import Any, Self

from ruvmlx.errors import RuvmlxError

SIZE = 100, 30  # the numbers of columns and rows of the terminal
# Letters that are one cell wide and that an English reply does not contain. So the echo of a key differs from
# other output.
LETTERS = "".join(chr(c) for c in range(0x100, 0x180) if c not in (0x149, 0x17F))
AT_ONCE = 30  # the maximum number of letters in the input line
_SEQUENCE = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|[\]P_^X][^\x07\x1b]*(\x07|\x1b\\)|[ -/]*[0-~])")


class PseudoTerminal:
    """A program on a pseudo-terminal. arrived: all output of the program so far, as pairs (time.monotonic(),
    bytes)."""

    def __init__(self, argv: Sequence[str], environment: dict[str, str]):
        self._fd, inside = pty.openpty()
        columns, rows = SIZE
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            argv,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env=os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"} | environment,
        )
        os.close(inside)
        self.arrived: list[tuple[float, bytes]] = []
        self._unread = b""  # the output since the last match of `wait_for`, or since `watch` or `quiet`

    def send(self, text: str) -> float:
        """Send the text as keys to the program. Return the time.monotonic() at which the text was sent."""
        at = time.monotonic()
        os.write(self._fd, text.encode())
        return at

    def wait_for(self, pattern: str, seconds: float = 120) -> float:
        """Wait until the output since the last match, or since `watch` or `quiet`, contains this pattern (a
        regular expression). Return the time.monotonic() at which the matching output arrived."""
        wanted, deadline = re.compile(pattern.encode()), time.monotonic() + seconds
        while not (match := wanted.search(plain := _SEQUENCE.sub(b"", self._unread))):
            if time.monotonic() > deadline or not self._read(deadline):
                said = plain[-300:].decode(errors="replace")
                raise RuvmlxError(f"the chat did not show {pattern!r}; the last it showed is {said!r}")
        self._unread = plain[match.end() :]
        return self.arrived[-1][0]

    def watch(self, seconds: float) -> None:
        """Record output for `seconds` seconds. `wait_for` does not match this output later."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._read(deadline):
            pass
        self._unread = b""

    def quiet(self, seconds: float = 0.1, most: float = 3.0) -> None:
        """Wait until the program has written nothing for `seconds` seconds. most: the maximum time of the
        wait in seconds, because a blinking cursor is output, too."""
        deadline = time.monotonic() + most
        while select.select([self._fd], [], [], seconds)[0] and time.monotonic() < deadline:
            if not self._read(time.monotonic()):
                break
        self._unread = b""

    def _read(self, until: float) -> bool:
        """Read the available output, or wait for output until the time.monotonic() `until`. Return False if
        the program has ended."""
        if not select.select([self._fd], [], [], max(0.0, until - time.monotonic()))[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # on Linux, this error means that the program has closed the terminal
            data = b""
        self.arrived.append((time.monotonic(), data))
        self._unread = (self._unread + data)[-(1 << 16) :]
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def _take_terminal() -> None:
    """Make standard input the controlling terminal of the program. So the program gets SIGHUP when the
    terminal closes, even if the benchmark's process was killed."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Typist:
    """An object that types letters and waits for the echo of each letter. took: the ms from each key to its
    echo."""

    def __init__(self, terminal: PseudoTerminal):
        self._terminal = terminal
        self._rng = random.Random(0)
        self._in_line = 0
        self.took: list[float] = []

    def type(self, pause: float) -> None:
        """Type a letter after a random pause of 0.5 to 1.5 times `pause` seconds. The pause is random, so
        that keys do not always come at the same moment within a frame of the app."""
        self._terminal.watch(pause * (0.5 + self._rng.random()))
        letter = LETTERS[len(self.took) % len(LETTERS)]
        sent = self._terminal.send(letter)
        self.took.append((self._terminal.wait_for(letter, 30) - sent) * 1e3)
        self._in_line += 1

    def make_room(self, at: int = AT_ONCE) -> None:
        """Empty the program's input line if the line has `at` or more letters."""
        if self._in_line >= at:
            self._in_line = 0
            self._terminal.send("\x15")  # Ctrl+U empties the line
            self._terminal.watch(0.1)
