"""This package has the app's actions: each class has the actions of one subject, for example of ratings. The
class `Actions` finds the method that a slash command or a key calls."""

import inspect
from collections.abc import Awaitable, Callable
from operator import attrgetter

from ruvmlx.errors import RuvmlxError
from ruvmlx.ratings import BAD
from ruvmlx.runtime import Runtime

from ..commands import COMMANDS, KEYS_HELP, Command, help_lines, parse
from ..context import ChatContext
from ..messages import Notice, ReplyMessage, UserMessage
from ..palette import PaletteEntry
from ..state import Outcome
from ..view_model import Standing
from .clipboard import ClipboardActions
from .compare import CompareActions
from .draft import DraftActions
from .edit import EditActions
from .leave import LeaveActions
from .library import LibraryActions
from .models import ModelActions
from .panel import PanelActions
from .rate import RateActions
from .rewrite import RewriteActions
from .select import SelectActions
from .summarize import SummaryActions
from .tools import ToolActions
from .write import WriteActions

# phase -> what the app says about a message that waits for the end of this phase
SENT_LATER = {"opening": "Sent once the model is open", "switching": "Sent in a moment"}


class Actions:
    def __init__(self, chat: ChatContext) -> None:
        self._chat = chat
        self._help: Notice | None = None  # the help that the conversation shows
        self.panel = PanelActions(chat)
        self.rate = RateActions(chat, self.panel)
        self.tools = ToolActions(chat)
        self.edit = EditActions(chat)
        self.write = WriteActions(chat, self.rate, self.tools, self.edit)
        self.library = LibraryActions(chat, self.rate, self.edit)
        self.clipboard = ClipboardActions(chat, self.rate)
        self.models = ModelActions(chat, self.library, self.rate, self.write, self.edit, self._use_adapter)
        self.fetch = self.models.fetch
        self.compare = CompareActions(chat, self.rate, self.write)
        self.rewrite = RewriteActions(chat, self.rate, self.write, self.edit)
        self.summary = SummaryActions(chat, self.rate)
        self.leave = LeaveActions(chat, self.write, self.clipboard)
        self.select = SelectActions(chat)
        self.draft = DraftActions(chat, self.select)

    async def submit(self, text: str) -> None:
        """If the user rewrites a reply, save the typed text as the new version of the reply. If the text is a
        slash command, run the command. Send any other text as a message to the model. If the app cannot run
        the command or send the message now, put the text back into the input."""
        edited = self.edit.end()
        if edited is None:
            await self.write.show_end()
        elif isinstance(edited, ReplyMessage):
            if self._must_wait(None):
                self._wait(text, edited)
            else:
                self.rewrite.save(edited, text.strip())
            return
        try:
            command = parse(text)
        except RuvmlxError as error:
            prompt = self._chat.prompt
            prompt.add_to_history(text)
            self.edit.put_back(text, edited.message_id if edited else None)
            if prompt.text == text:
                prompt.select_all()  # the next letter replaces the refused command
            await self._chat.show_error(error)
            return
        if self._must_wait(command):
            self._wait(text, edited)
            return
        self._chat.prompt.add_to_history(text)
        if command is None:
            self.write.send(text, edited)
        elif COMMANDS[command.name].during_reply:
            # start() does not wait for the end of the command, because the user could not type during this
            # wait
            self.start(command)
        else:
            await self.obey(command)

    def choose(self, entry: PaletteEntry) -> None:
        """Run the command of an entry of the command palette. If the command needs words from the user, only
        put the text of the command into the input."""
        if entry.types:
            self.edit.leave()  # in the input of an edit, Enter saves the text, and the command would be it
            self._chat.prompt.begin_command(entry.types)
        elif self._must_wait(entry.command):
            self._wait()
        else:
            self.start(entry.command)

    def _must_wait(self, command: Command | None) -> bool:
        phase = self._chat.phase
        if phase == "idle" or (command and command.name == "quit"):
            return False
        return not (phase == "replying" and command and COMMANDS[command.name].during_reply)

    def _wait(self, text: str = "", edited: UserMessage | ReplyMessage | None = None) -> None:
        """Tell the user that the app cannot send the message `text` or run a command yet. Put the message
        back into the input. In the phases of SENT_LATER, the app sends this message when the phase ends,
        unless the user has changed the text in the input."""
        chat = self._chat
        if text:
            self.edit.put_back(text, edited.message_id if edited else None)
        chat.waiting = chat.prompt.text if text and chat.phase in SENT_LATER else ""
        chat.status.flash(SENT_LATER[chat.phase] if chat.waiting else "Still replying: Esc stops")

    def start(self, command: Command) -> None:
        """Start a slash command, and return before the command ends."""
        self._chat.start(lambda: self.obey(command))

    async def obey(self, command: Command) -> None:
        """Carry out a slash command. If the command fails, show its error."""
        try:
            row = COMMANDS[command.name]
            if row.app:
                result = self.method(row.app)(command.argument)
                if inspect.isawaitable(result):
                    await result
            else:
                await self._take_step(command)
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            await self._chat.show_error(error)

    def command(self, name: str, argument: str = "") -> None:
        """Start a slash command because the user pressed its key. If the command must wait for the end of the
        reply, only tell the user."""
        command = Command(name, argument)
        if self._chat.phase == "replying" and self._must_wait(command):
            self._wait()
        else:
            self.start(command)

    def take_back(self) -> None:
        """Take back the rating of the selected reply, because the user pressed the key "Undo" (u) while this
        reply had the focus."""
        self.rate.take_back()

    def method(self, path: str) -> Callable[..., Awaitable[None] | None]:
        """Return the method at a path of attributes: "write.again" gives `self.write.again`."""
        found: Callable[..., Awaitable[None] | None] = attrgetter(path)(self)
        return found

    def offers(self, path: str, argument: str = "") -> bool:
        """Return False if the method at the attribute path `path` would do nothing now. The app then hides
        the method's key. Return True for the methods that the code below does not name."""
        chat, what = self._chat, argument if path == "command" else path
        session, idle = bool(chat.state.session), chat.phase == "idle"
        if what == "write.stop":
            return chat.can_stop
        if what == "edit.cancel":
            return chat.editing is not None
        if what in ("write.again", "write.more", "write.edit", "write.flip"):
            return session and idle and self.write.may(what.removeprefix("write."))
        if what in ("library.choose", "models.choose", "models.choose_adapter", "fetch.go", "summarize"):
            return session and idle
        if what == "take_back":
            return session and chat.key_hints.can_take_back
        if what == "clipboard.copy_next_code":
            reply = chat.chosen_reply()
            return reply is not None and bool(reply.code_blocks)
        if what == "rewrite.begin":
            return session and idle and bool(chat.transcript.replies)
        if what == "rate.give_reason":
            reply = chat.reply_in_view()
            rating = reply and (reply.coming_rating or reply.rating)
            return rating in BAD and not self.rate.is_too_early
        if what == "draft.complete_or_choose":
            return bool(chat.suggestions.rows) or self.offers("select.select")
        if what in ("rate.rate", "select.select"):
            too_early = what == "rate.rate" and self.rate.is_too_early
            return session and not too_early and bool(chat.transcript.replies)
        return session and chat.phase != "opening" if what == "undo" else True

    async def _take_step(self, command: Command) -> None:
        """Run the command's step (the function that does the command's work) in the runtime's thread, and
        show the outcome of the step. If the step can open another chat, new messages wait for it."""
        if COMMANDS[command.name].during_reply:
            await self._show_step(command)
        else:
            with self._chat.switching():
                await self._show_step(command)

    async def _show_step(self, command: Command) -> None:
        state, step = self._chat.state, COMMANDS[command.name].step
        selected = self._chat.selected_reply()
        state.selected = selected.message_id if selected else None

        def work(runtime: Runtime) -> tuple[Outcome, Standing | None]:
            outcome = step(runtime, state, command.argument)
            if not outcome.learned:
                return outcome, None
            return outcome, Standing.of(runtime, state.session, state.options.max_new_tokens)

        outcome, standing = await self._chat.host.call_between(work)
        if standing:
            self._chat.status.message = ""  # what a rating changed: another adapter or version is in use now
            self.rate.show(standing)
        await self._show(outcome)

    async def _show(self, outcome: Outcome) -> None:
        if outcome.opens:
            await self.library.open(outcome.opens, outcome.message)
        elif outcome.message is not None:
            await self.library.open(self._chat.state.session, outcome.message)
        if outcome.notice:
            await self._chat.transcript.add(Notice(outcome.notice))
        if outcome.flash:
            self._chat.status.flash(outcome.flash, outcome.seconds)

    async def help(self, _: str = "") -> None:
        """Show the help at the end of the conversation. If the help stands there already, remove it."""
        transcript, shown = self._chat.transcript, self._help
        is_last = shown is not None and shown.is_attached and transcript.children[-1] is shown
        if shown is not None and shown.is_attached:
            await shown.remove()
        self._help = None
        if not is_last:
            self._help = Notice("\n".join(help_lines(KEYS_HELP)))
            await transcript.add(self._help)

    async def _use_adapter(self, name: str) -> None:
        await self.obey(Command("adapter", name))
