"""This module suggests text that completes the user's input: commands after "/", arguments of commands, and
files after "@".

The function `suggestions` finds the suggestions and does not use the screen. The widget `SuggestionList`
shows the suggestions above the input. The key Tab puts a suggestion into the input.
"""

import os
import re
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from rich.cells import set_cell_size
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from ruvmlx.ratings import RATINGS, REASONS
from ruvmlx.text import sanitize

from . import roles
from .commands import COMMANDS, help_of
from .glossary import WORDS
from .steps.settings import NAMES as SETTINGS
from .user_files import UserFiles

MOST_ROWS = 6  # the maximum number of suggestions on the screen
MOST_NAME = 300  # the module suggests no files if more than this number of characters follow the "@"
MOST_FILES = 500  # the maximum number of matching names that the module reads from a folder
_COMMAND = re.compile(r"/([A-Za-z]*)")
_WORD = re.compile(r"/([a-z]+) (\S*)")
_WORDS = {"set": SETTINGS, "why": tuple(REASONS), "rate": RATINGS, "explain": tuple(WORDS)} | {
    "tools": ("on", "off")
}


@dataclass(frozen=True)
class Suggestion:
    """One suggestion for the typed line.

    text: the text that replaces the line from character number `start` on. usage, help: the usage and the
    help text of a suggested command, as in /help. goes_on: True if more words can follow, as after a file's
    name; if this is the only suggestion, Tab then adds a space.
    """

    text: str
    start: int
    usage: str = ""
    help: str = ""
    goes_on: bool = False


def suggestions(typed: str, is_first_line: bool, files: UserFiles) -> list[Suggestion]:
    """Return the suggestions for `typed`, the text of the line before the cursor. is_first_line: True if the
    line is the first line of the input, because only this line can begin with a command."""
    command, word = _COMMAND.fullmatch(typed), _WORD.fullmatch(typed)
    if command and is_first_line:
        return _commands(command[1].lower())
    if word and is_first_line and word[1] in (*_WORDS, "as"):
        known, at = (roles.names() if word[1] == "as" else _WORDS[word[1]]), word.start(2)
        return [
            Suggestion(w, at, goes_on=word[1] in ("set", "tools")) for w in known if w.startswith(word[2])
        ]
    at = typed.rfind("@")
    begun = typed[at + 1 :]
    if at < 0 or (not typed[:at].endswith((" ", "\t")) and at) or len(begun) > MOST_NAME:
        return []
    quoted = begun.startswith('"')
    if (not quoted and " " in begun) or begun.count('"') > 1:
        return []
    return [row for row in _files(begun.strip('"'), at + 1, quoted, files) if row.text != begun]


def _commands(begun: str) -> list[Suggestion]:
    return [
        Suggestion(f"/{name}", 0, *help_of(name), row.takes_argument)
        for name, row in COMMANDS.items()
        if name.startswith(begun)
    ]


def _files(begun: str, start: int, quoted: bool, files: UserFiles) -> list[Suggestion]:
    """Return suggestions for the file names in the folder of the typed path `begun`. A hidden file is
    suggested only if the user typed its dot.

    start: the number of the character in the line where the path begins. quoted: True if the path is in
    quotation marks.
    """
    if files.folder is None:
        return []
    folder, _, head = begun.rpartition("/")
    prefix = begun[: len(begun) - len(head)]
    found: list[str] = []
    with suppress(OSError, RuntimeError, ValueError):
        found = _names(os.scandir(files.path(prefix or folder or ".")), head)
    rows = list[Suggestion]()
    for name in found:
        whole = prefix + name
        spaced = quoted or " " in whole
        is_file = not whole.endswith("/")
        closed = '"' if is_file else ""
        text = f'"{whole}{closed}' if spaced else whole
        rows.append(Suggestion(text, start, goes_on=is_file))
    return rows


def _names(entries: "Iterable[os.DirEntry[str]]", head: str) -> list[str]:
    """Return the names that begin with the typed text `head`. Programs of macOS write an "é" into a file's
    name as two characters, and a keyboard types one, so the comparison takes both forms as equal (NFC)."""
    found, head = list[str](), unicodedata.normalize("NFC", head)
    for entry in entries:
        begins = unicodedata.normalize("NFC", entry.name).startswith(head)
        if begins and (head or not entry.name.startswith(".")):
            found.append(entry.name + ("/" if entry.is_dir() else ""))
        if len(found) >= MOST_FILES:
            break
    return sorted(name for name in found if name.isprintable() and '"' not in name)


class SuggestionList(Static):
    """A widget that lists the suggestions and marks the suggestion that Tab put into the input last. The
    widget is hidden while it has no suggestions."""

    rows: reactive[tuple[Suggestion, ...]] = reactive((), layout=True)
    taken: reactive[int] = reactive(-1)  # number of the suggestion that Tab put into the input; -1: none

    def on_mount(self) -> None:
        self.display = False

    def watch_rows(self) -> None:
        self.display = bool(self.rows)

    def render(self) -> Content:
        most = max(1, min(MOST_ROWS, (self.app.size.height - 10) // 2))
        first = max(0, min(self.taken - most // 2, len(self.rows) - most))
        shown = self.rows[first : first + most]
        width = max((len(row.usage) for row in shown), default=0)
        lines = []
        for place, row in enumerate(shown, first):
            text = f"{row.usage:<{width}}   {row.help}" if row.help else sanitize(row.text)
            line = Content(set_cell_size(text, self.size.width).rstrip())
            lines.append(line.stylize("$accent") if place == self.taken else line)
        more = len(self.rows) - len(shown)
        lines.append(Content("Tab takes the next" + (f" · {more} more" if more else "")))
        return Content("\n").join(lines)
