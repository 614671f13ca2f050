"""`learn consolidate` shows what it does from the first moment on, on a terminal."""

import io
import re

from ruvmlx.apps.cli.training_line import PREPARING, TESTING, TrainingLine, training_line
from ruvmlx.apps.progress import TerminalLine


def lines(sink):
    """What the line showed, one after the other."""
    return [part for part in re.split(r"\r|\x1b\[K", sink.getvalue()) if part]


def test_the_time_left_follows_from_the_steps_so_far(monkeypatch):
    """Two steps took 20 s, so ten take 100 s, however long the preparations were."""
    now = iter([100.0, 120.0])
    monkeypatch.setattr("ruvmlx.apps.cli.training_line.time.monotonic", lambda: next(now))
    monkeypatch.setattr(TerminalLine, "__init__", lambda self, sink: None)
    shown = []
    monkeypatch.setattr(TerminalLine, "show_at_once", lambda self, text: shown.append(text))
    line = TrainingLine(TerminalLine(io.StringIO()), "steps")
    line.step(0, 12, float("nan"))
    line.step(2, 12, 0.5)
    assert shown[-1] == "Learning: 2 of 12 steps, 1 min 40 s left, loss +0.5000"


def test_the_first_line_comes_before_the_first_step_and_the_last_step_is_not_the_end():
    sink = io.StringIO()
    line = TrainingLine(TerminalLine(sink), "steps")
    assert lines(sink) == [f"{PREPARING} …"[:79]]
    line.step(0, 12, float("nan"))
    line.step(1, 12, 0.5)
    line.step(12, 12, -0.25)
    assert lines(sink)[1:] == [
        "Learning: 0 of 12 steps",
        *[line for line in lines(sink) if line.startswith("Learning: 1 of 12 steps") and "+0.5000" in line],
        "Learning: 12 of 12 steps, loss -0.2500",
        f"{TESTING} …",
    ]


def test_counted_replies_have_no_loss_and_no_test():
    sink = io.StringIO()
    TrainingLine(TerminalLine(sink), "replies").step(3, 3)
    assert lines(sink)[-1] == "Learning: 3 of 3 replies"


def test_without_a_terminal_there_is_no_line():
    with training_line("steps") as line:
        assert line is None
