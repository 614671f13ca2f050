"""What goes between a terminal and its app on the server, over a WebSocket.

    up      first one text: a `Hello`; then bytes as the terminal sends them, and texts: {"size": [80, 24]}
    down    bytes for the terminal, and texts: {"copy": TEXT} fills the clipboard; the last one is
            {"end": CODE, "error": LINE}, with the exit code and a line for the user, or ""

A new size also asks the app to draw all of the screen again. The server closes with STOPPED if it stops.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATH = "/chat"
STOPPED = 1012  # the WebSocket's code for a server that stops
Size = tuple[int, int]  # columns, rows
MOST_CELLS = 1000  # columns, or rows: no screen has more

# Variables that say what the terminal can show.
ENVIRONMENT = ("TERM", "COLORTERM", "TERM_PROGRAM", "COLORFGBG", "NO_COLOR", "TEXTUAL_THEME")


@dataclass(frozen=True)
class Hello:
    """The terminal, and the chat that its user wants.

    folder: where the user is; its place: device and inode, by which a server knows whether it is on the same
    machine. The other fields: as in chat/options.py.
    """

    size: Size
    environment: dict[str, str]
    folder: str
    place: tuple[int, int]
    session: str = "new"
    find: str = ""
    system: str | None = None
    theme: str = "auto"
    motion: bool = True
    keys: str = ""

    @classmethod
    def of(cls, size: Size, **chat: Any) -> "Hello":
        """From this process's surroundings."""
        try:
            folder = os.getcwd()
        except OSError:  # it was deleted
            folder = ""
        return cls(size, _of_terminal(os.environ), folder, place_of(folder), **chat)


def last_text(code: int, error: str) -> str:
    """What the server sends at the end."""
    return json.dumps({"end": code, "error": error})


def place_of(folder: str) -> tuple[int, int]:
    """Device and inode of a folder; zeros if there is none."""
    try:
        found = os.stat(folder)
    except (OSError, ValueError):
        return 0, 0
    return found.st_dev, found.st_ino


def _of_terminal(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in ENVIRONMENT if name in environment}


def clamp_size(size: Size) -> Size:
    """A size that can be drawn."""
    columns, rows = size
    return min(max(columns, 1), MOST_CELLS), min(max(rows, 1), MOST_CELLS)
