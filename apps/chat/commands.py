"""Slash commands: one table and one parser for the app and the plain mode."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ruvmlx.errors import UsageError

RATINGS = ("up", "down", "1", "2", "3", "4", "5")


@dataclass(frozen=True)
class Command:
    """A parsed line: `/rate up too long` is Command("rate", "up too long")."""

    name: str
    argument: str = ""


@dataclass(frozen=True)
class Spec:
    usage: str
    help: str
    takes_argument: bool = False


COMMANDS = {
    "rate": Spec("/rate up|down|1-5 [NOTE]", "rate the reply; short: /up /down /1 ... /5", True),
    "undo": Spec("/undo", "take the last rating back"),
    "rollback": Spec("/rollback N", "use version N of what was learned; 0: nothing", True),
    "learning": Spec("/learning", "what was learned, and what the machine does"),
    "again": Spec("/again", "write the reply again, beside this one"),
    "more": Spec("/more", "go on with a reply that was cut or stopped"),
    "edit": Spec("/edit [TEXT]", "put your last question in other words", True),
    "next": Spec("/next, /prev", "flip through the replies in this place"),
    "compare": Spec("/compare [TEXT]", "answer with and without what was learned", True),
    "choose": Spec("/choose 1|2", "which of the two is better; it is rated up", True),
    "copy": Spec("/copy [N]", "copy the reply, or its code block N", True),
    "chats": Spec("/chats [WORDS]", "your chats, or those with these words", True),
    "open": Spec("/open ID|N", "go on with a chat; N counts in /chats", True),
    "new": Spec("/new", "start a new chat"),
    "title": Spec("/title TEXT", "give this chat another title", True),
    "fork": Spec("/fork", "go on in a copy of this chat"),
    "delete": Spec("/delete", "delete this chat; /restore brings it back"),
    "export": Spec("/export FILE", "write this chat as .md or .json", True),
    "import": Spec("/import FILE", "take up a chat from a .json file", True),
    "system": Spec("/system [TEXT|none]", "show or change the system prompt", True),
    "model": Spec("/model [NAME|N]", "change the model; the chat stays", True),
    "models": Spec("/models", "the models that are here, numbered for /model"),
    "adapters": Spec("/adapters", "the adapters that there are"),
    "adapter": Spec("/adapter [NAME|none]", "show or change the adapter", True),
    "status": Spec("/status", "the model, and what it has learned"),
    "help": Spec("/help", "this list"),
    "quit": Spec("/quit", "leave; the chat is saved"),
}
_SHORT = {
    **{word: Command("rate", word) for word in RATINGS},
    "+": Command("rate", "up"),
    "-": Command("rate", "down"),
    "?": Command("help"),
    "exit": Command("quit"),
    "q": Command("quit"),
}
_TOLD_OF_AT = {"prev": "next", "restore": "delete"}  # commands that share another one's line
# "/usr/bin is full" and "/ what?" are no commands; "//text" sends "/text".
_FORM = re.compile(r"/([A-Za-z]+|[1-5+?-])(?:\s+(.*))?", re.DOTALL)


def parse(text: str) -> Command | None:
    """A line -> its command, or None when it is a message for the model.

    >>> parse("/rate up")
    Command(name='rate', argument='up')
    """
    match = _FORM.fullmatch(text.strip())
    if not match:
        return None
    word, argument = match[1].lower(), (match[2] or "").strip()
    short = _SHORT.get(word, Command(word))
    return _known(Command(short.name, f"{short.argument} {argument}".strip()))


def _known(command: Command) -> Command:
    if _TOLD_OF_AT.get(command.name, command.name) not in COMMANDS:
        raise UsageError(
            f"no command /{command.name}; /help lists them, and //{command.name} sends it as text"
        )
    if command.argument and not spec(command.name).takes_argument:
        raise UsageError(f"/{command.name} takes nothing after it, got {command.argument[:40]!r}")
    return command


def spec(name: str) -> Spec:
    """What is told of a command that there is."""
    return COMMANDS[_TOLD_OF_AT.get(name, name)]


def message_text(text: str) -> str:
    """What is sent to the model: "//path" was an escaped "/path"."""
    return text[1:] if text.startswith("//") else text


def parse_rating(argument: str) -> tuple[str, str]:
    """ "up too long" -> ("up", "too long")."""
    word, _, note = argument.partition(" ")
    rating = {"+": "up", "-": "down"}.get(word, word.lower())
    if rating not in RATINGS:
        raise UsageError(f"a rating is up, down or 1 to 5, got {word[:20]!r}; try {COMMANDS['rate'].usage}")
    return rating, note.strip()


def parse_number(argument: str, last: int, what: str) -> int | None:
    """ "2" -> 2, "" -> None; UsageError unless 1 to `last`."""
    if not argument:
        return None
    if not last:
        raise UsageError(f"there are no {what} in it")
    if not argument.isascii() or not argument.isdigit() or not 1 <= int(argument[:9]) <= last:
        raise UsageError(f"{what} are numbered from 1 to {last}, got {argument[:20]!r}")
    return int(argument)


def parse_version(argument: str) -> int:
    if not argument.isascii() or not argument.isdigit():
        raise UsageError(f"a version is a number that /learning shows, got {argument[:20]!r}")
    return int(argument[:9])


def help_lines(more: Iterable[tuple[str, str]] = ()) -> list[str]:
    """The commands, and `more` rows of the same kind, in two columns."""
    rows = [(spec.usage, spec.help) for spec in COMMANDS.values()] + list(more)
    width = max(len(left) for left, _ in rows)
    return [f"{left:<{width}}  {right}".rstrip() for left, right in rows]
