"""Which tests a run leaves out.  Without --full a run takes minutes: it has a case for each behaviour.

Three marks say what is left to --full, which runs every case:

    full            the test, or this case of it
    full("neon")    the same; but it also runs when neon/ has changed here since it last passed
    one_in(10)      of its cases all but each tenth: seeds, and random inputs
    pairwise        of its cases all but so many that every two values of two parameters still meet

A test that the command line names (`file.py::test`) always runs.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

from .builds import BUILDS, ROOT, contents, digest

PASSED = BUILDS / "passed"


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take from `items` what this run leaves out."""
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return
    left = {id(item) for case in _functions(items) for item in _left_out(case)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]


def _functions(items: list[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The cases of each test function."""
    found = defaultdict(list)
    for item in items:
        found[item.nodeid.partition("[")[0]].append(item)
    return found.values()


def _left_out(cases: list[pytest.Item]) -> Iterable[pytest.Item]:
    run = [case for case in cases if not (mark := case.get_closest_marker("full")) or _changed(case, mark)]
    if run and (mark := run[0].get_closest_marker("one_in")):
        run = run[:: mark.args[0]]
    if run and run[0].get_closest_marker("pairwise"):
        values = [tuple((n, repr(v)) for n, v in case.callspec.params.items()) for case in run]
        run = [run[i] for i in pairwise(values)]
    return [case for case in cases if case not in run]


def pairwise(cases: Sequence[Sequence[tuple[object, object]]]) -> list[int]:
    """Places of cases in which all pairs occur that occur in any. The case with most new ones is next."""
    pairs = [set(combinations(case, 2)) for case in cases]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def _changed(item: pytest.Item, mark: pytest.Mark) -> bool:
    """Have the inputs that the mark names changed since the test passed, or since the first run here?"""
    if not mark.args:
        return False
    file, now = PASSED / digest(item.nodeid), _inputs(mark)
    if not file.exists():
        _keep(item, now)
    return file.read_text() != now


def passed(item: pytest.Item) -> None:
    """Remember with what inputs a test passed."""
    if (mark := item.get_closest_marker("full")) and mark.args:
        _keep(item, _inputs(mark))


def _inputs(mark: pytest.Mark) -> str:
    return contents(*(ROOT / place for place in mark.args))


def _keep(item: pytest.Item, inputs: str) -> None:
    PASSED.mkdir(parents=True, exist_ok=True)
    part = PASSED / f"{digest(item.nodeid)}.{os.getpid()}"
    part.write_text(inputs)
    part.replace(PASSED / digest(item.nodeid))
