"""Processor time of each test, its child processes included: on a busy machine, too, it says which are dear.

A test that takes more than BUDGET is listed at the end of the run. `--cost=FILE` writes each as it ends.
"""

import resource
from pathlib import Path

import pytest

BUDGET = 5.0  # seconds
NAME = "processor_s"
_BEFORE = pytest.StashKey[float]()


def spent_seconds() -> float:
    """Seconds of this process, and of the children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(found.ru_utime + found.ru_stime for found in both)


def note_start(item: pytest.Item) -> None:
    item.stash[_BEFORE] = spent_seconds()


def note_cost(item: pytest.Item, report: pytest.TestReport) -> None:
    """The report of the teardown, which is the last, takes the cost to the process that reports."""
    report.user_properties.append((NAME, spent_seconds() - item.stash.get(_BEFORE, spent_seconds())))


class Costs:
    """Plugin of the process that reports: adds up what the others measured."""

    def __init__(self, file: str | None) -> None:
        self.file, self.of = file, dict[str, float]()
        if file:
            Path(file).write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            cost = sum(s for name, s in report.user_properties if name == NAME)
            self.of[report.nodeid] = cost
            if self.file:  # line by line: a run that is stopped tells what it knows
                with Path(self.file).open("a") as file:
                    file.write(f"{cost:.3f}\t{report.nodeid}\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        dear = sorted(self.of.items(), key=lambda pair: -pair[1])
        if over := [(name, s) for name, s in dear if s > BUDGET]:
            whole = sum(self.of.values())
            terminalreporter.section(f"{whole:.0f} s of processor time; these took more than {BUDGET:.0f} s")
            for name, s in over:
                terminalreporter.line(f"{s:7.1f} {name}")
