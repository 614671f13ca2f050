"""This module is a screen with a list, for example of models or adapters. The letters that the user types
filter the list."""

import asyncio
import unicodedata
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.fuzzy import FuzzySearch
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ruvmlx.text import one_line

from . import keys
from .errors import chat_error_line
from .models import PickerEntry
from .ordered_keys import OrderedInput

Load = Callable[[], "list[PickerEntry]"]


class PickerScreen(ModalScreen[str | None]):
    """A screen that returns the name of the chosen entry, or None if the user closes the screen. If the
    function `new` returns a line for the typed text, the user can also choose the typed text as a name."""

    BINDINGS: ClassVar = [*keys.OF_LISTS]

    def __init__(self, title: str, load: Load, new: Callable[[str], str], words: str = "") -> None:
        """load: a function that returns the entries; a separate thread calls it. new: a function that returns
        the line for a typed text, for example "Fetch owner/name", or "" if the text is no name. words: the
        text with which the filter begins."""
        super().__init__()
        self._title, self._load, self._new, self._words = title, load, new, words
        self._entries: list[PickerEntry] = []
        self._shown: list[PickerEntry] = []
        self._search = FuzzySearch()
        self._missing = "Looking…"

    def compose(self) -> ComposeResult:
        with Vertical(id="picker"):
            yield OrderedInput(self._words, placeholder="Type to find", select_on_focus=False)
            yield OptionList()
            yield Static(markup=False, id="hints")

    def on_mount(self) -> None:
        self.query_one("#picker").border_title = self._title
        self._say(self.hints())
        self._fill()

    def hints(self) -> str:
        return f"⏎ Use   {keys.key_label(self.app, 'close', 'esc')} Close"

    def result(self, name: str) -> str:
        """Return the text that the screen returns to its caller. name: the name of the entry that the user
        chose."""
        return name

    @property
    def options(self) -> OptionList:
        return self.query_one(OptionList)

    @work(exclusive=True)
    async def _fill(self) -> None:
        try:
            self._entries = await asyncio.to_thread(self._load)
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            self._say(chat_error_line(error))
        self._missing = "Nothing matches"
        self._find()

    def _find(self) -> None:
        """Show the entries that match the typed letters, with the best match first."""
        words = self._words.strip()
        scored = [(self._match(entry.name)[0] if words else 1.0, entry) for entry in self._entries]
        self._shown = [entry for score, entry in sorted(scored, key=lambda pair: -pair[0]) if score > 0]
        rows = [Option(self._row(entry), disabled=bool(entry.problem)) for entry in self._shown]
        if words and not any(entry.name == words for entry in self._shown) and self._new(words):
            self._shown.append(PickerEntry(words, ""))
            rows.append(Option(Content(f"  {one_line(self._new(words))}")))
        self.options.clear_options()
        self.options.add_options(rows or [Option(self._missing, disabled=True)])
        places = [n for n, entry in enumerate(self._shown) if not entry.problem]
        in_use = [n for n in places if self._shown[n].in_use]
        self.options.highlighted = next(iter(in_use if not words and in_use else places), None)

    def _match(self, name: str) -> tuple[float, Sequence[int]]:
        """Return (score, places): the score of the match of a name with the typed letters (0: no match), and
        the places of these letters in the name as `_shown_name` returns it."""
        return self._search.match(_shown_name(self._words.strip()), _shown_name(name))

    def _row(self, entry: PickerEntry) -> Content:
        """Return the row of an entry, cut to the list's width. The name is at the left, and the facts are at
        the right edge. If the user cannot choose the entry, a second line says why."""
        mark = "● " if entry.in_use else "  "
        room = max(10, self.options.size.width - cell_len(mark + entry.facts) - 3)
        safe = _shown_name(one_line(entry.name))
        name = safe if cell_len(safe) <= room else set_cell_size(safe, room - 1) + "…"
        found = Content(name)
        for at in self._match(name)[1] if self._words.strip() else ():
            found = found.stylize("bold $accent", at, at + 1)
        rest = " " * (room - cell_len(name) + 1)
        row = Content.assemble((mark, "$accent"), found, rest, (entry.facts, "$secondary"))
        if not entry.problem:
            return row
        problem = Content.styled(f"    {entry.problem}", "$error")
        return row + "\n" + problem.truncate(self.options.size.width - 2, ellipsis=True)

    def on_resize(self) -> None:
        self._find()

    @on(Input.Changed)
    def _filter_models(self, event: Input.Changed) -> None:
        if event.value != self._words:
            self._words = event.value
            self._find()

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _dismiss_choice(self) -> None:
        at = self.options.highlighted
        if at is not None and at < len(self._shown) and not self._shown[at].problem:
            self.dismiss(self.result(self._shown[at].name))

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_move(self, step: int) -> None:
        """Move the highlight down by `step` entries (up, if `step` is negative), but not past the ends of the
        list. Skip entries that the user cannot choose."""
        places = [n for n, entry in enumerate(self._shown) if not entry.problem]
        if places:
            at = self.options.highlighted
            now = places.index(at) if at in places else 0
            self.options.highlighted = places[max(0, min(now + step, len(places) - 1))]

    def _say(self, text: str) -> None:
        self.query_one("#hints", Static).update(Content(text))


def _shown_name(name: str) -> str:
    """Return the name in the Unicode form NFC. In this form, a letter with an accent is one character. A
    keyboard types one character, but macOS programs write two characters into a file's name."""
    return unicodedata.normalize("NFC", name)
