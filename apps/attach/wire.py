"""This module has the messages that a client (with the user's terminal) and its app on the server send over a
WebSocket.

    to the server   the first message is a text with a `Hello`; the next messages are the bytes from the
                    terminal, and texts with a new size: {"size": [80, 24]}
    to the client   bytes for the terminal, and texts: {"copy": TEXT} fills the clipboard; {"theme": NAME}
                    saves the setting `theme`; the last text is {"end": CODE, "error": LINE}, with the exit
                    code and a line for the user, or ""

A message with a size makes the app draw the whole screen again. A server that stops closes the
connection with the WebSocket code STOPPED.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATH = "/chat"
STOPPED = 1012  # the WebSocket close code that a server sends when it stops
Size = tuple[int, int]  # the size of a terminal: (columns, rows)
MOST_CELLS = 1000  # the maximum number of columns or rows; screens have fewer

# These environment variables describe the colours and the theme of the user's terminal.
ENVIRONMENT = ("TERM", "COLORTERM", "TERM_PROGRAM", "COLORFGBG", "NO_COLOR", "TEXTUAL_THEME")


@dataclass(frozen=True)
class Hello:
    """The first message of a client: facts of the terminal, and the options of the chat.

    folder: the user's current folder. place: the device and inode of this folder, by which the server knows
    whether the client is on the same machine. chat/options.py explains the fields for the chat's options.
    """

    size: Size
    environment: dict[str, str]
    folder: str
    place: tuple[int, int]
    session: str = "new"
    find: str = ""
    system: str | None = None
    replaces_system: bool = False
    theme: str = "auto"
    motion: bool = True
    keys: str = ""

    @classmethod
    def of(cls, size: Size, **chat: Any) -> "Hello":
        """Return a `Hello` with the environment and the folder of this process. chat: the options of the
        chat."""
        try:
            folder = os.getcwd()
        except OSError:  # the user's current folder was deleted
            folder = ""
        return cls(size, _of_terminal(os.environ), folder, place_of(folder), **chat)


def last_text(code: int, error: str) -> str:
    """Return the last text that the server sends to a client. code: the exit code. error: a line for the
    user, or ""."""
    return json.dumps({"end": code, "error": error})


def place_of(folder: str) -> tuple[int, int]:
    """Return the device and the inode of a folder, by which two processes see whether they mean the same
    folder. Return (0, 0) if there is no such folder."""
    try:
        found = os.stat(folder)
    except (OSError, ValueError):
        return 0, 0
    return found.st_dev, found.st_ino


def _of_terminal(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in ENVIRONMENT if name in environment}


def clamp_size(size: Size) -> Size:
    """Return the size with its columns and rows limited to 1 to MOST_CELLS."""
    columns, rows = size
    return min(max(columns, 1), MOST_CELLS), min(max(rows, 1), MOST_CELLS)
