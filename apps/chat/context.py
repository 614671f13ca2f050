"""This module has the objects that the app's actions and screens share: the host (whose thread owns the
model), the state of the open chat, and the widgets."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from rich.cells import cell_len
from textual.screen import Screen
from textual.worker import Worker

from ruvmlx.errors import NotFound
from ruvmlx.host.guest import Guest
from ruvmlx.host.host import Host
from ruvmlx.progress import Progress, Watch
from ruvmlx.runtime import Runtime

from .completion import SuggestionList
from .errors import chat_error_line
from .messages import Notice, ReplyMessage, UserMessage
from .options import ChatOptions
from .panel import Panel
from .prompt import Prompt
from .shell import ChatShell
from .state import ChatState
from .status import KeyHints, StatusLine
from .transcript import Transcript

T = TypeVar("T")


def call_soon(loop: asyncio.AbstractEventLoop, show: Callable[[], None]) -> None:
    """Let the app's thread call the function `show`. Any thread can call `call_soon`."""
    with contextlib.suppress(RuntimeError):  # the event loop raises RuntimeError if the app has ended
        loop.call_soon_threadsafe(show)


class StatusWatch(Watch):
    """An observer that shows the progress of the runtime's work in the status line until `end` is called."""

    def __init__(self, status: StatusLine) -> None:
        self._loop, self._status, self._shown = asyncio.get_running_loop(), status, ""

    def progress(self, progress: Progress) -> None:
        call_soon(self._loop, lambda: self._show(progress.line))

    def _show(self, line: str) -> None:
        self._shown = self._status.background = line

    def end(self) -> None:
        """Clear the text of the progress, unless the status line shows another text now."""
        call_soon(self._loop, self._take_away)

    def _take_away(self) -> None:
        if self._shown and self._status.background == self._shown:
            self._status.background = ""


class ChatContext:
    """The objects that the app's actions and screens share. The widgets are attributes, because a search for
    a widget by Textual can visit every widget of the conversation."""

    panel: Panel
    transcript: Transcript
    prompt: Prompt
    suggestions: SuggestionList
    status: StatusLine
    key_hints: KeyHints

    def __init__(self, app: ChatShell, host: Host | Guest, options: ChatOptions) -> None:
        self.app, self.host, self.options = app, host, options
        self.state = ChatState(options)
        self.model = ""  # the name of the model in use
        self.caveat = ""  # a line for the user about a limit of the open model (backends/base.py), or ""
        self.editing: UserMessage | ReplyMessage | None = None  # the message that the user edits
        self._list_request: object | None = None  # the newest request for a list that is not shown yet
        self.waiting = ""  # a message of the user that the app sends after the phase "opening" or "switching"

    @property
    def phase(self) -> str:
        return self.app.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.app.phase = phase

    @property
    def reply_limit(self) -> int:
        """The largest number of tokens that a reply in the open chat may have."""
        return self.state.options.max_new_tokens

    def start(
        self, work: Callable[[], Awaitable[None]], group: str = "default", exclusive: bool = False
    ) -> Worker[None]:
        """Run a coroutine function as a Textual worker. If the function raises an error, show the error.
        group: the name of a group of workers. exclusive: True if the start cancels the other workers of the
        group."""

        async def run() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - Textual would end the app
                await self.show_error(error)

        return self.app.run_worker(run, group=group, exclusive=exclusive)

    def start_reply(self, write: Callable[[], Awaitable[None]], phase: str = "replying") -> None:
        """Run a coroutine function that writes a reply, if the app is idle. phase: the app's phase until the
        function ends. The phase changes before the worker begins, because the next message of the user can
        arrive first. After an error, a message that waits stays in the input."""
        if self.phase != "idle":
            return
        self.phase = phase

        async def run() -> None:
            try:
                await write()
            except BaseException:
                self.waiting = ""
                raise
            finally:
                if self.phase == phase:
                    self.phase = "idle"
                self.send_waiting()
                self.app.refresh_bindings()

        self.start(run, group="write")

    @contextlib.contextmanager
    def switching(self) -> Iterator[None]:
        """Let new messages wait until the block, which can open another chat, ends without an error. After an
        error, a message that waits stays in the input."""
        if self.phase != "idle":
            yield
            return
        self.phase = "switching"
        try:
            yield
        except BaseException:
            self.waiting = ""
            raise
        finally:
            if self.phase == "switching":
                self.phase = "idle"
                self.send_waiting()

    async def ask(self, screen: Screen[T]) -> T | None:
        """Show a screen, and return the result of the screen. Only code in a Textual worker can call this
        method."""
        return await self.app.push_screen_wait(screen)

    async def prepare(self, work: Callable[[Runtime], T]) -> T | None:
        """Return the result of work(runtime): the data of a list that the app shows next. Show an error as
        `attempt` does. Return None after an error. Return None, too, if the user has pressed Esc, opened
        another list, or begun a reply."""
        mine = self._list_request = object()
        self.app.refresh_bindings()
        done = await self.attempt(work)
        is_wanted = self._list_request is mine and self.phase == "idle" and not self.app.screen.is_modal
        if self._list_request is mine:
            self.cancel_list()
        return done if is_wanted else None

    def cancel_list(self) -> None:
        """Cancel the newest request for a list. `prepare` then returns None, so the app shows no list."""
        self._list_request = None
        self.app.refresh_bindings()

    @property
    def can_stop(self) -> bool:
        """True if Esc stops a reply or the opening of a model, or cancels a list that is not shown yet."""
        return self.phase in ("replying", "opening") or self._list_request is not None

    async def attempt(self, work: Callable[[Runtime], T]) -> T | None:
        """Call the function `work` in the runtime's thread and return its result. If the model writes a
        reply, the call runs between two chunks of the reply. If `work` raises an error, show the error and
        return None."""
        try:
            return await self.host.call_between(work)
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            await self.show_error(error)
            return None

    async def attempt_measured(self, work: Callable[[Runtime], T], watch: Watch) -> T | None:
        """Do the same as `attempt`, for a rating. If a measurement of the model is missing, measure the model
        first; replies in progress go on in the meantime. watch: an object that gets the progress."""
        needs_measurement = threading.Event()

        def work_if_measured(runtime: Runtime) -> T | None:
            if runtime.learning.is_measured_for(None):
                return work(runtime)
            needs_measurement.set()
            return None

        done = await self.attempt(work_if_measured)
        if not needs_measurement.is_set():
            return done
        try:
            await self.host.call_in_slices(lambda runtime: runtime.learning.measure_in_slices(None, watch))
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            await self.show_error(error)
            return None
        return await self.attempt(work)

    async def show_error(self, error: Exception) -> None:
        """Show an error on one line. The error NotFound appears in the status line, if the status line has
        the room. Other errors appear in the conversation."""
        line = chat_error_line(error)
        if isinstance(error, NotFound) and cell_len(line) <= self.status.size.width:
            self.status.flash(line)
        else:
            await self.transcript.add(Notice(line, "error"))

    def selected_reply(self) -> ReplyMessage | None:
        """Return the reply that has the focus, or None."""
        focused = self.app.focused
        return focused if isinstance(focused, ReplyMessage) else None

    def chosen_reply(self) -> ReplyMessage | None:
        """Return the chosen reply: the reply that has the focus, or else the newest reply."""
        replies, selected = self.transcript.replies, self.selected_reply()
        if selected in replies:
            return selected
        return replies[-1] if replies else None

    def reply_in_view(self) -> ReplyMessage | None:
        """Return the reply that the user rates or selects: the reply that has the focus, or else the lowest
        reply on the screen. Return the newest reply if the screen shows no reply."""
        if (selected := self.selected_reply()) in self.transcript.replies:
            return selected
        view = self.transcript.region
        seen = [reply for reply in self.transcript.replies if reply.region.overlaps(view)]
        return seen[-1] if seen else self.chosen_reply()

    def send_waiting(self) -> None:
        """Send the message that had to wait (the phases of `SENT_LATER`), if the user has not changed this
        message."""
        if self.waiting and self.waiting == self.prompt.text:
            self.prompt.action_submit()
        self.waiting = ""
