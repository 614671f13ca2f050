"""Progress of opening a model: shown on a terminal, and nowhere else."""

import io
import os
import sys

import pytest
from ruvmlx.apps import progress
from ruvmlx.apps.progress import PullWatch, TerminalLine, TerminalWatch, watching

from ruvmlx.backends.select import Choice
from ruvmlx.memory.load_plan import Plan
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.progress import QUIET, Progress

from ..chat.terminal import Terminal
from ..models.test_fetching import served  # noqa: F401

LOADING = Progress("Loading m", 45_000_000, 97_000_000)
NATIVE = Choice("native", "cpu", "native avx2, 2 threads", "MLX finds no GPU")


@pytest.fixture
def now(monkeypatch):
    """A clock that moves only when a test moves it."""
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return clock


def plan_of(tiny, to_fetch=0, name="m"):
    f = tiny
    facts = Facts(name, f.path, f.format, f.shape, f.parameters, f.bytes, to_fetch)
    return Plan.of(facts, NATIVE, None)


def test_what_is_quick_is_not_shown(now):
    sink = io.StringIO()
    line = TerminalLine(sink)
    TerminalWatch(line).progress(LOADING)
    line.erase()
    assert sink.getvalue() == ""


def test_one_line_that_is_written_over_and_erased(now, monkeypatch):
    """Cut to the terminal's width: a line that wraps could not be written over."""
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((20, 5)))
    sink = io.StringIO()
    line = TerminalLine(sink)
    now[0] += 1
    TerminalWatch(line).progress(LOADING)
    line.erase()
    assert sink.getvalue() == "\rLoading m: 45 MB of\x1b[K\r\x1b[K"


def test_where_nothing_may_move(now):
    """Whole lines, one in ten seconds."""
    sink = io.StringIO()
    line = TerminalLine(sink, still=True)
    watch = TerminalWatch(line)
    for _ in range(25):
        watch.progress(LOADING)
        now[0] += 1
    line.erase()
    assert sink.getvalue() == "Loading m: 45 MB of 97 MB\n" * 2


@pytest.mark.parametrize(("first", "to_fetch", "told"), [(True, 0, 1), (False, 9, 1), (False, 0, 0)])
def test_the_plan_is_told_once_where_it_matters(now, tiny, first, to_fetch, told):
    """On the first run, and before anything is fetched."""
    sink = io.StringIO()
    watch = TerminalWatch(TerminalLine(sink), first)
    for _ in range(2):
        watch.note_plan(plan_of(tiny, to_fetch))
    assert sink.getvalue().count("your data") == told and "\x1b" not in sink.getvalue()


def test_names_cannot_control_the_terminal(now, tiny):
    sink = io.StringIO()
    line = TerminalLine(sink)
    now[0] += 1
    hostile = "m\x1b]0;x\x07\x9b2J\u202e\n"
    TerminalWatch(line, first=True).note_plan(plan_of(tiny, 5, hostile))
    PullWatch(line).note_facts(plan_of(tiny, 5, hostile).facts)
    PullWatch(line).progress(Progress(f"Loading {hostile}", 1, 2))
    line.erase()
    assert not set(sink.getvalue().replace("\x1b[K", "")) & set("\x1b\x07\x9b\u202e")


def test_no_terminal_no_words():
    """Not even for what takes long."""
    with watching() as watch:
        assert watch is QUIET


def test_pull_on_a_terminal(served, tmp_path):  # noqa: F811
    """The size, the progress, Ctrl-C; then the rest of it."""
    served.pace = 0.15
    argv = [sys.executable, "-m", "ruvmlx", "pull", "owner/tiny"]
    known = {"HF_ENDPOINT": served.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "RUVMLX_HOME": str(tmp_path)}
    terminal = Terminal(argv, **known)
    terminal.expect(r"owner/tiny: 3\.\d MB to download\.")
    terminal.expect(r"Fetching owner/tiny: [\d.]+ kB of 3\.\d MB, [\d.]+ kB/s, \d+ s left")
    terminal.send("\x03")
    terminal.expect("ruvmlx: interrupted")
    assert terminal.wait() == 130
    served.pace = 0.0
    again = Terminal(argv, **known)
    again.expect(r"size +3\.\d MB: 1\.5 M weights")
    assert again.wait() == 0
    assert len(served.ranges) == 2 and served.ranges[1] > 0
