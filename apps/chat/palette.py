"""This module has the entries of the command palette (Ctrl+P): the slash commands by their titles. Textual
adds entries of its own."""

from collections.abc import Iterator
from dataclasses import dataclass

from .commands import COMMANDS, Command, help_of


@dataclass(frozen=True)
class PaletteEntry:
    """An entry of the palette. types: the text that the entry puts into the input if the command needs words;
    if it is "", the entry runs the command at once."""

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
