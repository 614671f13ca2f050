"""The command palette (Ctrl+P): every slash command by its title, beside Textual's own entries."""

from collections.abc import Iterator
from dataclasses import dataclass

from .commands import COMMANDS, Command, help_of


@dataclass(frozen=True)
class PaletteEntry:
    """types: the text that the input gets if the command needs words; "" runs the command at once."""

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
