"""This module is the client of `ruvmlx chat --server`. The client connects the user's terminal with a chat
app that runs in the server."""

import contextlib
import ipaddress
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection, events
from wsproto.utilities import ProtocolError

from ruvmlx.errors import RuvmlxError, UsageError, error_line

from .terminal import Terminal
from .wire import PATH, STOPPED, Hello

PIECE = 1 << 16  # the maximum number of bytes that one call reads
CONNECT_SECONDS = 10.0  # seconds in which the server must accept the connection
START = "start one with `ruvmlx serve`, or name another: `ruvmlx chat --server URL`"


class Ended(BaseException):
    """The exception that a signal raises to end the client."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


class Link:
    """A WebSocket connection to a server. The method `read_events` yields the events that the server has
    sent."""

    def __init__(self, url: str, key: str | None) -> None:
        """Connect to a server. Raise a RuvmlxError with one line of text if the server does not answer or
        refuses the connection.

        key: the API key of the server, or None.
        """
        self.url = url
        self._refusal = bytearray()  # the body of the server's answer if the server refuses the connection
        self._status = 0
        parts = address_parts(url)
        self._ws = WSConnection(ConnectionType.CLIENT)
        self._socket = self._connect(parts)
        self._ws_begin(parts.netloc.rpartition("@")[2], key)

    def _connect(self, parts: Any) -> socket.socket:
        secure = parts.scheme == "https"
        try:
            found = socket.create_connection(
                (parts.hostname, parts.port or (443 if secure else 80)), CONNECT_SECONDS
            )
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if secure:
                import ssl

                found = ssl.create_default_context().wrap_socket(found, server_hostname=parts.hostname)
        except OSError as error:
            why = "" if isinstance(error, ConnectionRefusedError) else f" ({error.strerror or error})"
            raise RuvmlxError(f"no server answers at {self.url}{why}; {START}.") from None
        return found

    def _ws_begin(self, host: str, key: str | None) -> None:
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._send(events.Request(host=host, target=PATH, extra_headers=headers))
        try:
            accepted = next(event for event in self._until_answered())
        except (OSError, StopIteration, ProtocolError) as error:
            raise self._no_server(error) from None
        if not isinstance(accepted, events.AcceptConnection):
            raise self._refusal_error()
        self._socket.settimeout(None)

    def _until_answered(self) -> Iterator[events.Event]:
        """Yield the server's answer to the request for a WebSocket, once the whole answer has arrived."""
        while data := self._socket.recv(PIECE):
            self._ws.receive_data(data)
            for event in self._ws.events():
                if isinstance(event, events.RejectConnection):
                    self._status = event.status_code
                if isinstance(event, events.RejectData):
                    self._refusal += event.data
                    if not event.body_finished:
                        continue
                elif isinstance(event, events.RejectConnection) and event.has_body:
                    continue
                yield event

    def _refusal_error(self) -> RuvmlxError:
        try:
            message = json.loads(self._refusal)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return self._no_server(f"HTTP status {self._status}")
        if self._status == 401:
            message = "it asks for an API key, and got none that is valid. Give --api-key or RUVMLX_API_KEY."
        return RuvmlxError(f"the server at {self.url} refuses: {message}")

    def _no_server(self, why: object) -> RuvmlxError:
        return RuvmlxError(
            f"what answers at {self.url} is no `ruvmlx serve` that chats can join ({why or 'it hung up'}); "
            f"update it, or {START}."
        )

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes | str) -> None:
        """Send bytes or a text to the server. If the server has closed the connection, send nothing;
        `read_events` yields the end of the connection."""
        message = events.TextMessage(data) if isinstance(data, str) else events.BytesMessage(data)
        with contextlib.suppress(OSError, ProtocolError):
            self._send(message)

    def send_facts(self, **facts: object) -> None:
        self.send(json.dumps(facts))

    def _send(self, event: events.Event) -> None:
        self._socket.sendall(self._ws.send(event))

    def read_events(self) -> Iterator[events.Event]:
        """Yield the events that have arrived since the last call. Call this method if `select` says that the
        socket has data. The last event of the connection is a CloseConnection."""
        try:
            data = self._socket.recv(PIECE)
            # read on, because `select` does not see bytes that the TLS socket has already decrypted
            while getattr(self._socket, "pending", lambda: 0)():
                data += self._socket.recv(PIECE)
            self._ws.receive_data(data or None)
            for event in self._ws.events():
                if isinstance(event, events.Ping):
                    self._send(event.response())
                yield event
        except (OSError, ProtocolError):
            yield events.CloseConnection(code=1006)

    def close(self) -> None:
        with contextlib.suppress(OSError, ProtocolError):
            self._send(events.CloseConnection(code=1000))
        self._socket.close()


def address_parts(url: str) -> Any:
    """Return the parts of a server's address. The path of the address can be /v1, because other clients need
    it. Raise UsageError for a text that is no such address."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/", "/v1", "/v1/"):
            _ = parts.port  # `parts.port` raises ValueError if the port is no number
            return parts
    except ValueError:
        pass
    raise UsageError(f"{url[:80]!r} is no server's address; give one like http://127.0.0.1:8642.")


class Client:
    """The client: it forwards bytes between the user's terminal and the link to the server."""

    def __init__(self, link: Link, terminal: Terminal) -> None:
        self._link, self._terminal = link, terminal
        self._text: list[str] = []  # the first pieces of a text message whose end has not arrived
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        self._resized = False
        self.unsaved = ""  # why the chosen theme was not saved
        self.code, self.error = 1, f"the connection to {link.url} broke; the chat is saved."

    def run(self) -> None:
        """Forward bytes until the terminal is gone or the link to the server ends."""
        with self._signals(), self._terminal:
            while True:
                ready, _, _ = select.select([self._terminal.keys, self._link, self._wake], [], [])
                if self._wake in ready:
                    os.read(self._wake, PIECE)
                if self._resized:
                    self._resized = False
                    self._link.send_facts(size=self._terminal.size)
                if self._terminal.keys in ready and not self._forward_keys():
                    return
                if self._link in ready and not self._show():
                    return

    def _forward_keys(self) -> bool:
        typed = os.read(self._terminal.keys, PIECE)
        self._link.send(typed)
        return bool(typed)

    def _show(self) -> bool:
        """Show on the terminal what the server has sent. Return False if the connection has ended."""
        for event in self._link.read_events():
            if isinstance(event, events.BytesMessage):
                self._terminal.write(bytes(event.data))
            elif isinstance(event, events.TextMessage):
                self._text.append(event.data)
                if event.message_finished:
                    self._obey(json.loads("".join(self._text)))
                    self._text.clear()
            elif isinstance(event, events.CloseConnection):
                if event.code == STOPPED:
                    self.code, self.error = 1, "the server stopped; the chat is saved."
                return False
        return True

    def _obey(self, told: dict[str, Any]) -> None:
        if "copy" in told:
            self._copy(str(told["copy"]))
        if "theme" in told:
            self._save_theme(str(told["theme"]))
        if "end" in told:
            self.code, self.error = int(told["end"]), str(told["error"])

    def _copy(self, text: str) -> None:
        from ..chat import clipboard

        # no error is shown, because the app has told the user "Copied" already
        with contextlib.suppress(RuvmlxError):
            clipboard.copy(text)

    def _save_theme(self, name: str) -> None:
        from ruvmlx.settings import settings_file

        try:
            settings_file.save("theme", name)
            self.unsaved = ""
        except RuvmlxError as error:  # the app draws on the terminal now, so `attach` shows the line
            self.unsaved = error_line(error)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """In the `with` block, let SIGTERM and SIGHUP raise `Ended`. When SIGTSTP (Ctrl+Z) stops the client,
        restore the terminal for the shell."""

        def end(number: int, _: object) -> None:
            raise Ended(number)

        def note_resize(*_: object) -> None:
            self._resized = True

        def stop(*_: object) -> None:
            self._terminal.leave()
            os.kill(os.getpid(), signal.SIGSTOP)

        def resume(*_: object) -> None:
            self._terminal.enter()
            # the client then sends the terminal's size, and the app draws the whole screen
            self._resized = True

        handlers: dict[signal.Signals, Callable[[int, Any], Any]] = {
            signal.SIGTERM: end,
            signal.SIGHUP: end,
            signal.SIGWINCH: note_resize,
            signal.SIGTSTP: stop,
            signal.SIGCONT: resume,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)


def is_here(url: str) -> bool:
    """Return True if the URL's host is localhost or a loopback address, which means a server on this machine.
    The client sends the stored API key of this machine only to such a server. The name 127.example.com is a
    host elsewhere."""
    name = address_parts(url).hostname
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def attach(url: str, key: str | None, **chat: Any) -> int:
    """Show the chat app of a server until the user leaves, and return the exit code. Raise RuvmlxError if no
    server answers, or if the server ends the chat with an error.

    chat: fields of `Hello` that the user's options set, for example `session`.
    """
    terminal = Terminal()
    link = Link(url, key)
    try:
        link.send_facts(**asdict(Hello.of(terminal.size, **chat)))
        client = Client(link, terminal)
        client.run()
    except Ended as ended:
        return ended.exit_code
    finally:
        link.close()
    if client.unsaved:
        print(f"ruvmlx: {client.unsaved}", file=sys.stderr)
    if client.error:
        error = RuvmlxError(client.error)
        error.exit_code = client.code
        raise error
    return client.code
