"""This module runs the web server uvicorn. The module adds a time limit for the headers of a request, and a
limit of open connections."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ruvmlx.errors import RuvmlxError

from .errors import ApiError, InternalError, openai_error
from .gate import Gate
from .limits import ServerLimits
from .requestlog import RequestLog

_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
ANSWER_SECONDS = 0.3  # the maximum time to wait for another program on the server's address
_GRACE = 10  # seconds that replies in progress get to end when the server stops


def connection_class(limits: ServerLimits) -> type[H11Protocol]:
    """Return a class of HTTP connections with these limits. The state of a request has the request's
    connection under the name "connection"."""

    class LimitedConnection(H11Protocol):
        """A connection that closes itself if the header of a request does not arrive in time, or if too many
        connections are open."""

        def __init__(self, *args: Any, **more: Any):
            super().__init__(*args, **more)
            self.app_state = {**self.app_state, "connection": self}
            self._deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self._refuse(503, "too many connections are open; try again.")
            else:
                self._deadline = self.loop.call_later(limits.header_seconds, self._is_late)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._forget_deadline()
            elif self._deadline is None and data:
                self._deadline = self.loop.call_later(limits.header_seconds, self._is_late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_deadline()
            super().connection_lost(exc)
            # The following three fields refer back to this connection. When the fields are empty, Python
            # frees the connection at once, without the garbage collector.
            self.app_state, self.scope, self.cycle = {}, None, None  # type: ignore[assignment]

        def send_400_response(self, msg: str) -> None:
            """Answer a request that is not valid HTTP. uvicorn calls this method while it handles an error of
            the library h11, and this error has the HTTP status."""
            status = getattr(sys.exception(), "error_status_hint", 400)
            self._refuse(
                status if status in _REASONS else 400, "this is not an HTTP request that can be read."
            )

        def _forget_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _is_late(self) -> None:
            self._deadline = None
            if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
                self._refuse(408, f"the header did not arrive within {limits.header_seconds:g} seconds.")

        def _refuse(self, status: int, message: str) -> None:
            body = json.dumps(openai_error(ApiError(status, message))).encode()
            reason = _REASONS.get(status, "Service Unavailable")
            head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            retry = "Retry-After: 1\r\n" if status == 503 else ""
            self.transport.write(f"{head}{retry}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            self.transport.close()
            # also close the connection of a client that does not read the answer
            self.loop.call_later(1.0, self.transport.abort)

    return LimitedConnection


class WebServer(uvicorn.Server):
    """A uvicorn server that does not handle signals, because the program that runs the server handles
    them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def web_server(app: Gate, limits: ServerLimits, log: RequestLog) -> WebServer:
    """Return a web server for the application. `await serve(sockets=[...])` runs the server until
    `should_exit` is set. Call this function in the event loop that will run the server, because the function
    also sends failures of the event loop to the log."""

    def log_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        InternalError.of(context.get("exception") or RuntimeError()).write_to(log)

    asyncio.get_running_loop().set_exception_handler(log_failure)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL + 1)  # uvicorn would log tracebacks
    return WebServer(
        uvicorn.Config(
            app,
            http=connection_class(limits),
            ws="wsproto",
            ws_max_size=limits.message,
            # send no pings, because a suspended client cannot answer; TCP notices a dead client
            ws_ping_interval=None,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.header,
            timeout_graceful_shutdown=_GRACE,
        )
    )


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address and the port. Raise RuvmlxError if the address is not
    available."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Because the protocol is named, asyncio knows that this is a TCP socket and sends each piece at once
        # (TCP_NODELAY). Without the name, an answer of two pieces waits 40 ms for the client's
        # acknowledgement.
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise RuvmlxError(f"cannot listen on {host}: {error.strerror or error}.") from None
    try:
        if port and _is_answered(address):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as error:
        found.close()
        raise RuvmlxError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. "
            "Another program may use it; choose another --port."
        ) from None
    return found


def _is_answered(address: tuple[Any, ...]) -> bool:
    """Return True if a program listens on this address. With SO_REUSEADDR, macOS lets a program bind
    127.0.0.1 and a port even if another program listens on all addresses and this port."""
    try:
        socket.create_connection(address[:2], ANSWER_SECONDS).close()
    except OSError:
        return False
    return True
