"""A process on a pseudo-terminal."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

from ruvmlx.text import Sanitizer


class Terminal:
    """Reads the process's output as plain text, without escape sequences.

    `expect` searches only the output after the last match.
    """

    def __init__(self, argv, size=(80, 24), cwd=None, **environment):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(environment, TERM="xterm-256color")
            if cwd is not None:
                os.chdir(cwd)
            os.execvp(argv[0], argv)
        self.resize(*size)
        self.raw = bytearray()
        self._seen, self._looked_at = "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._plain = Sanitizer()

    @property
    def seen(self):
        """The output since the last match. It is decoded only here, because it can be much."""
        fresh, self._looked_at = bytes(self.raw[self._looked_at :]), len(self.raw)
        self._seen += self._plain.feed(self._decoder.decode(fresh))
        return self._seen

    def resize(self, columns, rows):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def attributes(self):
        """Echo, lines, signals ..., as the process has set them."""
        return termios.tcgetattr(self.fd)

    def send(self, text):
        os.write(self.fd, text.encode())

    def expect(self, pattern, seconds=600):
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"{pattern!r} not in {self.seen[-3000:]!r}"
            assert self._read(), f"it ended without {pattern!r}: {self.seen[-3000:]!r}"
        self._seen = self._seen[match.end() :]
        return match

    def wait(self, seconds=600):
        """The exit code."""
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, "it does not end"
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self):
        """Read the available output; False once the process has closed the terminal."""
        if not select.select([self.fd], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return False
        self.raw += data
        return bool(data)
