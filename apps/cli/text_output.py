"""This module prints text for people: sentences, tables and hints that fit the terminal.

On a terminal, text is wrapped at the terminal's width and has colours, unless NO_COLOR is set. In a file or
pipe, each sentence and each row is one line of up to 2,000 columns, so that programs such as grep and cut
work. The variable COLUMNS sets a width in both cases.
"""

import io
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ruvmlx.text import count as count
from ruvmlx.text import one_line, sanitize

from ..wrapping import COMMAND, hold, release, width, wrap

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_TRAILING = re.compile(r"[ \t]+((?:\x1b\[0m)?)[ \t]*$", re.MULTILINE)  # spaces at the end of a line
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@dataclass(frozen=True)
class TableColumn:
    """A column of a table. right: True if the cells are aligned to the right. cut: True if long cells are cut
    to one line, so that the other columns fit. keep: True if the column is never narrower than its text.
    style: the name of a style of the library rich. least: the least width, so that the columns of several
    tables are aligned."""

    name: str
    right: bool = False
    cut: bool = False
    keep: bool = True
    style: str = ""
    least: int = 0


def say(text: str, style: str = "") -> None:
    """Print sentences. A command in backticks has a colour of its own. style: the name of a style of the
    library rich."""
    _print(_text(wrap(sanitize(text), width(sys.stdout)), style))


def hint(text: str) -> None:
    """Print a remark in a dim colour: a proposal for the user's next step, or the meaning of a table."""
    say(text, "dim")


def table(columns: Sequence[TableColumn], rows: Iterable[Sequence[str]], header: bool = True) -> None:
    """Print a table: the names of the columns, then the rows. A newline in a cell becomes a space.
    header: False if the names of the columns were printed before, with an earlier part of the table."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=header)
    for column in columns:
        justify: Any = "right" if column.right else "left"
        grid.add_column(
            column.name,
            justify=justify,
            no_wrap=column.keep and not column.cut,
            overflow="fold",
            min_width=column.least or None,
        )
    for row in rows:
        grid.add_row(*(_cell(cell, column) for cell, column in zip(row, columns, strict=True)))
    _print(grid)


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print each fact on a line: the name of the fact, then its value. If a value is too long for the line,
    it continues on the next line, in the column of the values. The function does not break a path that is too
    long for a line."""
    from rich.cells import cell_len

    pairs = [(one_line(name), one_line(value)) for name, value in rows]
    first = max((cell_len(name) for name, _ in pairs), default=0) + 2
    for name, value in pairs:
        line = _text(wrap(f"{name}{' ' * (first - cell_len(name))}{value}", width(sys.stdout), first))
        line.stylize("bold", 0, len(name))
        _print(line)


# -- words for times and paths --------------------------------------------------------------


def ago(then: float) -> str:
    """Return how long ago a time was, in words: "2 minutes ago". If the time was over two weeks ago, return
    the date. then: the time in seconds since the epoch."""
    passed = time.time() - then
    if passed < _MINUTE:
        return "just now"
    for unit, seconds, limit in (
        ("minute", _MINUTE, _HOUR),
        ("hour", _HOUR, _DAY),
        ("day", _DAY, 14 * _DAY),
    ):
        if passed < limit:
            return f"{count(int(passed // seconds), unit)} ago"
    return time.strftime("%Y-%m-%d", time.localtime(then))


def time_left(until: float) -> str:
    """Return how much time is left, in words: "23 hours". until: the time in seconds since the epoch."""
    remaining = max(0.0, until - time.time())
    if remaining < _HOUR:
        return count(int(remaining // _MINUTE) + 1, "minute")
    return count(int(remaining // _HOUR), "hour")


def short_path(path: str | Path) -> str:
    """Return a path with ~ in place of the home folder."""
    home, text = str(Path.home()), str(path)
    return "~" + text[len(home) :] if home != "/" and text.startswith(home + os.sep) else text


def shell_path(path: str | Path) -> str:
    """Return a path as a word of a shell command, with ~ in place of the home folder. The word has quotation
    marks if the shell needs them: the data folder of macOS has a space in its name."""
    short = short_path(path)
    return f"~/{shlex.quote(short[2:])}" if short != str(path) else shlex.quote(short)


def short_paths(text: str) -> str:
    """Return a sentence with ~ in place of the home folder, in each path."""
    home = str(Path.home())
    return text if home == "/" else re.sub(rf"(?<!\S){re.escape(home)}(?={re.escape(os.sep)})", "~", text)


# -- printing ----------------------------------------------------------------------------------------


def _cell(text: str, column: TableColumn) -> "Text":
    cell = _text(hold(one_line(text)), column.style)
    cell.no_wrap, cell.overflow = (True, "ellipsis") if column.cut else (None, "fold")
    return cell


def _text(text: str, style: str = "") -> "Text":
    """Return the text as an object of the library rich, with colours for the style and for commands in
    backticks. The library rich does not break a long word, for example a path, into two lines."""
    from rich.text import Text

    shown = Text(text, style=style, overflow="ignore")
    shown.highlight_regex(COMMAND, "not dim cyan")
    return shown


def _print(shown: "RenderableType") -> None:
    """Convert the object to text with the library rich, and write this text to stdout with click."""
    from rich.console import Console
    from rich.text import Text

    file, colour = io.StringIO(), _colour()
    console = Console(
        file=file,
        width=width(sys.stdout),
        force_terminal=bool(colour),
        color_system="standard" if colour else None,
        legacy_windows=False,
        highlight=False,
    )
    for part in shown.split("\n", allow_blank=True) if isinstance(shown, Text) else [shown]:
        console.print(part, soft_wrap=isinstance(shown, Text), crop=False)
    lines = _TRAILING.sub(r"\1", release(file.getvalue()))
    click.echo(lines, nl=False, color=colour)


def _colour() -> bool:
    """Return True if the output is a terminal with colours and the variable NO_COLOR is not set
    (no-color.org)."""
    dumb = os.environ.get("TERM") in ("dumb", "")
    return is_terminal() and not os.environ.get("NO_COLOR") and not dumb


def is_terminal() -> bool:
    """Return True if standard output is a terminal. Return False if the shell has closed standard output."""
    return sys.stdout is not None and sys.stdout.isatty()
