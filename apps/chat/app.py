"""The chat app: a conversation, an input, and what ratings did.

The runtime lives in its own thread (`worker.RuntimeThread`); this one only draws and listens.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from textual import events, on, work
from textual.app import SystemCommand
from textual.binding import Binding
from textual.screen import Screen

from ruvmlx import settings
from ruvmlx.errors import RuvmlxError

from . import clipboard, commands, describe, ending, gc_policy, keys, palette, theme
from .chats_screen import ChatsScreen
from .compare_screen import CompareScreen
from .comparing import ComparingApp
from .contract import ChatOptions, OpenRuntime, swap_adapter
from .messages import KEYS_HELP, Notice, Reply
from .picker_screen import PickerScreen
from .prompt import Prompt

QUIT_WINDOW = 2.0  # seconds in which a second Ctrl+C leaves
GRACE = 3.0  # seconds to leave the screen in, once told to end and with everything committed


class ChatApp(ComparingApp):
    CSS_PATH = "app.tcss"
    TITLE = "ruvmlx"
    BINDINGS: ClassVar = [
        Binding("escape", "stop", "Stop", key_display="esc", id="stop"),
        Binding("ctrl+y", "rate('up')", "Up", key_display="^y", priority=True, id="rate_up"),
        Binding("ctrl+n", "rate('down')", "Down", key_display="^n", priority=True, id="rate_down"),
        Binding("ctrl+r", "undo", "Take back", key_display="^r", priority=True, id="undo"),
        Binding("ctrl+g", "again", "Write again", key_display="^g", priority=True, id="again"),
        Binding("ctrl+o", "chats", "Chats", key_display="^o", priority=True, id="chats"),
        Binding("ctrl+q", "leave", "Quit", key_display="^q", priority=True, id="quit"),
        Binding("ctrl+c", "interrupt", "Interrupt", show=False, priority=True),
        Binding("f2", "panel", "Learning", show=False, id="learning"),
        Binding("f3", "models", "Models", show=False, id="models"),
        Binding("f4", "adapters", "Adapters", show=False, id="adapters"),
        Binding("f1", "help", "Help", show=False, id="help"),
    ]

    def __init__(self, open_runtime: OpenRuntime, options: ChatOptions | None = None) -> None:
        super().__init__(open_runtime, options or ChatOptions())
        self._keys = keys.parse(self.options.keys, self.bindings_with_names())
        self.failure: BaseException | None = None  # why the app ended by itself
        self._remembers_theme = False  # until the one that was asked for is in place
        self._interrupted_at = 0.0
        self.ended_by = 0  # the signal that told the app to end
        self._here: asyncio.AbstractEventLoop | None = None

    @classmethod
    def bindings_with_names(cls) -> list[Binding]:
        """Of all screens: those that can have other keys."""
        return [*cls.BINDINGS, *(b for s in (ChatsScreen, CompareScreen, PickerScreen) for b in s.BINDINGS)]

    def on_mount(self) -> None:
        for made in theme.ALL:
            self.register_theme(made)
        wanted = theme.preferred(self.options.theme)
        self.theme = wanted if wanted in self.available_themes else theme.DARK.name
        self._remembers_theme = True
        if not self.options.motion:
            self.animation_level = "none"
            self.prompt.cursor_blink = False
        self.set_keymap(self._keys)
        self.prompt.focus()
        self._open()
        self.set_interval(gc_policy.EVERY, self._tidy)
        if self.options.learn_when_idle:
            self._learn_when_idle()
        self._here = asyncio.get_running_loop()
        if self.ended_by:
            self.action_leave()

    def on_unmount(self) -> None:
        self._garbage.leave()

    def watch_theme(self, name: str) -> None:
        """What is chosen in the palette is there again at the next start."""
        if self._remembers_theme:
            self._remember_theme(name)

    @work(thread=True)
    def _remember_theme(self, name: str) -> None:
        try:
            settings.save("theme", theme.setting(name))
        except RuvmlxError as error:
            self.call_from_thread(self.status.flash, describe.error_line(error))

    def watch_phase(self) -> None:
        super().watch_phase()
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that would do nothing now are not offered."""
        if action == "stop":
            return self.phase in ("replying", "opening")
        if (action == "rate" and self._is_too_early()) or (action == "undo" and self.phase == "opening"):
            return False
        if action in ("again", "more", "edit", "flip"):
            return bool(self.session and self.phase == "idle" and self._may(action))
        if action in ("chats", "models", "adapters"):
            return bool(self.session) and self.phase == "idle"
        if action == "cancel_edit":
            return self.editing is not None
        if action in ("rate", "select"):
            return bool(self.session and self.transcript.replies)
        return bool(self.session) if action == "undo" else True

    def on_resize(self, event: events.Resize) -> None:
        """A long input leaves room for the conversation."""
        self.prompt.styles.max_height = max(3, event.size.height // 3)

    # Opening and leaving

    @work
    async def _open(self) -> None:
        try:
            await self._open_first()
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            if self.phase != "closing":
                self.failure = error
                self.exit(getattr(error, "exit_code", 1))

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

    def told_to_end(self, signum: int) -> None:
        """A signal: leave as with Ctrl+Q. If the screen cannot be left, its terminal gone, end without."""
        self.ended_by = signum
        threading.Thread(target=self._end_anyway, daemon=True).start()
        if self._here:
            with contextlib.suppress(RuntimeError):  # the app has ended already
                self._here.call_soon_threadsafe(self.action_leave)

    def _end_anyway(self) -> None:
        self.runtime.close_now()
        time.sleep(GRACE)
        os._exit(ending.exit_code(self.ended_by))

    def action_interrupt(self) -> None:
        """Ctrl+C copies what is selected, else stops a reply, else leaves when pressed twice."""
        if self._copy_selected():
            return
        if self.phase in ("replying", "opening"):
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

    def copy_to_clipboard(self, text: str) -> None:
        """What is copied out of replies says a little about them."""
        self._to_clipboard(text)
        if text == self.screen.get_selected_text():
            within = (node for widget in self.screen.selections for node in widget.ancestors_with_self)
            self._notice({node.reply_id for node in within if isinstance(node, Reply)}, "copied")

    @work(thread=True)
    def _to_clipboard(self, text: str) -> None:
        """The system's tool may take its time; the terminal is asked where there is none."""
        if not clipboard.copy_with_tool(text):
            self.call_from_thread(super().copy_to_clipboard, text)

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
        self.prompt.sent(event.text)
        if command:
            await self._obey(command)
        else:
            self._reply(event.text)

    def _must_wait(self, command: commands.Command | None) -> bool:
        name = command.name if command else ""
        free = ("quit", "help", "rate", "undo", "learning") if self.phase == "replying" else ("quit",)
        return self.phase != "idle" and name not in free

    def _wait(self) -> None:
        """What is sent while the model opens goes out by itself, unless it is changed before."""
        self._waiting = self.prompt.text if self.phase == "opening" else ""
        self.status.flash(
            "It is sent when the model is open" if self._waiting else "Still replying: Esc stops"
        )

    # Moving about

    def action_select(self, step: int) -> None:
        reply = self._chosen()
        if not reply:
            return
        if step < 0 and self.transcript.has_earlier and reply is self.transcript.replies[0]:
            self._select_earlier(reply, step)
        else:
            self.transcript.neighbour(reply, step).focus()

    @work
    async def _select_earlier(self, reply: Reply, step: int) -> None:
        await self.transcript.load_earlier()
        self.transcript.neighbour(reply, step).focus()

    def action_stop_or_write(self) -> None:
        """Esc stops a reply wherever the focus is."""
        self.action_stop()
        self.prompt.focus()

    def action_write(self) -> None:
        self.prompt.focus()

    @work
    async def action_scroll(self, pages: int) -> None:
        if pages < 0 and self.transcript.scroll_y <= 0:
            await self.transcript.load_earlier()
        distance = pages * (self.transcript.size.height - 2)
        self.transcript.scroll_relative(y=distance, animate=False)

    def action_help(self) -> None:
        self.run_worker(self.do_help(""))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette offers what the slash commands do."""
        for entry in palette.entries() if self.session else ():
            yield SystemCommand(entry.title, entry.help, partial(self._from_palette, entry))
        yield from super().get_system_commands(screen)

    def _from_palette(self, entry: palette.Entry) -> None:
        if entry.types:
            self.prompt.focus()
            self.prompt.text = entry.types
            self.prompt.move_cursor(self.prompt.document.end)
        elif self._must_wait(entry.command):
            self._wait()
        else:
            self.run_worker(self._obey(entry.command))

    # Slash commands

    async def do_rate(self, argument: str) -> None:
        self._rate(*commands.parse_rating(argument))

    async def do_undo(self, _: str) -> None:
        self.action_undo()

    async def do_system(self, argument: str) -> None:
        if argument:
            system = None if argument == "none" else argument
            await self.runtime.call(lambda runtime: runtime.chats.set_system(self.session, system))
            self.system = system
        await self.transcript.add(Notice(describe.system_prompt(self.system)))

    async def do_adapter(self, argument: str) -> None:
        await self.runtime.call(lambda runtime: swap_adapter(runtime, argument))
        await self.transcript.add(Notice(await self.runtime.call(describe.adapter)))
        self._look_again()

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
    with ending.heard(app.told_to_end):
        try:
            app.run()
        except OSError:
            if not app.ended_by:  # else the terminal has gone, and there is no screen to leave
                raise
        finally:
            left = app.runtime.close_now()
            app.failure = app.failure or left
    if app.ended_by:
        ending.let_go(sys.stdout, sys.stderr)
        return ending.exit_code(app.ended_by)
    if app.failure is not None:
        print(f"ruvmlx: {describe.error_line(app.failure)}", file=sys.stderr)
        return getattr(app.failure, "exit_code", 1)
    return app.return_value or 0
