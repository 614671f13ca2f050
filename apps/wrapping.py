"""This module breaks text into lines that fit the terminal. It breaks a line only between words, and never
inside a command in backquotes, so that a user can copy each command from one line."""

import os
import re
from typing import TextIO

UNLIMITED = 2000  # the width in columns if there is no terminal and no COLUMNS
USUAL_COLUMNS = 80  # the width of a terminal that does not tell its width
MIN_COLUMNS = 20  # text is wrapped at this width if the terminal is narrower
COMMAND = re.compile(r"`[^`\n]+`")
_UNIT = re.compile(r"(?<=\d) (?=[kMG]?B\b)")
_WORD = re.compile(r"\s*\S+")
# a row of a table: the entry of the first column, at least two spaces, and the text of the second column
_ROW = re.compile(r"(\s*\S.*?\s{2,})(\S.*)")
MIN_TEXT_COLUMNS = 20  # in a narrower second column, a text that does not fit begins below the first column
_HELD = "\ufdd0"  # a noncharacter, which sanitised text does not have; it is one column wide


def hold(text: str) -> str:
    """Return the text with a mark in place of each space inside a command, and of the space before a unit, so
    that no line ends there."""
    return _UNIT.sub(_HELD, COMMAND.sub(lambda command: command[0].replace(" ", _HELD), text))


def release(text: str) -> str:
    """Return the text with the spaces that `hold` replaced."""
    return text.replace(_HELD, " ")


def wrap(text: str, columns: int, hang: int = 0) -> str:
    """Return the text in lines of at most `columns` columns. A word or a command that is longer than a line
    stands on a line of its own, whole, with as much indent as fits. A line that fits stays as it is.
    hang: the number of columns by which the parts of a broken line, except its first part, are indented."""
    return "\n".join(_wrap_line(line, columns, hang) for line in text.split("\n"))


def _wrap_line(line: str, columns: int, hang: int) -> str:
    if len(line) <= columns // 2:  # no character is wider than two columns
        return line
    from rich.cells import cell_len

    if cell_len(line) <= columns:
        return line
    indent = line[: len(line) - len(line.lstrip())] + " " * hang
    lines = [""]
    for word in _WORD.findall(hold(line)):
        if lines[-1].strip() and cell_len((lines[-1] + word).rstrip()) > columns:
            lines[-1] = lines[-1].rstrip()
            word = word.lstrip()
            lines.append(indent[: max(0, columns - cell_len(word))])
        lines[-1] += word
    return release("\n".join(lines).rstrip())


def wrap_rows(text: str, columns: int) -> str:
    """Return the text with all rows of its tables broken into lines of at most `columns` columns.

    A table has two columns and at least two rows. The second column begins at the same place in each row, and
    the further lines of a broken row begin at this place, too. If the second column has little room, the text
    of a broken row begins in a line of its own, below the first column. All other lines stay as they are.
    """
    from rich.cells import cell_len

    lines = text.split("\n")
    rows = [_ROW.fullmatch(line) for line in lines]
    starts = [cell_len(row[1]) if row else None for row in rows]
    near = zip([None, *starts[:-1]], [*starts[1:], None], strict=True)
    return "\n".join(
        _wrap_row(row[1], row[2], start, columns) if row and start and start in others else line
        for line, row, start, others in zip(lines, rows, starts, near, strict=True)
    )


def _wrap_row(entry: str, text: str, start: int, columns: int) -> str:
    """Return a row of a table as `wrap_rows` breaks it. entry, text: the first and the second column. start:
    the place at which the second column begins, in terminal cells."""
    row = entry + text
    if columns - start >= MIN_TEXT_COLUMNS:
        return _wrap_line(row, columns, start - (len(entry) - len(entry.lstrip())))
    if _wrap_line(row, columns, 0) == row:
        return row
    return f"{_wrap_line(entry.rstrip(), columns, 0)}\n{_wrap_line(f'    {text}', columns, 0)}"


def wrap_for(text: str, stream: TextIO | None) -> str:
    """Return the text in lines that fit the terminal of a stream. The rows of tables are broken as
    `wrap_rows` breaks them. If the stream is no terminal, lines of up to UNLIMITED columns stay whole."""
    columns = width(stream) if stream is not None and stream.isatty() else UNLIMITED
    return wrap(wrap_rows(text, columns), columns)


def width(stream: TextIO | None) -> int:
    """Return the number of columns into which the text on a stream must fit."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return max(MIN_COLUMNS, int(asked))
    if stream is None or not stream.isatty():
        return UNLIMITED
    try:
        return max(MIN_COLUMNS, os.get_terminal_size(stream.fileno()).columns or USUAL_COLUMNS)
    except (OSError, ValueError):
        return USUAL_COLUMNS
