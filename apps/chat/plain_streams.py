"""The streams of the linear chat: lines in, words out."""

import contextlib
import errno
import sys
from typing import TextIO

from ruvmlx.errors import UsageError, error_line
from ruvmlx.text import sanitize

from .interrupts import Interrupts

MAX_LINE_CHARACTERS = 1 << 20  # characters of a line; no context is that long


class PlainStreams:
    """Reads lines and writes words. `closed`: nobody reads the output any more."""

    def __init__(self, source: TextIO, sink: TextIO, interrupts: Interrupts) -> None:
        self._source, self._sink, self._interrupts = source, sink, interrupts
        self.interactive = source.isatty()
        self.closed = False
        self.failure = 0  # the first error's exit code

    def read(self, prompt: str = "You: ") -> str | None:
        """The next line; None at the end of input, on Ctrl-C, and after the terminal was closed."""
        if self.interactive:
            self.write(prompt, self._sink if self._sink.isatty() else sys.stderr)
        try:
            with self._interrupts.raising():
                line = self._source.readline(MAX_LINE_CHARACTERS + 1)
                if len(line) > MAX_LINE_CHARACTERS:
                    self._skip_line(line)
                    self.complain(
                        UsageError(f"a line is over {MAX_LINE_CHARACTERS} characters, too long to read.")
                    )
                    return "\n"
        except (KeyboardInterrupt, OSError):
            line = ""
        if not line and self.interactive:
            self.print("")
        return line or None

    def _skip_line(self, line: str) -> None:
        while line and not line.endswith("\n"):
            line = self._source.readline(MAX_LINE_CHARACTERS)

    def print(self, text: str) -> None:
        self.write(sanitize(text) + "\n")

    def write(self, text: str, where: TextIO | None = None) -> None:
        """Write text. If nobody reads it any more, stop the reply, keep it, and write nothing from then
        on."""
        if self.closed:
            return
        try:
            (where or self._sink).write(text)
            (where or self._sink).flush()
        except OSError as error:
            self.closed = True
            self._interrupts.stop()
            if error.errno not in (errno.EPIPE, errno.EIO):  # for example a full disk
                self.complain(error)

    def complain(self, error: Exception) -> None:
        self.failure = self.failure or getattr(error, "exit_code", 1)
        self.note(f"ruvmlx: {error_line(error)}")

    @staticmethod
    def note(line: str) -> None:
        """Write to stderr: stdout is for replies."""
        with contextlib.suppress(OSError):  # nobody reads it
            print(line, file=sys.stderr, flush=True)
