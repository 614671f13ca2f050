"""A child process that answers requests within limits of time and memory.

A library that reads a file or a text of unknown origin can panic, abort, compute for hours or take all
memory. This process can catch none of these. So the library runs in a child, and each request to the child
has limits. This process only waits for the answer, outside Python's lock: signals and other threads go on.

The child half is `answer_requests`. A request and an answer are JSON, each behind its length in four bytes.
The child writes nothing to the terminal.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

from .. import errors
from ..errors import RuvmlxError, error_line

WAIT = 12  # times as long by the clock as in processor time: the machine may be busy
POLL = 0.1  # s
LARGEST_ANSWER = 1 << 28  # bytes


class ProcessEnded(Exception):
    """The child died or reached a limit, or what it ran failed, and the text says how."""


class ProcessStopped(ProcessEnded):
    """`stop_requests` ended the child."""


class BoundedProcess:
    """A child that runs `python -m module args`. It starts with the first request, and again after an end.

    Requests may come from any thread; they wait for each other.
    """

    def __init__(self, module: str, *args: str, opening: float = 0.0):
        """opening: seconds of processor time that the first request to a child may take beyond its own."""
        # -P: not the modules of the user's working folder.
        self._command = [sys.executable or "python3", "-P", "-m", module, *args]
        self._opening = opening
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._is_stopped = False

    def ask(self, request: Any, seconds: float, memory: int) -> Any:
        """The child's answer to a request.

        seconds: of processor time. memory: bytes that the child may take since its start, all requests
        together. Raises ProcessEnded, or the RuvmlxError that the child raised. If the system ended a child
        that has answered before, a new child gets the request.
        """
        with self._lock:
            self._is_stopped = False
            _working.add(self)  # before the child starts, which takes a while: a signal may come meanwhile
            try:
                is_used = self._child is not None and self._child.owner == os.getpid()
                try:
                    said = self._answer(request, seconds, memory)
                except ProcessEnded:
                    if not is_used or self._is_stopped or self._child is None or self._child.was_too_slow():
                        raise
                    self.close()
                    said = self._answer(request, seconds, memory)
                if "failed" in said:  # a library that has panicked may be in any state
                    raise ProcessEnded(said["failed"])
            except BaseException as error:  # also Ctrl+C: the next request would get this one's answer
                self.close()
                if self._is_stopped and isinstance(error, ProcessEnded):
                    raise ProcessStopped from None
                raise
            finally:
                _working.discard(self)
        if "error" in said:
            raise getattr(errors, said["error"], RuvmlxError)(said["text"])
        return said["answer"]

    def _answer(self, request: Any, seconds: float, memory: int) -> dict[str, Any]:
        if self._child is None or self._child.owner != os.getpid():
            self._child, seconds = _Child(self._command), seconds + self._opening
        if self._is_stopped or ending.is_set():
            raise ProcessStopped
        return self._child.answer({"request": request, "seconds": seconds, "memory": memory})

    def stop(self) -> None:
        """End the request that is being answered; it raises ProcessStopped. From any thread."""
        self._is_stopped = True
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


def stop_requests() -> None:
    """End every child that works on a request now: whoever waits for its answer gets ProcessStopped.

    For Ctrl+C and signals that end this process; from any thread."""
    for process in list(_working):
        process.stop()


_working: WeakSet[BoundedProcess] = WeakSet()
ending = threading.Event()  # set while this process ends: every request gets ProcessStopped


class _Child:
    """One process, with the socket to it, and one over which nothing is sent: it tells the child of this
    process's end. owner: the id of the process that started it."""

    def __init__(self, command: list[str]):
        self.owner = os.getpid()
        (self._socket, its), (self._life, watched) = socket.socketpair(), socket.socketpair()
        one = dict.fromkeys(("RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        with its, watched:
            self._process = subprocess.Popen(
                command,
                stdin=its.fileno(),
                stdout=watched.fileno(),
                stderr=subprocess.DEVNULL,
                env={**os.environ, **one, "TOKENIZERS_PARALLELISM": "false"},  # each thread reserves memory
                start_new_session=True,  # the parent handles Ctrl+C
            )
        self.close = finalize(self, _end, self.owner, self._process, self._socket, self._life)
        self.kill = self._process.kill

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + WAIT * request["seconds"]
        data = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            self._socket.settimeout(WAIT * request["seconds"])
            self._socket.sendall(len(data).to_bytes(4, "big") + data)
            size = int.from_bytes(self._receive(4, until, request["memory"]), "big")
            if size > LARGEST_ANSWER:
                raise ProcessEnded
            return json.loads(self._receive(size, until, request["memory"]))
        except (ProcessEnded, OSError, ValueError, RecursionError):
            raise ProcessEnded from None

    def was_too_slow(self) -> bool:
        """After a failed request: did the limit of time end it?"""
        try:
            return self._process.wait(timeout=1) == -signal.SIGPROF
        except subprocess.TimeoutExpired:
            return True

    def _receive(self, size: int, until: float, memory: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(POLL)
            try:
                part = self._socket.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                # macOS limits no address space.
                if time.monotonic() > until or (sys.platform == "darwin" and self._resident() > memory):
                    raise ProcessEnded from None
                continue
            if not part:
                raise ProcessEnded
            data += part
        return bytes(data)

    def _resident(self) -> int:
        """Bytes of memory that the child holds."""
        command = ["ps", "-o", "rss=", "-p", str(self._process.pid)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return int(found.stdout.strip() or 0) * 1024


def _end(owner: int, process: subprocess.Popen, *connections: socket.socket) -> None:
    for connection in connections:
        connection.close()
    if owner == os.getpid():  # a forked process has no such child
        process.kill()
        process.wait()


# In the child -------------------------------------------------------------------------------------


def answer_requests(answer: Callable[[Any], Any]) -> None:
    """Answer requests until the parent closes the connection. Does not return."""
    start = _address_space()
    connection, life, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    _end_with_parent(life)
    with contextlib.suppress(OSError):
        while True:
            size = int.from_bytes(_read(connection, 4), "big")
            request = json.loads(_read(connection, size).decode("utf-8", "surrogatepass"))
            _limit(request["seconds"], start + request["memory"])
            said = _answer_request(answer, request["request"])
            signal.setitimer(signal.ITIMER_PROF, 0)
            data = json.dumps(said).encode()
            _write(connection, len(data).to_bytes(4, "big") + data)
    os._exit(0)  # no destructor of a broken library runs


def _end_with_parent(life: int) -> None:
    """On Linux the end of the parent ends this process from now on, whatever library runs: SIGIO comes when
    the socket closes. It would also come for data, at any time, so nothing is ever sent here. A parent that
    has ended before sends no SIGIO and is found by reading. Elsewhere only the limit of time ends it."""
    if sys.platform != "linux":
        return
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:
        os._exit(0)


def _answer_request(answer: Callable[[Any], Any], request: Any) -> dict[str, Any]:
    try:
        return {"answer": answer(request)}
    except RuvmlxError as error:
        return {"error": type(error).__name__, "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        return {"failed": error_line(error)}


def _address_space() -> int:
    """Bytes, on Linux."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _limit(seconds: float, memory: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of processor time; its signal ends the process
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))


def _read(connection: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(connection, min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionError
        data += part
    return bytes(data)


def _write(connection: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(connection, view) :]
