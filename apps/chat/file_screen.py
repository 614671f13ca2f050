"""This module is the screen on which the user picks files for a message. The key Tab marks a file, and Enter
puts the names of all marked files and of the highlighted file into the message."""

from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding
from textual.content import Content

from . import keys
from .file_list import mention
from .models import PickerEntry
from .picker_screen import Load, PickerScreen


class FileScreen(PickerScreen):
    """A picker that returns the mentions of the picked files, for the message: "@one.py @two.py "."""

    BINDINGS: ClassVar = [Binding("tab", "mark", "Mark", show=False, priority=True, id="mark_file")]

    def __init__(self, load: Load) -> None:
        super().__init__("Files for the message", load, lambda words: "")
        self._marked: list[str] = []

    def hints(self) -> str:
        mark, close = keys.key_label(self.app, "mark_file", "tab"), keys.key_label(self.app, "close", "esc")
        return f"⏎ Put in   {mark} Mark several   {close} Close"

    def result(self, name: str) -> str:
        names = [*self._marked, *([] if name in self._marked else [name])]
        return "".join(f"{mention(each)} " for each in names)

    def _row(self, entry: PickerEntry) -> Content:
        return super()._row(replace(entry, in_use=entry.name in self._marked))

    def action_mark(self) -> None:
        """Mark the highlighted file. If the file is marked already, remove its mark."""
        at = self.options.highlighted
        if at is None or at >= len(self._shown):
            return
        name = self._shown[at].name
        if name in self._marked:
            self._marked.remove(name)
        else:
            self._marked.append(name)
        self.options.replace_option_prompt_at_index(at, self._row(self._shown[at]))
