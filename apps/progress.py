"""This module shows the progress of a model's download and loading on a terminal, for `pull`, `generate`,
plain mode and other commands."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.cells import cell_len, set_cell_size

from ruvmlx import settings
from ruvmlx.memory.load_plan import Plan
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.models.find.variants import FileChoice
from ruvmlx.progress import QUIET, Progress, Watch
from ruvmlx.text import one_line, size

from .wrapping import wrap

PATIENCE = 0.7  # seconds before the first line of progress, because most models open faster
STILL = 10.0  # seconds between two lines of progress for screen readers


def is_first_run() -> bool:
    """Return True if the store does not exist yet. Call this function before the program opens the store,
    because the opening creates the store."""
    return not settings.store_file().exists()


def plan_lines(plan: Plan, columns: int) -> list[str]:
    """Return the lines of a load plan (the model and its memory) in two aligned columns. columns: the width
    of the terminal."""
    rows = plan.rows()
    first = max(len(word) for word, _ in rows) + 2
    return [wrap(f"{word:<{first}}{one_line(text)}", columns, first) for word, text in rows]


class TerminalLine:
    """A line of the terminal that shows progress; each new report of progress overwrites the line. For screen
    readers, a report is a new line, at most one in STILL seconds."""

    def __init__(self, sink: TextIO, still: bool = False):
        """still: True if no line is overwritten (for screen readers)."""
        self._sink, self._still = sink, still
        self._quiet_until = time.monotonic() + (STILL if still else PATIENCE)
        self._open = False  # True while the terminal shows a line that the next line can overwrite

    def progress(self, progress: Progress) -> None:
        now = time.monotonic()
        if now < self._quiet_until:
            return
        if self._still:
            self._quiet_until = now + STILL
            self.say(one_line(progress.line))
        else:
            self._write_over(one_line(progress.line))

    def show_at_once(self, text: str) -> None:
        """Show a line at once, without waiting PATIENCE seconds. The next report of progress overwrites this
        line."""
        self._write_over(text)

    def say(self, *lines: str) -> None:
        self.erase()
        columns = shutil.get_terminal_size().columns
        self._sink.write("".join(f"{wrap(line, columns)}\n" for line in lines))
        self._sink.flush()

    def erase(self) -> None:
        """Clear the line, so that the next output begins on an empty line."""
        if self._open:
            self._open = False
            self._sink.write("\r\x1b[K")
            self._sink.flush()

    def _write_over(self, line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        shown = line if cell_len(line) <= width else set_cell_size(line, width)
        self._open = True
        self._sink.write(f"\r{shown}\x1b[K")
        self._sink.flush()


class TerminalWatch(Watch):
    """A watch that shows the progress of a model's opening. On the first run of ruvmlx and before a download,
    the watch also shows the load plan (the model and its memory)."""

    def __init__(self, line: TerminalLine, first: bool = False):
        self._line, self._first = line, first
        self._told = False  # True after the plan was shown

    def note_choice(self, choice: FileChoice) -> None:
        self._line.say(*choice.lines)

    def note_plan(self, plan: Plan) -> None:
        if (self._first or plan.facts.to_fetch) and not self._told:
            self._told = True
            self._line.say(*plan_lines(plan, shutil.get_terminal_size().columns))

    def progress(self, progress: Progress) -> None:
        self._line.progress(progress)


class PullWatch(Watch):
    """A watch for the command `pull` that shows the files to download and the progress. Without a terminal,
    the watch shows only which of several files of the model was chosen, and why."""

    def __init__(self, line: TerminalLine, terminal: bool = True):
        self._line, self._terminal = line, terminal

    def note_choice(self, choice: FileChoice) -> None:
        self._line.say(*choice.lines)

    def note_facts(self, facts: Facts) -> None:
        self.fetches = self.fetches or facts.to_fetch > 0
        if facts.to_fetch and self._terminal:
            missing, whole = size(facts.to_fetch), size(facts.bytes)
            rest = "" if missing == whole else f" of {whole}; the rest is here already"
            self._line.say(f"{one_line(facts.name)}: {missing} to download{rest}.")

    def progress(self, progress: Progress) -> None:
        if self._terminal:
            self._line.progress(progress)


@contextmanager
def watching(still: bool = False, pull: bool = False) -> Iterator[Watch]:
    """Yield a watch that writes to stderr. If stderr is no terminal, the watch writes no progress.

    still: True if no line is overwritten (for screen readers). pull: True for a `PullWatch`.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield PullWatch(TerminalLine(sys.stderr), terminal=False) if pull and sys.stderr else QUIET
        return
    line = TerminalLine(sys.stderr, still)
    try:
        yield PullWatch(line) if pull else TerminalWatch(line, is_first_run())
    finally:
        line.erase()
