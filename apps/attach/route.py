"""This module is the server's side of attached terminals. The WebSocket endpoint of this module runs a chat
app for each connection."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ruvmlx.errors import RuvmlxError, UsageError, error_line
from ruvmlx.host.guest import Guest
from ruvmlx.progress import Watch

from ..server.errors import ApiError, InternalError
from ..server.model_pool import ModelPool
from ..server.serving import Serving
from .connection import Outbox
from .wire import PATH, Hello, Size, last_text

if TYPE_CHECKING:
    from .attached import AttachedChat

HELLO_SECONDS = 10.0  # the number of seconds in which a client must send its first message (`Hello`)
# the number of typed bytes that can wait for the app; above this number, the server receives no more bytes
MOST_UNREAD = 1 << 16


class Resized(msgspec.Struct):
    """The text message that a client sends when the size of its terminal changes."""

    size: Size


@dataclass
class Terminals:
    """An ASGI application that serves the terminals of the users who chat with this server.

    local: True if only users of this machine can connect. max_tokens: the maximum number of tokens of a
    reply. attached: the guests (users of the shared host), one for each terminal.
    """

    models: ModelPool
    local: bool
    max_tokens: int
    attached: set[Guest] = field(default_factory=set)

    @property
    def serving(self) -> Serving:
        return self.models.first.serving

    @property
    def route(self) -> WebSocketRoute:
        return WebSocketRoute(PATH, self)

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        serving, first = self.serving, self.models.first
        serving.refuse_if_stopping()
        if len(self.attached) >= serving.limits.terminals:
            message = f"the limit of attached terminals is {serving.limits.terminals}; close one of them."
            raise ApiError(503, message, code="busy")
        guest = Guest(serving.host, self._switch)
        websocket = WebSocket(scope, receive, send)  # type: ignore[arg-type]
        self.attached.add(guest)
        started = time.monotonic()
        try:
            await websocket.accept()  # first, because the opening can take longer than the client waits
            async with self.models.using(first):
                with first.with_terminal():
                    await self._serve(websocket, guest)
        except RuvmlxError as error:  # for example, the model's file is damaged, or `keys` is wrong
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await websocket.send_text(last_text(error.exit_code, error_line(error)))
                await websocket.close()
        except WebSocketDisconnect:
            pass  # the client has left
        except Exception as error:  # noqa: BLE001 - the log gets the place; the client sees the end
            InternalError.of(error).write_to(serving.log)
        finally:
            self.attached.discard(guest)
            seconds = time.monotonic() - started
            serving.metrics.add("ruvmlx_requests_total", endpoint=PATH, method="GET", status="101")
            serving.log.write(
                "request", {"method": "GET", "path": PATH, "status": "101", "s": round(seconds)}
            )

    async def _switch(self, model: str, session: str, watch: Watch) -> None:
        """Switch to another model for all users of the server. Raise UsageError if other terminals use the
        present model."""
        others = len(self.attached) - 1
        if others:
            raise UsageError(f"terminals that use this model, too: {others}; close them, then change it.")
        async with self.models.changing_first():
            await self.serving.host.switch(model, session, watch)
            self.serving.alias = None  # the alias is a name of the model before the switch

    async def _serve(self, websocket: WebSocket, guest: Guest) -> None:
        _notice_the_dead(websocket)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = msgspec.json.decode(await websocket.receive_text(), type=Hello)
        except (TimeoutError, KeyError, msgspec.DecodeError):
            await websocket.close(1002)
            return
        outbox, loop = Outbox(), asyncio.get_running_loop()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="terminal") as thread:
            chat = await loop.run_in_executor(thread, self._make_chat, guest, hello, outbox)
            app = loop.run_in_executor(thread, chat.run)
            sending = asyncio.ensure_future(_send(websocket, outbox))
            receiving = asyncio.ensure_future(self._receive(websocket, chat))
            try:
                await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            finally:  # the app has ended, or the connection to its terminal has ended
                gone = receiving.done()
                outbox.close()
                chat.hang_up()
                sending.cancel()
                receiving.cancel()
                await app
        if not gone:
            await websocket.close()

    async def _receive(self, websocket: WebSocket, chat: "AttachedChat") -> None:
        """Pass the client's messages to the app until the connection ends or a message is invalid. While the
        server stops, this method reads without waiting for the app, because the end of the connection arrives
        after the typed bytes."""
        while (message := await websocket.receive())["type"] == "websocket.receive":
            if (typed := message.get("bytes")) is not None:
                chat.feed(typed)
            else:
                try:
                    chat.resize(msgspec.json.decode(message["text"], type=Resized).size)
                except msgspec.DecodeError:
                    return
            while chat.unread > MOST_UNREAD and not self.serving.stopping:
                await asyncio.sleep(0.05)

    def _make_chat(self, guest: Guest, hello: Hello, outbox: Outbox) -> "AttachedChat":
        """Make the chat app of a terminal. The app's thread calls this method, because the first import of
        Textual takes a second."""
        from .attached import AttachedChat

        return AttachedChat(guest, hello, outbox, self.local, self.max_tokens)


async def _send(websocket: WebSocket, outbox: Outbox) -> None:
    """Send the app's output to the terminal until the app ends or the connection ends."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        while items := await outbox.take_all():
            for item in items:
                await (websocket.send_text(item) if isinstance(item, str) else websocket.send_bytes(item))
                outbox.release_room(item)


def _notice_the_dead(websocket: WebSocket) -> None:
    """Turn on TCP keepalive for this connection, so that the server notices within minutes if the client's
    machine is gone."""
    transport = websocket.scope["state"]["connection"].transport
    found = transport.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 60),
        ("TCP_KEEPALIVE", 60),
        ("TCP_KEEPINTVL", 15),
        ("TCP_KEEPCNT", 4),
    ):
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
