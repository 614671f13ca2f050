"""The chat app's ground: its widgets, its runtime, and how errors show."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from textual import events
from textual.app import App, ComposeResult
from textual.containers import Vertical
from textual.reactive import var

from ruvmlx.errors import NotFound
from ruvmlx.text import sanitize

from . import commands, describe
from .contract import ChatRuntime, OpenRuntime
from .messages import Notice
from .panel import Panel
from .prompt import Prompt
from .status import KeyHints, StatusLine
from .transcript import Transcript
from .welcome import Welcome
from .worker import RuntimeThread

T = TypeVar("T")


def later(loop: asyncio.AbstractEventLoop, show: Callable[[], None]) -> None:
    """show(), soon, in the app's thread; called from the runtime's."""
    with contextlib.suppress(RuntimeError):  # the app has gone
        loop.call_soon_threadsafe(show)


class ChatBase(App[int]):
    """Its widgets are attributes: to look for one would be to pass by every widget of the conversation."""

    panel: Panel
    transcript: Transcript
    prompt: Prompt
    status: StatusLine
    key_hints: KeyHints
    phase: var[str] = var("opening")  # then "idle", "replying", "closing"

    def __init__(self, open_runtime: OpenRuntime) -> None:
        super().__init__()
        self.runtime = RuntimeThread(open_runtime)
        self.session = ""

    def compose(self) -> ComposeResult:
        self.panel, self.transcript, self.prompt = Panel(), Transcript(), Prompt()
        self.status, self.key_hints = StatusLine(), KeyHints()
        yield self.panel
        with self.transcript:
            yield Welcome()
        with Vertical(id="dock"):
            yield self.prompt
            yield self.status
            yield self.key_hints

    async def on_event(self, event: events.Event) -> None:
        """What is pasted is made safe before any input of any screen has it."""
        if isinstance(event, events.Paste):
            event.text = sanitize(event.text)
        await super().on_event(event)

    async def _attempt(self, work: Callable[[ChatRuntime], T]) -> T | None:
        """A call, also during a reply, whose error is shown; None then."""
        try:
            return await self.runtime.call_between(work)
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            await self._fail(error)
            return None

    async def _obey(self, command: commands.Command) -> None:
        """do_<name> of whichever part of the app has it; its error is shown."""
        try:
            await getattr(self, f"do_{command.name}")(command.argument)
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        """Errors are one line in the conversation."""
        if isinstance(error, NotFound):
            self.status.flash(describe.error_line(error))
        else:
            await self.transcript.add(Notice(describe.error_line(error), "error"))
