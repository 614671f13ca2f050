"""This module is the chat app: its keys, its widgets, and the action (actions/) that each key calls.

The runtime (the open model with its store) has its own thread (`ruvmlx.host.host.Host`). The app's thread
draws the screen and handles the user's input.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import Screen

from ruvmlx.chats.chat_file import write_new
from ruvmlx.errors import RuvmlxError, error_line
from ruvmlx.host.guest import Guest
from ruvmlx.host.host import Host
from ruvmlx.host.model_holder import OpenRuntime
from ruvmlx.text import sanitize

from . import exit_signals, gc_policy, keys, palette, theme
from .actions import Actions
from .chats_screen import ChatsScreen
from .compare_screen import CompareScreen
from .completion import SuggestionList
from .context import ChatContext
from .file_screen import FileScreen
from .idle import IdleLearner
from .messages import WHY_KEYS, ReplyMessage
from .options import ChatOptions
from .ordered_keys import typed_character
from .panel import Panel
from .picker_screen import PickerScreen
from .prompt import Prompt
from .shell import ChatShell
from .status import KeyHints, StatusLine
from .transcript import Transcript
from .welcome import Welcome

# seconds that the app has to leave its screen after a signal; they begin when the attempt to close the
# runtime has ended
GRACE = 3.0
NO_BAD_RATING = "A reason goes with a bad rating: - or 1 or 2 comes first"
KEY_WAIT = 0.25  # the maximum number of seconds for which a key waits for the input


class Dock(Vertical):
    """The widgets at the bottom of the screen: the suggestions, the input, the status line and the keys.

    If the dock changes its height, the side panel changes its height, too: the panel ends above the dock.
    """

    def __init__(self, panel: Panel) -> None:
        super().__init__(id="dock")
        self._panel = panel

    def on_resize(self) -> None:
        whole = self.app.size
        self._panel.place(whole.width, whole.height - self.outer_size.height)


class ChatApp(ChatShell):
    CSS_PATH = "app.tcss"
    TITLE = "ruvmlx"
    BINDINGS: ClassVar = [
        Binding("escape", "do('write.stop')", "Stop", key_display="esc", id="stop"),
        Binding("ctrl+y", "do('rate.rate', 'up')", "Good", key_display="^y", priority=True, id="rate_up"),
        Binding("ctrl+n", "do('rate.rate', 'down')", "Bad", key_display="^n", priority=True, id="rate_down"),
        Binding("ctrl+r", "do('command', 'undo')", "Take back", key_display="^r", priority=True, id="undo"),
        Binding("ctrl+g", "do('write.again')", "Write again", key_display="^g", priority=True, id="again"),
        Binding("ctrl+o", "do('library.choose')", "Chats", key_display="^o", priority=True, id="chats"),
        Binding("ctrl+t", "do('command', 'effect')", "Effect", show=False, id="effect"),
        Binding("ctrl+q", "leave", "Quit", key_display="^q", priority=True, id="quit"),
        Binding("ctrl+c", "interrupt", "Interrupt", show=False, priority=True),
        Binding("f2", "do('panel.toggle')", "Learning", show=False, id="learning"),
        Binding("f3", "do('models.choose')", "Models", show=False, id="models"),
        Binding("f4", "do('models.choose_adapter')", "Adapters", show=False, id="adapters"),
        Binding("f5", "do('fetch.go')", "Better model", show=False, id="fetch"),
        Binding("f6", "do('draft.pick_files')", "Files", show=False, priority=True, id="files"),
        Binding("f8", "do('command', 'summarize')", "Sum up", show=False, id="summarize"),
        Binding("f1", "help", "Help", key_display="F1", id="help"),
    ]

    def __init__(self, open_runtime: OpenRuntime | Guest, options: ChatOptions | None = None) -> None:
        """open_runtime: a function that opens the runtime, or a `Guest`. A `Guest` uses a host (the object
        whose thread owns the model) that is open already, for example in `ruvmlx serve` (apps/attach/)."""
        super().__init__()
        self.options = options or ChatOptions()
        self.host = open_runtime if isinstance(open_runtime, Guest) else Host(open_runtime)
        self.chat = ChatContext(self, self.host, self.options)
        self.actions = Actions(self.chat)
        self.idle_learner = IdleLearner(self.chat, self.actions.rate, self.options.learn_when_idle)
        self._keys = keys.parse_at_start(self.options.keys, self.bindings_of_screens())
        # True after the app has set the theme of the options; a theme that is chosen later is saved
        self._remembers_theme = False
        self.ended_by = 0  # the number of the signal that ended the app; 0: no signal
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def bindings_of_screens(cls) -> list[list[Binding]]:
        """Return the bindings of the app, and of each screen whose keys the user can change."""
        files = [*PickerScreen.BINDINGS, *FileScreen.BINDINGS]
        of_all = (cls.BINDINGS, ChatsScreen.BINDINGS, CompareScreen.BINDINGS, PickerScreen.BINDINGS, files)
        return [[b for b in bindings if isinstance(b, Binding)] for bindings in of_all]

    def compose(self) -> ComposeResult:
        chat = self.chat
        chat.panel = Panel()
        chat.transcript = Transcript(chat.panel.uncover)
        chat.status, chat.key_hints = StatusLine(), KeyHints()
        chat.suggestions = SuggestionList()
        draft = self.actions.draft
        chat.prompt = Prompt(lambda words: chat.status.flash(words, 10), draft.suggest, draft.complete)
        yield chat.panel
        with chat.transcript:
            yield Welcome()
        self._dock = Dock(chat.panel)
        with self._dock:
            yield chat.suggestions
            yield chat.prompt
            yield chat.status
            yield chat.key_hints

    def on_mount(self) -> None:
        self._use_theme()
        if not self.options.motion:
            self.animation_level = "none"
            self.chat.prompt.cursor_blink = False
        self.set_keymap(self._keys)
        self.chat.prompt.focus()
        self.chat.start(self._open)
        self.set_interval(gc_policy.EVERY, self.idle_learner.tidy)
        self.idle_learner.start()
        self._loop = asyncio.get_running_loop()
        if self.ended_by:
            self.action_leave()

    def on_unmount(self) -> None:
        self.idle_learner.garbage.leave()

    def _use_theme(self) -> None:
        for made in theme.ALL:
            self.register_theme(made)
        wanted = theme.theme_name(self.options.theme)
        if wanted in self.available_themes:
            self.theme = wanted
        else:
            self.theme = theme.DARK.name
            self.chat.status.flash(f"There is no theme {wanted!r}; the chat uses the theme dark.", 10)
        self._remembers_theme = True

    def watch_theme(self, name: str) -> None:
        """Save the name of the theme that the user chose in the palette, so that the next start uses this
        theme."""
        if self._remembers_theme:
            self.chat.start(partial(_remember_theme, self.chat, name))

    def watch_phase(self) -> None:
        self.idle_learner.phase_changed()
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return False for an action that would do nothing now, so that Textual hides its key. While
        another screen, such as a list, covers the chat, return False for all actions of the chat."""
        if action != "do":
            return True
        return not self.screen.is_modal and self.actions.offers(*map(str, parameters))

    async def on_event(self, event: events.Event) -> None:
        """Sanitise pasted text before an input widget gets it. Stop the idle work (learning in the user's
        pauses) when the user types, clicks or pastes. A movement of the mouse does not stop the idle work,
        because the user can move the mouse by accident."""
        moved = isinstance(event, events.MouseMove)
        if isinstance(event, events.InputEvent | events.Paste) and not moved:
            self.idle_learner.interrupt()
        if isinstance(event, events.Key):
            self.actions.rate.look_after_a_while()
        if isinstance(event, events.Paste):
            event.text = sanitize(event.text)
            if self.chat.selected_reply() is not None:
                self.screen.set_focus(self.chat.prompt)  # as the first letter of a message does
        if isinstance(event, events.Key) and not event.is_forwarded:
            if self.chat.selected_reply() is not None:
                await self._handle_key_of_reply(event)
                return
            await super().on_event(event)
            if event.key == "tab":
                await _wait_for_keys(self.chat.prompt)
            return
        await super().on_event(event)

    async def _handle_key_of_reply(self, event: events.Key) -> None:
        """Handle a key while a reply has the focus: run the key's binding, or type its character into the
        input and give the input the focus. The next key comes after this, so it acts where this key has put
        the focus. The key "m" has no binding on a complete reply: it is no character either, and the app says
        that the reply is complete. The keys of the reasons are no characters either: without a bad rating,
        the app says that a reason needs one."""
        self.app_focus = True
        for priority in (True, False):
            if await self._check_bindings(event.key, priority=priority):
                return
        if event.key == "m" and self.phase == "idle":
            self.actions.write.more()
        elif event.key in WHY_KEYS and self.phase == "idle":
            self.chat.status.flash(NO_BAD_RATING)
        elif character := typed_character(event):
            self.screen.set_focus(self.chat.prompt)
            self.chat.prompt.insert(character)

    @on(events.DescendantFocus)
    def _show_mode(self, event: events.DescendantFocus) -> None:
        self.chat.prompt.is_choosing = isinstance(event.widget, ReplyMessage)
        if event.widget is self.chat.prompt and self.chat.transcript.has_found and not self.chat.editing:
            # the user leaves a message that a search found, so show the end of the chat
            self.chat.start(self.actions.write.show_end)

    def on_app_focus(self) -> None:
        self.actions.rate.look_again()

    def on_resize(self, event: events.Resize) -> None:
        """Limit the input's height to a third of the screen, but at least three lines, so that the
        conversation has room."""
        self.chat.prompt.styles.max_height = max(3, event.size.height // 3)
        self._dock.on_resize()

    # Methods that open and leave the app

    async def _open(self) -> None:
        try:
            await self.actions.models.open_first()
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            if self.phase != "closing":
                self.end(error)

    async def action_quit(self) -> None:
        """Leave the app. The entry "Quit" of Textual's palette calls this method."""
        self.action_leave()

    def told_to_end(self, signum: int) -> None:
        """Leave the app after a signal, as Ctrl+Q does. A second thread closes the runtime. This second
        thread ends the process if the process still runs GRACE seconds after the close, for example because
        the terminal is gone."""
        self.hang_up(signum)
        threading.Thread(target=self._end_anyway, daemon=True).start()

    def hang_up(self, signum: int = signal.SIGHUP) -> None:
        """Leave the app as Ctrl+Q does. If the app does not run yet, leave it as soon as it runs. Any thread
        can call this method."""
        self.ended_by = signum
        if self._loop:
            # the event loop raises RuntimeError if the app has ended already
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.action_leave)

    def _end_anyway(self) -> None:
        self.host.close_now()
        time.sleep(GRACE)
        os._exit(exit_signals.exit_code(self.ended_by))

    def _fatal_error(self) -> None:
        """Keep the exception of a program defect, so that `run_app` prints one line. Textual's own method
        would print a traceback with all local variables."""
        self.failure = self.failure or self._exception
        self._close_messages_no_wait()

    # Methods that handle messages and commands of the user

    @on(Prompt.Submitted)
    async def _submit_prompt(self, event: Prompt.Submitted) -> None:
        await self.actions.submit(event.text)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the entries of the command palette: first the slash commands that have a title, if a chat is
        open, then Textual's own entries."""
        for entry in palette.entries() if self.chat.state.session else ():
            yield SystemCommand(entry.title, entry.help, partial(self.actions.choose, entry))
        yield from super().get_system_commands(screen)

    def deliver_screenshot(
        self, filename: str | None = None, path: str | None = None, time_format: str | None = None
    ) -> str | None:
        """Write a screenshot as an SVG file into the user's current folder, and return the file's path. If
        the file cannot be written, return None. The entry "Screenshot" of Textual's palette calls this
        method."""
        name = filename or time.strftime("ruvmlx-%Y-%m-%d-%H%M%S.svg")
        try:
            file = self.options.files.path(name)
            write_new(file, self.export_screenshot())
        except (RuvmlxError, OSError) as error:
            self.chat.status.flash(f"No screenshot: {error_line(error)}", 10)
            return None
        self.chat.status.flash(f"Written: {file.absolute()}", 10)
        return str(file)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy a text to the clipboard. Textual also calls this method, for text that the user selected on
        the screen."""
        self.actions.clipboard.to_system(text, super().copy_to_clipboard)

    # Methods that keys call

    def action_do(self, path: str, *arguments: object) -> None:
        """Call a method of `self.actions`: the binding "do('rate.rate', 'up')" calls
        `self.actions.rate.rate("up")`."""
        self.actions.method(path)(*arguments)

    def action_leave(self) -> None:
        self.actions.leave.leave()

    def action_interrupt(self) -> None:
        self.actions.leave.interrupt()

    def action_stop_or_write(self) -> None:
        """Stop the reply that the model writes, and give the input the focus."""
        self.actions.write.stop()
        self.action_write()

    def action_write(self) -> None:
        self.screen.set_focus(self.chat.prompt)

    def action_help(self) -> None:
        self.actions.command("help")


async def _wait_for_keys(prompt: Prompt) -> None:
    """Wait until the input has handled its keys, because Tab can move the focus, and the next key must go to
    the widget with the focus."""
    until = time.monotonic() + KEY_WAIT
    while prompt.message_queue_size and time.monotonic() < until:
        await asyncio.sleep(0)


async def _remember_theme(chat: ChatContext, name: str) -> None:
    try:
        await asyncio.to_thread(chat.options.saves_theme, theme.setting(name))
    except RuvmlxError as error:
        chat.status.flash(error_line(error))


def run_app(open_runtime: OpenRuntime, options: ChatOptions) -> int:
    """Run the chat app in the terminal, and return the exit code. The function closes the runtime even after
    an error."""
    app = ChatApp(open_runtime, options)
    with exit_signals.heard(app.told_to_end):
        try:
            app.run()
        except OSError:
            # Textual cannot restore a terminal that is gone, for example after the signal SIGHUP
            if not app.ended_by:
                raise
        finally:
            left = app.host.close_now()
            app.failure = app.failure or left
    if app.ended_by:
        exit_signals.let_go(sys.stdout, sys.stderr)
        return exit_signals.exit_code(app.ended_by)
    if app.failure is not None:
        print(f"ruvmlx: {error_line(app.failure)}", file=sys.stderr)
        return getattr(app.failure, "exit_code", 1)
    return app.return_value or 0
