"""This module runs a child process that answers requests within limits of time and memory.

A library that reads a file or a text of unknown origin can panic, abort, compute for hours or take all
memory. Python code in the same process cannot stop a library that fails in one of these ways. Because of
this, the library runs in a child process, and each request has limits. The parent waits for the answer
without Python's global lock, so signal handlers and other threads can run during the wait.

The child runs `answer_requests`. A request and an answer are JSON; four bytes before the JSON give its
length. The child writes nothing to the terminal.
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

# a request's limit of clock time, divided by its limit of processor time; high, because the machine can be
# busy
WAIT = 12
POLL = 0.1  # seconds between two checks of the child while a request waits for an answer
LARGEST_ANSWER = 1 << 28  # the maximum number of bytes of an answer


class ProcessEnded(Exception):
    """This error means that the child died or reached a limit, or that its code raised an error. If the
    child's code raised an error, the text of ProcessEnded is the text of this error."""


class ProcessStopped(ProcessEnded):
    """This error means that `stop_requests` or `stop` ended the child, or that the program ends
    (`ending`)."""


class BoundedProcess:
    """A child process that runs `python -m module args`. The first request starts the child. If the child has
    ended, the next request starts a new child.

    Any thread can send requests. The child answers one request at a time.
    """

    def __init__(self, module: str, *args: str, opening: float = 0.0):
        """opening: the seconds of processor time that a child can use for its start, in addition to the
        request's limit."""
        # With -P Python does not import modules from the user's working folder.
        self._command = [sys.executable or "python3", "-P", "-m", module, *args]
        self._opening = opening
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._is_stopped = False

    def ask(self, request: Any, seconds: float, memory: int) -> Any:
        """Send a request to the child and return the child's answer.

        seconds: the limit of processor time. memory: the limit in bytes of the memory that the child
            allocates after its start, for all requests together; on macOS, the limit of all physical memory
            of the child. Raises ProcessEnded, or the RuvmlxError that the child raised. If a
            child that has answered before dies, not by a limit of time or `stop`, a new child gets the
            request once.
        """
        with self._lock:
            self._is_stopped = False
            # This object is in `_working` before the child starts, so that a signal during the child's start
            # can stop this request.
            _working.add(self)
            try:
                is_used = self._child is not None and self._child.owner == os.getpid()
                try:
                    said = self._answer(request, seconds, memory)
                except ProcessEnded:
                    if not is_used or self._is_stopped or self._child is None or self._child.was_too_slow():
                        raise
                    self.close()
                    said = self._answer(request, seconds, memory)
                if "failed" in said:  # the library in the child can be in a bad state, so the child must end
                    raise ProcessEnded(said["failed"])
            # after any error, also Ctrl+C, the child must end, because the next request must not get the
            # answer to this request
            except BaseException as error:
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
        """End the current request, so that the waiting call of `ask` raises ProcessStopped. Any thread can
        call this method."""
        self._is_stopped = True
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        """End the child process if it runs."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


def stop_requests() -> None:
    """End every child that works on a request; the waiting calls of `ask` raise ProcessStopped.

    The handlers of Ctrl+C and of ending signals call this function. Any thread can call this function."""
    for process in list(_working):
        process.stop()


_working: WeakSet[BoundedProcess] = WeakSet()
# While the program ends, this event is set. Every request then raises ProcessStopped.
ending = threading.Event()


class _Child:
    """One child process and two sockets. The first socket carries requests and answers. The second socket
    carries no data: it closes when this process ends, and the child then ends too.

    owner: the id of the process that started the child."""

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
                # one thread for each library, because each thread reserves memory
                env={**os.environ, **one, "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,  # a new session, so that Ctrl+C reaches only the parent
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
        """Return True if the limit of processor time ended the child, or if the child still runs. Call this
        method only after a request that failed."""
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
                # macOS does not enforce a limit of the address space, so this process measures the memory.
                if time.monotonic() > until or (sys.platform == "darwin" and self._footprint() > memory):
                    raise ProcessEnded from None
                continue
            if not part:
                raise ProcessEnded
            data += part
        return bytes(data)

    def _footprint(self) -> int:
        """Return the bytes of memory that the child uses on macOS; 0 if the child has ended."""
        from .memory import darwin_footprint  # it imports ctypes, for which a child has no use

        return darwin_footprint(self._process.pid)


def _end(owner: int, process: subprocess.Popen, *connections: socket.socket) -> None:
    for connection in connections:
        connection.close()
    # only the process that started the child can wait for the child's end; a fork of this process cannot
    if owner == os.getpid():
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
    os._exit(0)  # end the process at once, because no destructor of a library that failed must run


def _end_with_parent(life: int) -> None:
    """Make the Linux kernel end this process when the parent process ends. The function works on Linux only.

    The kernel sends SIGIO when the socket `life` closes, and SIGIO ends this process, even inside a library's
    code. Data on the socket would also cause SIGIO, so the parent sends no data on it. If the parent has
    ended before this call, the kernel sends no SIGIO; `select` finds this case. On other systems, this
    process ends when it next reads or writes on its connection to the parent, at the latest at its limit of
    processor time."""
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
    """Return the size of this process's address space in bytes on Linux, 0 on other systems."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _limit(seconds: float, memory: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process after this processor time
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
