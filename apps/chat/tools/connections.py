"""This module has the open connections to tool servers. The module uses the client of the package mcp. The
connections run in a separate thread with an event loop. Other threads call the methods of `Connections`.
Except for `stop`, these methods block until the server has answered or ended, or a time limit is over."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar

from ruvmlx import __version__
from ruvmlx.errors import Interrupted, NotFound, RuvmlxError, extra_missing
from ruvmlx.text import one_line

from .server_file import ToolServer

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")
START_SECONDS = 60.0  # the time limit of a server's start; some servers first download their code
CLOSE_SECONDS = 5.0  # the time limit for the end of all servers
MOST_PAGES = 20  # the maximum number of pages of a server's list of tools that are read
_LOOK = 0.05  # seconds between two checks whether the user has stopped a tool call or a server's start
_REASON = 200  # the maximum number of characters of an error's text


@dataclass(frozen=True)
class ServerTool:
    """A tool of a server, with the JSON schema of the tool's arguments."""

    server: str
    name: str
    description: str
    schema: dict[str, Any]


@dataclass
class _Connection:
    server: ToolServer
    client: "Client"
    closing: asyncio.Event
    task: "asyncio.Task[None]"


def require_client() -> None:
    """Raise RuvmlxError if the Python package mcp is not installed."""
    try:
        from mcp import Client  # noqa: F401
    except ImportError:
        raise RuvmlxError(f"tools need the package mcp, version 2; {extra_missing('mcp')}.") from None


class Connections:
    """The connections of a chat, one for each tool server that is on."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, _Connection] = {}
        self._starts: set[asyncio.Future[Any]] = set()  # one for each server that starts now
        # for each server that has not ended: its task, and the event that ends the connection
        self._tasks: dict[asyncio.Task[None], asyncio.Event] = {}

    def start(self, server: ToolServer, cancel: threading.Event) -> list[ServerTool]:
        """Start a tool server or connect to its address, and return its tools. Raise RuvmlxError if the start
        or the connection fails. Raise Interrupted if the event `cancel` is set before the server answers."""
        require_client()
        return self._wait(self._start(server), cancel)

    def call(self, server: str, tool: str, arguments: dict[str, Any], cancel: threading.Event) -> str:
        """Call a tool of a server and return the text of the result. Raise RuvmlxError if the call fails.
        Raise Interrupted if the event `cancel` is set before the tool answers."""
        return self._wait(self._call(server, tool, arguments), cancel)

    def stop(self, server: str) -> None:
        """End the connection to a server. If this program started the server, end the server, too. The method
        does not wait until the server has ended."""
        if self._loop is not None and server in self._open:
            self._loop.call_soon_threadsafe(self._open.pop(server).closing.set)

    def close(self) -> None:
        """End the start of each server, and each connection. Wait at most CLOSE_SECONDS until all servers
        have ended."""
        if self._loop is not None:
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_SECONDS)

    # Methods that run in the calling thread

    def _wait(self, work: Coroutine[Any, Any, T], cancel: threading.Event) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tools", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            with contextlib.suppress(TimeoutError):
                try:
                    return future.result(_LOOK)
                except CancelledError:  # `close` cancelled the start
                    raise Interrupted("stopped.") from None
            if cancel.is_set():
                future.cancel()
                raise Interrupted("stopped.")

    # Methods that run in the event loop's thread

    async def _end(self) -> None:
        """Cancel the start of each server. End each connection. Then wait until all servers have ended."""
        self._open.clear()
        for start in self._starts:
            start.cancel()
        for closing in self._tasks.values():
            closing.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _start(self, server: ToolServer) -> list[ServerTool]:
        opened: asyncio.Future[tuple[Client, list[ServerTool]]] = asyncio.Future()
        closing = asyncio.Event()
        task = asyncio.create_task(self._keep_open(server, opened, closing))
        self._starts.add(opened)
        self._tasks[task] = closing
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
        try:
            async with asyncio.timeout(START_SECONDS):
                client, tools = await opened
        except TimeoutError:
            task.cancel()
            raise RuvmlxError(
                f"the tool server {server.name} did not answer in {START_SECONDS:.0f} s: {server.line}"
            ) from None
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            self._starts.discard(opened)
        self._open[server.name] = _Connection(server, client, closing, task)
        return tools

    async def _keep_open(
        self,
        server: ToolServer,
        opened: "asyncio.Future[tuple[Client, list[ServerTool]]]",
        closing: asyncio.Event,
    ) -> None:
        """Keep the connection to a server open until the event `closing` is set or the connection fails."""
        async with AsyncExitStack() as stack:
            log: IO[str] | None = None
            try:
                made = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - the stack closes it
                log = stack.enter_context(made)
                async with AsyncExitStack() as connected:
                    client = await connected.enter_async_context(await _client(server, log, connected))
                    tools = await _tools(client, server.name)
                    if not opened.done():
                        opened.set_result((client, tools))
                    await closing.wait()
            except Exception as error:  # noqa: BLE001 - goes to whoever waits for it
                if not opened.done():
                    reason = (log and _last_line(log)) or _reason(error)
                    opened.set_exception(
                        RuvmlxError(f"the tool server {server.name} did not start: {reason}")
                    )

    async def _call(self, server: str, tool: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError

        connection = self._open.get(server)
        if connection is None:
            raise NotFound(f"the tool server {server} is off; /tools on {server} starts it.")
        try:
            async with asyncio.timeout(connection.server.timeout):
                found = await connection.client.call_tool(tool, arguments)
        except TimeoutError:
            seconds = connection.server.timeout
            raise RuvmlxError(f"{tool} did not answer in {seconds:g} s, so the call was given up.") from None
        except MCPError as error:
            if connection.task.done() or "closed" in error.error.message.lower():
                self.stop(server)
                raise RuvmlxError(
                    f"the tool server {server} has ended; /tools on {server} starts it again."
                ) from None
            raise RuvmlxError(f"{tool} failed: {_reason(error)}") from None
        except Exception as error:  # noqa: BLE001 - a library's error becomes one line
            raise RuvmlxError(f"{tool} failed: {_reason(error)}") from None
        text = "\n".join(map(_block_text, found.content))
        if found.is_error:
            raise RuvmlxError(f"{tool} failed: {one_line(text)[:_REASON] or 'no reason was given'}")
        return text


async def _client(server: ToolServer, log: Any, stack: AsyncExitStack) -> "Client":
    """Return the MCP client of a server. If this program starts the server, the server's standard error goes
    to `log`."""
    import mcp
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    about = mcp.types.Implementation(name="ruvmlx", version=__version__)
    if server.command:
        started = mcp.StdioServerParameters(
            command=server.command, args=list(server.args), env=dict(server.env)
        )
        return mcp.Client(stdio_client(started, errlog=log), client_info=about)
    if not server.headers:
        return mcp.Client(server.url, client_info=about)
    import httpx2

    http = await stack.enter_async_context(httpx2.AsyncClient(headers=dict(server.headers), timeout=None))
    return mcp.Client(streamable_http_client(server.url, http_client=http), client_info=about)


async def _tools(client: "Client", server: str) -> list[ServerTool]:
    found = list[ServerTool]()
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += [ServerTool(server, t.name, t.description or "", t.input_schema) for t in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _block_text(block: Any) -> str:
    """Return one block of a tool's result as text. If the block has no text and no link, for example because
    it is a picture, return a note, because the model reads only text."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    if block.type == "resource_link":
        return str(block.uri)
    return f"({block.type}: only text can be read)"


def _reason(error: BaseException) -> str:
    """Return one line about an error. If the error is a group of errors, describe the first error of the
    group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, OSError) and error.strerror:
        named = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{named}"
    message = getattr(getattr(error, "error", None), "message", "") or str(error)
    return one_line(message)[:_REASON] or type(error).__name__


def _last_line(log: IO[str]) -> str:
    """Return the last line with text among the first 65,536 characters that a server wrote to its standard
    error. Return "" if there is no such line."""
    log.seek(0)
    lines = [line for line in log.read(1 << 16).splitlines() if line.strip()]
    return one_line(lines[-1])[:_REASON] if lines else ""
