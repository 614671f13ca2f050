"""This module connects rank 0 with the other ranks over TCP, and notices within seconds that a rank is lost.

MLX's own connection carries the sums of each layer, and this connection all else. Each end sends a beat every
BEAT seconds. If nothing comes for SILENCE seconds, or if the connection closes, the other end is lost, and
`PeerLink.lost` has the reason. The next step then raises PeerLost. A step that runs can wait for ever: after
a lost connection, MLX 0.32 fails the sums that it has begun and never ends the later ones (ring.cpp, where
the worker returns). So the process ends itself, with one line. The store is whole at any moment.
"""

import contextlib
import faulthandler
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from ...errors import RuvmlxError
from ...platform.mx import mx
from . import messages, place

BEAT, SILENCE = 1.0, 8.0
# Seconds in which MLX must connect all ranks. JOIN is for the ring. SLOW_JOIN is for MPI and jaccl, which
# prepare their devices first.
JOIN, SLOW_JOIN = SILENCE + 2.0, 60.0
GRACE = 0.5  # seconds from the loss of a rank until the process ends if MLX still waits for the rank
_CHECK = "Check the firewall of each machine, and start `ruvmlx launch` again."


def installed_versions() -> str:
    """Return the versions that all ranks must share."""
    return f"ruvmlx {version('ruvmlx')} with MLX {version('mlx')}"


class PeerLost(RuvmlxError):
    """Another rank has ended, or the connection to it is broken."""


class PeerLink:
    """A connection to another rank. name: the rank and the machine, for people. A thread reads the messages,
    another thread sends beats."""

    def __init__(self, sock: socket.socket, name: str, on_loss: Callable[["PeerLink"], None]):
        self._sock, self.name, self._on_loss = sock, name, on_loss
        self.lost = ""  # why the other end is lost; "": it is there
        self._is_refusal = False  # True if `lost` is a whole line: rank 0 refused this rank
        self.ended = False  # True if the other end said that it ends
        self._sending, self._closed = threading.Lock(), threading.Event()
        self._inbox: queue.SimpleQueue[tuple[dict[str, Any], bytes] | None] = queue.SimpleQueue()
        sock.settimeout(SILENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for work in (self._read, self._beat):
            threading.Thread(target=work, name="ruvmlx-peer", daemon=True).start()

    def send(self, facts: dict[str, Any], data: bytes = b"") -> None:
        rest = memoryview(messages.encode(facts, data))
        try:
            with self._sending:
                while rest:  # each call has its own time limit, which a long message may exceed as a whole
                    rest = rest[self._sock.send(rest) :]
        except OSError as error:
            self._lose(_reason(error))
        self.check()

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message. Raise PeerLost if the other end is lost."""
        found = self._inbox.get()
        if found is None:
            self._inbox.put(None)
            self.check()
            raise PeerLost(f"{self.name} has ended.")
        return found

    def check(self) -> None:
        if self.lost:
            raise PeerLost(self.line)

    @property
    def line(self) -> str:
        if self._is_refusal:
            return self.lost
        return f"{self.name} is lost: {self.lost.rstrip('.')}. Start `ruvmlx launch` again."

    def close(self, goodbye: bool = True) -> None:
        """End the connection. goodbye: tell the other end, which else would report a loss."""
        if not self._closed.is_set():
            if goodbye:
                with contextlib.suppress(RuvmlxError):
                    self.send({"do": "end"})
            self._closed.set()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT) and not self.lost:
            with contextlib.suppress(RuvmlxError):
                self.send({"do": "beat"})

    def _read(self) -> None:
        try:
            while True:
                facts, data = messages.read(self._sock)
                if facts.get("do") == "end":
                    self.ended = True
                    break
                if facts.get("do") in ("failed", "refused"):
                    self._is_refusal = facts["do"] == "refused"
                    self._lose(str(facts["line"]))
                    break
                if facts.get("do") != "beat":
                    self._inbox.put((facts, data))
        except (OSError, EOFError, RuvmlxError) as error:
            self._lose(_reason(error))
        self._inbox.put(None)

    def _lose(self, why: str) -> None:
        if not self.lost and not self._closed.is_set() and not self.ended:
            self.lost = why
            self._on_loss(self)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it sent nothing for {SILENCE:.0f} seconds"
    if isinstance(error, EOFError | ConnectionError):
        return "its process has ended, or the cable is out"
    return " ".join(str(error).split()) or type(error).__name__


class PeerLinks:
    """The links of this process. Only one thread at a time sends messages with `tell` and `ask`."""

    # True: the loss of a rank ends this process also between two steps, and so does a step after which the
    # ranks are out of step. Otherwise a server answers each later request with an error, and no other program
    # starts the server again.
    ends_when_idle = False

    def __init__(self) -> None:
        self.links: list[PeerLink] = []
        self.group: mx.distributed.Group | None = None  # MLX's connection of all ranks
        self._working = 0  # the number of running steps
        self._first_loss = threading.Event()
        self.broken = ""  # why the ranks are out of step; "": they are not
        # (kind, number) of deleted models and caches, of which the other ranks do not know yet; the garbage
        # collector deletes them at any moment
        self.dropped: deque[tuple[str, int]] = deque()

    def add(self, sock: socket.socket, name: str) -> PeerLink:
        link = PeerLink(sock, name, self._note_loss)
        self.links.append(link)
        return link

    def tell(self, facts: dict[str, Any], data: bytes = b"") -> None:
        self.check()
        if dropped := [self.dropped.popleft() for _ in range(len(self.dropped))]:
            facts = facts | {"dropped": dropped}
        for link in self.links:
            link.send(facts, data)

    def ask(self, facts: dict[str, Any], data: bytes = b"") -> list[tuple[dict[str, Any], bytes]]:
        """Send a message and return the answer of each rank, in order."""
        self.tell(facts, data)
        return [link.receive() for link in self.links]

    def check(self) -> None:
        for link in self.links:
            link.check()
        if self.broken:
            raise PeerLost(self._broken_line())

    def _broken_line(self) -> str:
        return f"the machines are out of step: {self.broken}. Start `ruvmlx launch` again."

    def close(self) -> None:
        for link in self.links:
            link.close()

    def join(self, at: place.RankPlace) -> None:
        """Connect this rank with all other ranks for the sums. Raises RuvmlxError.

        MLX waits for ever for a rank that has ended. Meanwhile MLX holds the lock of the interpreter, so no
        other thread of Python runs. So a thread in C ends this process after JOIN or SLOW_JOIN seconds."""
        path, seconds = last_line_file(), JOIN if at.backend == "ring" else SLOW_JOIN
        if path is not None:
            path.write_text(f"the machines did not connect within {seconds:.0f} s. {_CHECK}")
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            try:
                self.group = mx.distributed.init(strict=True, backend=at.backend)
            except RuntimeError as error:
                self._first_loss.wait(BEAT)  # the other rank may have said why
                self.check()
                raise RuvmlxError(f"rank {at.rank} cannot connect: {error}. {_CHECK}") from None
            finally:
                faulthandler.cancel_dump_traceback_later()
                if path is not None:
                    path.unlink(missing_ok=True)

    @contextmanager
    def step(self, failures: type[BaseException] = BaseException) -> Iterator[None]:
        """In the `with` block, the ranks compute one step. After an exception of the class `failures`, the
        ranks can be at different tokens, so this method ends the connection. It raises PeerLost if a rank is
        lost."""
        self._working += 1
        try:
            yield
        except failures as error:
            self._break_off(error)
            if isinstance(error, Exception):  # else a signal ends this process
                self.check()
            raise
        finally:
            self._working -= 1

    def waiting(self) -> AbstractContextManager[None]:
        """In the `with` block, this rank waits for a result of MLX, whose errors are RuntimeErrors."""
        return self.step(RuntimeError)

    def _break_off(self, error: BaseException) -> None:
        if "peer" in str(error):
            self._first_loss.wait(BEAT)  # the reading thread knows the lost rank by name
        if not any(link.lost for link in self.links):
            self.broken = " ".join(str(error).split())[:120] or type(error).__name__
            if self.ends_when_idle and isinstance(error, Exception):  # else a signal ends this process
                self._end_soon(self._broken_line())
        for link in self.links:
            link.close(goodbye=False)

    def _note_loss(self, link: PeerLink) -> None:
        self._first_loss.set()
        if self._working or self.ends_when_idle:
            self._end_soon(link.line)

    def _end_soon(self, line: str) -> None:
        """End this process after GRACE seconds, in which a command can end in order."""
        threading.Thread(target=self._end_in_time, args=(line,), daemon=True).start()

    def _end_in_time(self, line: str) -> None:
        time.sleep(GRACE)
        if self._working or self.ends_when_idle:
            end_process(line)


def last_line_file() -> Path | None:
    """Return the file for the last line of this process; None if standard error gets the line."""
    path = os.environ.get(place.LAST_LINE)
    return Path(path) if path and place.RankPlace.of_environment().rank == 0 else None


def end_process(line: str) -> NoReturn:
    """End this process at once. The launcher restores the terminal and prints the line; without a launcher,
    standard error gets the line."""
    path = last_line_file()
    if path is not None:
        path.write_text(line)
    else:
        print(f"ruvmlx: {line}", file=sys.stderr, flush=True)
    os._exit(place.LOST)
