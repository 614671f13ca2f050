"""This module reads the lines and writes the words of plain mode."""

import contextlib
import errno
import re
import sys
from typing import TextIO

from ruvmlx.errors import UsageError
from ruvmlx.text import sanitize

from ..wrapping import wrap_for
from .errors import chat_error_line
from .interrupts import Interrupts

# the maximum number of characters of an input line; a longer line does not fit into the context of most
# models
MAX_LINE_CHARACTERS = 1 << 20
# The number of bytes of a line that a terminal keeps. The system drops further bytes up to the end of the
# line, and does not tell the program (MAX_CANON of macOS, N_TTY_BUF_SIZE of Linux, less 1 for the newline).
TERMINAL_LINE_BYTES = 1023 if sys.platform == "darwin" else 4095
_INSTEAD = "Nothing was sent. Put the text into a file, and name it as @FILE."
CUT = f"the terminal passes at most {TERMINAL_LINE_BYTES:,} bytes of a line, and has cut this one. {_INSTEAD}"
TOO_LONG = f"a line is over {MAX_LINE_CHARACTERS:,} characters, which is too long to read. {_INSTEAD}"


# what a terminal sends for a key without a character, such as an arrow or F1 (ESC O P, ESC [ 11 ~, ESC [ [ A)
_KEY = re.compile(r"\x1b(?:O[0-9;]*[A-Za-z]|\[\[[A-E]|\[[0-9;]*[A-Za-z~])")
_F1 = ("\x1bOP", "\x1b[11~", "\x1b[[A", "\x1b[P")
NO_KEYS = "Plain mode has no keys of its own; /help lists the commands."


def without_keys(line: str) -> tuple[str, str]:
    """Return (the line without the codes of keys that a terminal has put into it, a line for the user). The
    second line is NO_KEYS if the user pressed keys and typed no words, and else "". F1 alone is /help."""
    words, keys = _KEY.sub("", line), _KEY.findall(line)
    if not keys or words.strip():
        return words, ""
    return ("/help", "") if keys[-1] in _F1 else ("", NO_KEYS)


class PlainStreams:
    """The input and the output of plain mode: the object reads lines from `source` and writes words to
    `sink`. `closed` is True once the output has no reader any more."""

    def __init__(self, source: TextIO, sink: TextIO, interrupts: Interrupts) -> None:
        self._source, self._sink, self._interrupts = source, sink, interrupts
        self.interactive = source.isatty()
        self.closed = False
        self.failure = 0  # the exit code of the first error; 0: no error

    def read(self, prompt: str = "You: ") -> str | None:
        """Return the next line of the input. In place of a line that is too long, or that the terminal has
        cut, write an error and return an empty line. Return None at the end of the input, on Ctrl-C, and
        after the terminal was closed."""
        if self.interactive:
            self.write(prompt, self._sink if self._sink.isatty() else sys.stderr)
        try:
            with self._interrupts.raising():
                if self.interactive:
                    self._interrupts.wait_for_line(self._source)
                line = self._source.readline(MAX_LINE_CHARACTERS + 1)
                if len(line) > MAX_LINE_CHARACTERS:
                    self._skip_line(line)
                    self.complain(UsageError(TOO_LONG))
                    return "\n"
                if self._is_cut(line):
                    self.complain(UsageError(CUT))
                    return "\n"
        except (KeyboardInterrupt, OSError):
            line = ""
        if not line and self.interactive:
            self.print("")
        return line or None

    def _is_cut(self, line: str) -> bool:
        """Return True if the line is as long as a terminal allows, because its end is probably missing."""
        return self.interactive and len(line.rstrip("\n").encode(errors="replace")) >= TERMINAL_LINE_BYTES

    def _skip_line(self, line: str) -> None:
        while line and not line.endswith("\n"):
            line = self._source.readline(MAX_LINE_CHARACTERS)

    def print(self, text: str) -> None:
        """Write a message of the chat. This method does not break long lines, because the terminal breaks
        them."""
        self.write(sanitize(text) + "\n")

    def tell(self, text: str) -> None:
        """Write sentences of the program. On a terminal, this method breaks long lines between words."""
        self.write(wrap_for(sanitize(text), self._sink) + "\n")

    def write(self, text: str, where: TextIO | None = None) -> None:
        """Write text to the output. If a write fails, for example because the output has no reader any more,
        stop the reply and write nothing more."""
        if self.closed:
            return
        try:
            (where or self._sink).write(text)
            (where or self._sink).flush()
        except OSError as error:
            self.closed = True
            self._interrupts.stop()
            # report any other error, for example of a full disk
            if error.errno not in (errno.EPIPE, errno.EIO):
                self.complain(error)

    def complain(self, error: Exception) -> None:
        self.failure = self.failure or getattr(error, "exit_code", 1)
        self.note(f"ruvmlx: {chat_error_line(error)}")

    @staticmethod
    def note(line: str) -> None:
        """Write a line to stderr, because stdout is for replies and for the answers of commands."""
        with contextlib.suppress(OSError):  # `print` raises OSError if stderr has no reader
            print(line, file=sys.stderr, flush=True)
