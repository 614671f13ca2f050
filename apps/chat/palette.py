"""This module has the entries of the command palette (Ctrl+P): slash commands under their titles. Textual
adds more entries to the palette, for example "Quit"."""

from collections.abc import Iterator
from dataclasses import dataclass

from .commands import COMMANDS, Command, help_of


@dataclass(frozen=True)
class PaletteEntry:
    """An entry of the palette. types: the text that the entry types into the input if its command needs
    words; "" if the entry runs its command at once."""

    title: str
    help: str
    command: Command
    types: str = ""


def entries() -> Iterator[PaletteEntry]:
    for name, row in COMMANDS.items():
        usage = help_of(name)[0]
        for argument, title in row.presets.items():
            yield PaletteEntry(title, usage, Command(name, argument))
        if row.title:
            yield PaletteEntry(row.title, usage, Command(name), f"/{name} " if row.asks else "")
