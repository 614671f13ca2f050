"""This module runs the chat app of one attached terminal in a separate thread of the server, so that the
app's drawing does not block the event loop that answers HTTP requests."""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from textual.app import App
from textual.constants import COLOR_SYSTEM
from textual.filter import Monochrome, NoColor

from ruvmlx.errors import error_line
from ruvmlx.host.guest import Guest

from ..chat import theme
from ..chat.app import ChatApp
from ..chat.options import ChatOptions
from ..chat.user_files import UserFiles
from .connection import Outbox
from .driver import AttachedDriver
from .wire import Hello, Size, clamp_size, last_text, place_of

Work = Callable[[AttachedDriver], None]


class AttachedChat:
    """The chat app of one attached terminal. The app's thread calls `run`, and other threads call the other
    methods."""

    def __init__(self, guest: Guest, hello: Hello, outbox: Outbox, local: bool, max_tokens: int) -> None:
        """outbox: the queue for the app's output. local: True if only users of this machine can connect to
        the server. max_tokens: the maximum number of tokens of a reply."""
        self._guest, self._outbox, self._size = guest, outbox, clamp_size(hello.size)
        same = local and place_of(hello.folder) == hello.place != (0, 0)
        options = ChatOptions(
            session=hello.session,
            find=hello.find,
            max_new_tokens=max_tokens,
            system=hello.system,
            replaces_system=hello.replaces_system,
            learn_when_idle=False,  # the server itself learns in idle time
            theme=theme.theme_name(hello.theme, hello.environment),
            motion=hello.motion,
            keys=hello.keys,
            keeps_adapter=False,  # the settings are those of the user who started `ruvmlx serve`
            files=UserFiles(Path(hello.folder) if same else None),
            # no tool servers, because a tool server would have the rights of the user who started `ruvmlx
            # serve`
            tools=False,
            copies=self._copy,
            saves_theme=lambda name: outbox.tell(theme=name),
        )
        self._app = ChatApp(guest, options)
        _draw_for(self._app, hello.environment)
        self._app.driver_class = self._make_driver  # type: ignore[assignment]
        self._driver: AttachedDriver | None = None  # the Textual driver; None until the app runs
        self._early: list[Work] = []  # functions that wait until the driver exists
        self._loop = asyncio.new_event_loop()
        # _sent: the number of bytes that `feed` got. _fed: the number of bytes that the app's keyboard got.
        self._sent = self._fed = 0

    def run(self) -> None:
        """Run the app until the user leaves the app, or until the connection to the terminal ends."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run())
            failure = self._app.failure
            code = getattr(failure, "exit_code", 1) if failure else 0
            self._outbox.put(last_text(code, error_line(failure) if failure else ""))
        finally:
            self._outbox.finish()

    async def _run(self) -> None:
        try:
            await self._app.run_async(size=self._size)
        finally:
            with contextlib.suppress(RuntimeError):  # RuntimeError means that the host is closed
                await self._guest.close()

    def feed(self, data: bytes) -> None:
        """Pass bytes that the user typed in the terminal to the app."""
        self._sent += len(data)

        def feed(driver: AttachedDriver) -> None:
            driver.keyboard.feed(data)
            self._fed += len(data)

        self._drive(feed)

    @property
    def unread(self) -> int:
        """The number of bytes and characters from the terminal that wait for the app."""
        waiting = self._driver.keyboard.unread if self._driver else 0
        return self._sent - self._fed + waiting

    def resize(self, size: Size) -> None:
        """Set the terminal's size and draw the whole screen, even if the size is the same as before."""
        self._drive(lambda driver: driver.resize(clamp_size(size)))

    def hang_up(self) -> None:
        """End the reply and the app, because the connection to the terminal has ended. The store keeps the
        text of the reply."""
        self._app.hang_up()

    def _drive(self, work: Work) -> None:
        """Let the app's thread call `work(driver)`, as soon as the app runs."""
        with contextlib.suppress(RuntimeError):  # RuntimeError means that the app has ended
            self._loop.call_soon_threadsafe(self._drive_now, work)

    def _drive_now(self, work: Work) -> None:
        if self._driver is None:
            self._early.append(work)
        else:
            work(self._driver)

    def _make_driver(self, app: App[Any], **settings: Any) -> AttachedDriver:
        driver = self._driver = AttachedDriver(app, self._outbox, **settings)
        for work in self._early:
            self._loop.call_soon(work, driver)
        return driver

    def _copy(self, text: str) -> bool:
        self._outbox.tell(copy=text)
        return True


def _draw_for(app: App[Any], environment: dict[str, str]) -> None:
    """Let the app draw for a terminal with these environment variables. Textual itself would read the
    environment of the server's process."""
    rest = {name: value for name, value in environment.items() if name != "NO_COLOR"}
    app.no_color = len(rest) < len(environment)
    app._filters = [kept for kept in app._filters if not isinstance(kept, NoColor | Monochrome)]
    if app.no_color:
        app._filters.append(Monochrome())
    app.console = Console(
        color_system=COLOR_SYSTEM,  # type: ignore[arg-type]
        file=app.console.file,
        markup=True,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        force_terminal=True,
        safe_box=False,
        soft_wrap=False,
        _environ=rest,
    )
    # While an app runs, Textual redirects the stdout and stderr of the process. The server needs its stdout
    # and stderr, so this code lets Textual "redirect" each of them to itself.
    app._capture_stdout = sys.stdout  # type: ignore[assignment]
    app._capture_stderr = sys.stderr  # type: ignore[assignment]
