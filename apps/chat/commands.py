"""This module has the table of slash commands for the app, plain mode and the command palette. The module
also has the parser of typed commands.

To add a command, add a row to the table here and a step (a function that works on the runtime) to `steps/`.
If the app must do more than show the step's outcome, for example open a screen, add an action to `actions/`
too.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ruvmlx.errors import UsageError
from ruvmlx.ratings import RATINGS, REASONS
from ruvmlx.runtime import Runtime
from ruvmlx.text import did_you_mean

from .arguments import RATE_USAGE, WHY_USAGE
from .state import ChatState, Outcome, Step
from .steps import compare, library, models, rate, settings, summarize, tools, write


@dataclass(frozen=True)
class Command:
    """A slash command that the user typed: `/rate down too long` is Command("rate", "down too long")."""

    name: str
    argument: str = ""


@dataclass(frozen=True)
class CommandSpec:
    """A row of the table of slash commands."""

    usage: str  # the command and its arguments, for /help; "": the command is described by the previous row
    help: str
    step: Step  # the function that does the command's work with the runtime
    # path of a method of `actions.Actions`, which the app calls in place of `step`; "": the app calls `step`
    app: str = ""
    title: str = ""  # the command's name in the palette; "" if the palette does not show the command
    # argument -> title of the palette entry that runs the command with this argument
    presets: dict[str, str] = field(default_factory=dict)
    takes_argument: bool = False
    asks: bool = False  # True if the palette only types the command, because the user must add words
    during_reply: bool = False  # True if the command can run while the model writes a reply


def help_step(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return Outcome("\n".join(help_lines()))


def quit_step(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return Outcome(leaves=True)


COMMANDS = {
    "rate": CommandSpec(
        RATE_USAGE, "rate the reply; short: /up /down /1 ... /5", rate.rate, "rate.rate_as_typed",
        "Rate with stars and a note", {"up": "Rate up", "down": "Rate down"},
        takes_argument=True, asks=True, during_reply=True,
    ),
    "why": CommandSpec(
        WHY_USAGE, f"why it was bad: {', '.join(REASONS)}", rate.why, "rate.give_reason_as_typed",
        presets={word: f"Bad reply: {text}" for word, text in REASONS.items()},
        takes_argument=True, during_reply=True,
    ),
    "undo": CommandSpec(
        "/undo", "take the last rating back", rate.undo,
        title="Take the last rating back", during_reply=True,
    ),
    "rollback": CommandSpec(
        "/rollback N", "use version N of what was learned; 0: nothing", rate.rollback,
        title="Roll back what was learned", takes_argument=True, asks=True,
    ),
    "learning": CommandSpec(
        "/learning", "what was learned, and what the machine does", rate.learning, "panel.toggle",
        "Learning and machine: the side panel", during_reply=True,
    ),
    "details": CommandSpec(
        "/details", "figures of the last reply and lesson", rate.details,
        title="Details: figures of the last reply and lesson", during_reply=True,
    ),
    "explain": CommandSpec(
        "/explain [WORD]", "what a word here means, as in /explain KL", rate.explain,
        title="Explain a word", takes_argument=True, asks=True, during_reply=True,
    ),
    "again": CommandSpec(
        "/again", "write the reply again, beside this one", write.again, "write.again",
        "Write the reply again",
    ),
    "best": CommandSpec(
        "/best [N]", "write N (or auto) replies, show the best", write.best,
        title="Best of several replies", takes_argument=True, asks=True,
    ),
    "more": CommandSpec(
        "/more", "continue a reply that was cut or stopped", write.more, "write.more",
        "Continue a cut reply",
    ),
    "edit": CommandSpec(
        "/edit [TEXT]", "edit your last question", write.edit, "write.edit_as_typed",
        "Edit the question", takes_argument=True,
    ),
    "rewrite": CommandSpec(
        "/rewrite [TEXT]", "rewrite the reply; it learns from that", write.rewrite, "rewrite.as_typed",
        "Rewrite the reply", takes_argument=True,
    ),
    "next": CommandSpec(
        "/next, /prev", "switch between the replies in this place", write.next_reply, "write.next",
        "Next reply in this place",
    ),
    "prev": CommandSpec("", "", write.previous_reply, "write.previous", "Previous reply in this place"),
    "compare": CommandSpec(
        "/compare [TEXT]", "answer with and without what was learned", compare.compare_replies, "compare.ask",
        "Compare with the original model", takes_argument=True,
    ),
    "effect": CommandSpec(
        "/effect [TEXT]", "the same, and which is which", compare.show_effect, "compare.show_effect",
        "What was learned: a reply without and with it", takes_argument=True,
    ),
    "choose": CommandSpec(
        "/choose 1|2", "choose the better reply of /compare", compare.choose, "compare.choose",
        "Choose one of the compared replies", takes_argument=True, asks=True,
    ),
    "copy": CommandSpec(
        "/copy [N]", "copy the reply, or its code block N", write.copy, "clipboard.copy",
        "Copy the reply", takes_argument=True,
    ),
    "save": CommandSpec(
        "/save [N] FILE", "write code block N of the reply to a file", write.save,
        title="Save a code block to a file", takes_argument=True, asks=True,
    ),
    "find": CommandSpec(
        "/find WORDS", "find messages of this chat", write.find,
        title="Find in this chat", takes_argument=True, asks=True, during_reply=True,
    ),
    "goto": CommandSpec(
        "/goto N", "show message N, as /find numbers them", write.goto,
        title="Go to a message of this chat", takes_argument=True, asks=True,
    ),
    "summarize": CommandSpec(
        "/summarize [off]", "sum the oldest messages up, to save context", summarize.summarize,
        "summary.summarize", "Sum up the oldest messages", takes_argument=True,
    ),
    "chats": CommandSpec(
        "/chats [WORDS]", "list your chats, or those with these words", library.list_chats, "library.choose",
        "Chats: list and search", takes_argument=True,
    ),
    "open": CommandSpec(
        "/open ID|N", "open a chat (N: its number, in plain mode)", library.open_chat,
        takes_argument=True,
    ),
    "new": CommandSpec("/new", "start a new chat", library.new_chat, title="New chat"),
    "title": CommandSpec(
        "/title TEXT", "rename this chat", library.title,
        title="Rename this chat", takes_argument=True, asks=True,
    ),
    "pin": CommandSpec(
        "/pin", "show this chat first in lists, or no longer", library.pin, title="Pin this chat"
    ),
    "folder": CommandSpec(
        "/folder [NAME|none]", "put this chat into a folder of the list", library.folder,
        title="Folder of this chat", takes_argument=True, asks=True,
    ),
    "fork": CommandSpec("/fork", "continue in a copy of this chat", library.fork, title="Fork this chat"),
    "delete": CommandSpec(
        "/delete [now]", "delete this chat; now: for good, at once", library.delete,
        title="Delete this chat", takes_argument=True,
    ),
    "restore": CommandSpec(
        "/restore", "bring the deleted chat back, for a day", library.restore,
        title="Bring back a deleted chat",
    ),
    "export": CommandSpec(
        "/export FILE", "write this chat as .md or .json", library.export,
        title="Export this chat to a file", takes_argument=True, asks=True,
    ),
    "import": CommandSpec(
        "/import FILE", "add a chat from a .json file", library.import_file,
        title="Import a chat from a file", takes_argument=True, asks=True,
    ),
    "system": CommandSpec(
        "/system [TEXT|none]", "show or change the system prompt", models.system,
        title="System prompt of this chat", takes_argument=True, asks=True,
    ),
    "as": CommandSpec(
        "/as [NAME|save NAME]", "answer in a role: reviewer, teacher, your own", models.answer_as,
        title="Roles: system prompts by name", takes_argument=True, asks=True,
    ),
    "prompt": CommandSpec(
        "/prompt", "show what the model really reads", models.prompt, title="Prompt that the model reads"
    ),
    "model": CommandSpec(
        "/model [NAME|N]", "change the model; the chat stays", models.use_model, "models.use_as_typed",
        "Model by its name: a repository, a folder, a file", takes_argument=True, asks=True,
    ),
    "models": CommandSpec(
        "/models", "list the models here", models.list_models, "models.choose",
        "Models: list and change",
    ),
    "adapters": CommandSpec(
        "/adapters", "list what was learned, by name (adapters)",
        models.list_adapters, "models.choose_adapter",
        "What was learned, by name (adapters)",
    ),
    "adapter": CommandSpec(
        "/adapter [NAME|none]", "use what was learned as NAME (new: begin it)", models.use_adapter,
        title="Adapter by its name", takes_argument=True, asks=True,
    ),
    "tools": CommandSpec(
        tools.TOOLS_USAGE, "tools that the model may call; off at first", tools.tools, "tools.list_or_switch",
        "Tools: what the model may call", takes_argument=True,
    ),
    "tool": CommandSpec(
        "/tool NAME TEXT", "a message that must be answered by a tool", tools.call_tool, "write.call_tool",
        title="Ask a tool", takes_argument=True, asks=True,
    ),
    "set": CommandSpec(
        "/set [NAME VALUE]", "temperature and more: this chat, till you quit", settings.set_value,
        title="Settings of this chat's replies", takes_argument=True, asks=True,
    ),
    "status": CommandSpec(
        "/status", "the model, and what it has learned", models.status, title="Status of model and learning"
    ),
    "help": CommandSpec("/help", "this list", help_step, "help", "All commands and keys", during_reply=True),
    "quit": CommandSpec(
        "/quit", "leave; the chat is saved", quit_step, "leave.leave_as_typed", during_reply=True,
    ),
}  # fmt: skip

KEYS_HELP = (
    ("Enter, Ctrl+J", "send, new line (also Shift+Enter)"),
    ("Tab after / or @", "complete a command, a setting, a file's name"),
    ("Ctrl+E", "write the message in your own editor ($EDITOR)"),
    ("@name, F6", "put that file's text into the message; F6: a list"),
    ("Esc", "stop a reply and keep its text"),
    ("Ctrl+C", "clear the input (↑ shows the text); twice: quit"),
    ("Ctrl+Y, Ctrl+N, Ctrl+R", "rate up, rate down, take back"),
    ("Tab, then + - 1 ... 5", "choose a reply (↑ ↓) and rate it"),
    ("Tab, -, then > < ! ?", "why it is bad: too long, too short, tone, facts"),
    ("Tab, then r m e ← →", "again, more, edit the question, switch"),
    ("Tab, then E", "rewrite the reply; it learns from your version"),
    ("Tab, then y c t", "copy the reply, its code; show its thought"),
    ("Ctrl+T", "your question without and with what was learned"),
    ("Ctrl+G, Ctrl+O", "write the reply again, your chats"),
    ("↑ ↓", "in the first or last line: earlier messages"),
    ("F2", "side panel: what was learned, the machine"),
    ("F3, F4, F5", "models, adapters, fetch a better model"),
    ("F8", "sum up the oldest messages, to save context"),
    ("PgUp, PgDn", "scroll"),
    ("Ctrl+P, Ctrl+Q", "themes and more, quit"),
    ("", ""),
)

_SHORT = {
    **{word: Command("rate", word) for word in RATINGS},
    "+": Command("rate", "up"),
    "-": Command("rate", "down"),
    "?": Command("help"),
    "exit": Command("quit"),
    "q": Command("quit"),
}
# "/usr/bin is full" and "/ what?" are messages and no commands. "//text" sends the message "/text".
_FORM = re.compile(r"/([A-Za-z]+|[0-9+?-])(?:\s+(.*))?", re.DOTALL)


def parse(text: str) -> Command | None:
    """Return the command in a typed line, or None if the line is a message for the model. Raise UsageError
    for an unknown command, and for an argument of a command that takes none.

    >>> parse("/rate up")
    Command(name='rate', argument='up')
    """
    match = _FORM.fullmatch(text.strip())
    if not match:
        return None
    word, argument = match[1].lower(), (match[2] or "").strip()
    short = _SHORT.get(word, Command(word))
    return _require_known(Command(short.name, f"{short.argument} {argument}".strip()))


def _require_known(command: Command) -> Command:
    if command.name not in COMMANDS:
        raise UsageError(
            f"no command /{command.name}.{did_you_mean(command.name, COMMANDS)} /help lists them, and "
            f"//{command.name} sends it as text"
        )
    if command.argument and not COMMANDS[command.name].takes_argument:
        raise UsageError(f"/{command.name} takes nothing after it, got {command.argument[:40]!r}")
    return command


def help_of(name: str) -> tuple[str, str]:
    """Return the usage and the help text of a command. If the command's row has no usage, return the usage
    and the help text of the nearest row above that has a usage."""
    shown = ("", "")
    for other, row in COMMANDS.items():
        shown = (row.usage, row.help) if row.usage else shown
        if other == name:
            break
    return shown


def message_text(text: str) -> str:
    """Return the message for the model in a typed text. A second slash in front of a command makes the
    command a message: "//path" -> "/path". Other texts with two slashes, such as code, stay as they are."""
    return text[1:] if text.startswith("//") and _FORM.fullmatch(text[1:]) else text


def typed_text(message: str) -> str:
    """Return the text that the user must type to send a message: "/path" -> "//path"."""
    return f"/{message}" if _FORM.fullmatch(message.strip()) else message


def help_lines(keys: Iterable[tuple[str, str]] = ()) -> list[str]:
    """Return the lines of /help, with the commands in two columns. keys: rows (left column, right column)
    that come before the commands."""
    rows = [*keys, *((row.usage, row.help) for row in COMMANDS.values() if row.usage)]
    width = max(len(left) for left, _ in rows)
    return [f"{left:<{width}}  {right}".rstrip() for left, right in rows]
