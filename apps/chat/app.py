"""The chat app: a conversation, an input, and what ratings did.

The runtime lives in its own thread (`worker.RuntimeThread`); this one only draws and listens.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import ClassVar, TypeVar

from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.reactive import var

from ruvmlx.engine.types import Chunk, GenerationResponse
from ruvmlx.errors import NotFound, RuvmlxError
from ruvmlx.runtime import LearnStatus
from ruvmlx.text import Sanitizer

from . import commands, describe, theme
from .contract import ChatOptions, ChatRuntime, OpenRuntime
from .messages import KEYS_HELP, Notice, Reply, Transcript, UserMessage, Welcome
from .opened import Opened
from .prompt import Prompt
from .status import KeyHints, Meter, StatusLine
from .worker import RuntimeThread

QUIT_WINDOW = 2.0  # seconds in which a second Ctrl+C leaves
FRAME = 1 / 30  # seconds between two looks at a growing reply
T = TypeVar("T")


class ChatApp(App[int]):
    CSS_PATH = "app.tcss"
    TITLE = "ruvmlx"
    BINDINGS: ClassVar = [
        Binding("escape", "stop", "Stop", key_display="esc"),
        Binding("ctrl+y", "rate('up')", "Up", key_display="^y", priority=True),
        Binding("ctrl+n", "rate('down')", "Down", key_display="^n", priority=True),
        Binding("ctrl+r", "undo", "Take back", key_display="^r", priority=True),
        Binding("ctrl+q", "leave", "Quit", key_display="^q", priority=True),
        Binding("ctrl+c", "interrupt", "Interrupt", show=False, priority=True),
        Binding("f1", "help", "Help", show=False),
    ]

    phase: var[str] = var("opening")  # then "idle", "replying", "closing"

    def __init__(self, open_runtime: OpenRuntime, options: ChatOptions | None = None) -> None:
        super().__init__()
        self.options = options or ChatOptions()
        self.system = self.options.system
        self.runtime = RuntimeThread(open_runtime)
        self.session = ""
        self.failure: Exception | None = None  # why the app ended by itself
        self._interrupted_at = 0.0
        self._waiting = ""  # sent while the model was opening

    def compose(self) -> ComposeResult:
        with Transcript():
            yield Welcome()
        with Vertical(id="dock"):
            yield Prompt()
            yield StatusLine()
            yield KeyHints()

    def on_mount(self) -> None:
        for made in (theme.DARK, theme.LIGHT):
            self.register_theme(made)
        wanted = theme.preferred()
        self.theme = wanted if wanted in self.available_themes else theme.DARK.name
        self.prompt.focus()
        self._open()

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def prompt(self) -> Prompt:
        return self.query_one(Prompt)

    @property
    def status(self) -> StatusLine:
        return self.query_one(StatusLine)

    def watch_phase(self) -> None:
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that would do nothing now are not offered."""
        if action == "stop":
            return self.phase == "replying"
        if action == "rate" and self._is_too_early():
            return False
        if action in ("rate", "select"):
            return bool(self.session and self.transcript.replies)
        if action == "undo":
            return bool(self.session and self.status.learned and self.status.learned.ratings)
        return True

    # Opening and leaving

    @work
    async def _open(self) -> None:
        try:
            await self.runtime.open()
            if self.phase == "opening":
                await self._begin(self.options)
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            self.failure = error
            self.exit(getattr(error, "exit_code", 1))

    async def _begin(self, options: ChatOptions) -> None:
        """Show a session: the first, or another one later."""
        opened = await self.runtime.call(lambda runtime: Opened.of(runtime, options))
        self.session = opened.session
        self.system = next((t.content for t in opened.turns if t.role == "system"), options.system)
        self.prompt.border_title = opened.model
        self.status.backend = opened.backend
        self.status.meter = Meter(max_context=opened.max_context)
        self.status.learned = opened.learned
        await self.transcript.restart(opened.turns, opened.model)
        self.phase = "idle"
        if self._waiting and self._waiting == self.prompt.text:
            self.prompt.action_submit()
        self._waiting = ""

    def action_leave(self) -> None:
        if self.phase != "closing":
            self.phase = "closing"
            self.status.message = "Closing…"
            self._close()

    async def action_quit(self) -> None:
        """The palette's way out."""
        self.action_leave()

    @work
    async def _close(self) -> None:
        try:
            await self.runtime.close()
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            self.failure = error
        self.exit(getattr(self.failure, "exit_code", 1) if self.failure else 0)

    def action_interrupt(self) -> None:
        """Ctrl+C copies what is selected, else stops a reply, else leaves when pressed twice."""
        if self._copy_selected():
            return
        if self.phase == "replying":
            self.action_stop()
        elif time.monotonic() - self._interrupted_at < QUIT_WINDOW:
            self.action_leave()
        else:
            self._interrupted_at = time.monotonic()
            self.status.flash("Press again to quit", QUIT_WINDOW)

    def _copy_selected(self) -> bool:
        text = self.prompt.selected_text or self.screen.get_selected_text()
        if text:
            self.copy_to_clipboard(text)
            self.status.flash("Copied")
            self.screen.clear_selection()
        return bool(text)

    def _fatal_error(self) -> None:
        """A defect of the app itself: one line, where Textual would print a traceback with all locals."""
        self.failure = self.failure or self._exception
        self._close_messages_no_wait()

    # What the user sends

    @on(Prompt.Submitted)
    async def _submitted(self, event: Prompt.Submitted) -> None:
        try:
            command = commands.parse(event.text)
        except RuvmlxError as error:
            await self._fail(error)
            return
        if self._must_wait(command):
            self._wait()
            return
        self.prompt.text = ""
        if command:
            await self._obey(command)
        else:
            self._reply(commands.message_text(event.text.strip()))

    def _must_wait(self, command: commands.Command | None) -> bool:
        name = command.name if command else ""
        return self.phase != "idle" and name not in (("quit", "help", "rate") if self.session else ("quit",))

    def _wait(self) -> None:
        """What is sent while the model opens goes out by itself, unless it is changed before."""
        self._waiting = self.prompt.text if self.phase == "opening" else ""
        self.status.flash(
            "It is sent when the model is open" if self._waiting else "Still replying: Esc stops"
        )

    async def _obey(self, command: commands.Command) -> None:
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

    # Replies

    @work
    async def _reply(self, text: str) -> None:
        self.phase = "replying"
        arriving = self.runtime.say(self.session, text, self.options)
        reply = Reply()
        await self.transcript.add(UserMessage(text), reply)
        try:
            await self._stream(reply, arriving)
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            await self._reply_failed(reply, text, error)
        finally:
            if self.phase == "replying":
                self.phase = "idle"
            self.refresh_bindings()

    async def _stream(self, reply: Reply, arriving: AsyncIterator[list[Chunk]]) -> None:
        safe, asked_at, response = Sanitizer(), time.perf_counter(), None
        self.status.meter = replace(Meter(), max_context=self.status.meter.max_context)
        async for chunks in arriving:
            started = time.perf_counter()
            response = await self._show(reply, chunks, safe, asked_at)
            await asyncio.sleep(max(FRAME, 1.5 * (time.perf_counter() - started)) if not response else 0)
        if response:
            await reply.finish(response.text, response.finish_reason)
            reply.reply_id = await self.runtime.call(lambda runtime: runtime.last_reply_id)
            self._settle()

    async def _show(
        self, reply: Reply, chunks: list[Chunk], safe: Sanitizer, asked_at: float
    ) -> GenerationResponse | None:
        """Everything that has come since the last frame; the response when it is complete."""
        for chunk in chunks:
            self.status.meter = self.status.meter.after(chunk, asked_at)
        text = safe.feed("".join(chunk.text for chunk in chunks))
        if text:
            await reply.grow(text)
        elif chunks[-1].prefilled:
            reply.progress = f"reading {chunks[-1].prefilled} of {chunks[-1].prompt_tokens} tokens"
        return chunks[-1].response

    async def _reply_failed(self, reply: Reply, text: str, error: Exception) -> None:
        """Nothing is lost: words that came stay, and a message without an answer can be sent again."""
        if reply.text:
            await reply.finish(reply.text, "")
        else:
            await reply.remove()
            self.prompt.text = self.prompt.text or text
        await self._fail(error)

    def action_stop(self) -> None:
        if self.phase == "replying":
            self.runtime.stop()
            self.status.flash("Stopping", 0.5)

    @work
    async def _settle(self) -> None:
        """After the reply is shown; a message sent meanwhile waits its turn in the runtime's thread."""
        if self.phase != "closing":
            await self._attempt(lambda runtime: runtime.settle())

    async def _attempt(self, work: Callable[[ChatRuntime], T]) -> T | None:
        """A call whose error is shown; None then."""
        try:
            return await self.runtime.call(work)
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            await self._fail(error)
            return None

    # Ratings

    def action_rate(self, rating: str) -> None:
        self._rate(rating, "")

    @work
    async def _rate(self, rating: str, note: str) -> None:
        reply = None if self._is_too_early() else self._chosen()
        if reply is None or reply.reply_id is None:
            self.status.flash("There is no reply to rate yet")
            return
        reply_id, reply.progress = reply.reply_id, "rating"
        done = await self._attempt(lambda runtime: (runtime.rate(reply_id, rating, note), runtime.status()))
        reply.progress = ""
        if done:
            reply.rated(done[0])
            self._learned(done[1])

    def _is_too_early(self) -> bool:
        """While a reply comes, a rating would hit the one before it, unless that is selected."""
        return self.phase == "replying" and not isinstance(self.focused, Reply)

    def _learned(self, learned: LearnStatus) -> None:
        self.status.learned = learned
        self.refresh_bindings()

    def _chosen(self) -> Reply | None:
        """The selected reply, else the newest."""
        replies = self.transcript.replies
        if isinstance(self.focused, Reply) and self.focused in replies:
            return self.focused
        return replies[-1] if replies else None

    @work
    async def action_undo(self) -> None:
        done = await self._attempt(lambda runtime: (runtime.undo(), runtime.turns(self.session)))
        if not done:
            return
        ratings = {turn.reply_id: turn.rating for turn in done[1] if turn.reply_id}
        for reply in self.transcript.replies:
            reply.restore_rating(ratings.get(reply.reply_id or ""))
        self._learned(done[0])
        self.status.flash(describe.undone(done[0]))

    # Moving about

    def action_select(self, step: int) -> None:
        reply = self._chosen()
        if reply:
            self.transcript.neighbour(reply, step).focus()

    def action_stop_or_write(self) -> None:
        """Esc stops a reply wherever the focus is."""
        self.action_stop()
        self.prompt.focus()

    def action_write(self) -> None:
        self.prompt.focus()

    def action_scroll(self, pages: int) -> None:
        distance = pages * (self.transcript.size.height - 2)
        self.transcript.scroll_relative(y=distance, animate=False)

    def action_help(self) -> None:
        self.run_worker(self.do_help(""))

    # Slash commands

    async def do_rate(self, argument: str) -> None:
        self._rate(*commands.parse_rating(argument))

    async def do_undo(self, _: str) -> None:
        self.action_undo()

    async def do_new(self, _: str) -> None:
        await self._begin(replace(self.options, session="new", system=self.system))

    async def do_system(self, argument: str) -> None:
        if argument:
            system = None if argument == "none" else argument
            await self.runtime.call(lambda runtime: runtime.set_system(self.session, system))
            self.system = system
        await self.transcript.add(Notice(describe.system_prompt(self.system)))

    async def do_status(self, _: str) -> None:
        lines = await self.runtime.call(describe.status_lines)
        await self.transcript.add(Notice("\n".join(lines)))

    async def do_help(self, _: str) -> None:
        await self.transcript.add(Notice("\n".join(commands.help_lines(KEYS_HELP))))

    async def do_quit(self, _: str) -> None:
        self.action_leave()


def run_app(open_runtime: OpenRuntime, options: ChatOptions) -> int:
    """Chat in the terminal; the exit code. The runtime is closed on every way out."""
    app = ChatApp(open_runtime, options)
    try:
        app.run()
    finally:
        app.runtime.close_now()
    if app.failure is not None:
        print(f"ruvmlx: {describe.error_line(app.failure)}", file=sys.stderr)
        return getattr(app.failure, "exit_code", 1)
    return app.return_value or 0
