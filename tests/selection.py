"""Which tests a run leaves out.  Without --full a run takes minutes: it has a case for each behaviour.

Three marks say what is left to --full, which runs every case:

    full            the test, or this case of it
    full("neon")    the same; but it also runs when neon/ has changed here since it last passed. A new clone
                    compares neon/ with data/tested.tsv: what it held when every case passed
    one_in(10)      of its cases all but each tenth: seeds, and random inputs
    pairwise        of its cases all but so many that every two values of two parameters still meet

The tests of data/dear.tsv take more than DEAR seconds each. They are marked full(...) here, with their own
file and what their folder tests (SUBJECTS). A test that the command line names (`file.py::test`) always runs.

    pytest --full --cost=cost.tsv            runs all
    python -m tests.selection cost.tsv       after it has passed: writes data/dear.tsv and data/tested.tsv
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

import pytest

from .builds import BUILDS, ROOT, code, digest

PASSED = BUILDS / "passed"
DATA = ROOT / "tests" / "data"
TESTED = DATA / "tested.tsv"  # places, and what they held when every case passed
DEAR_TESTS = DATA / "dear.tsv"
DEAR = 0.4  # seconds of processor time
# What the tests of each folder of tests/ test. The tests of no folder test all of RUVMLX.
RUVMLX = ("ruvmlx", "apps", "neon", "metal_kernels")
SUBJECTS = {
    "backends": (
        "ruvmlx/backends",
        "ruvmlx/sampling.py",
        "ruvmlx/kernels",
        "ruvmlx/kv",
        "ruvmlx/lora",
        "ruvmlx/training",
        "neon",
    ),
    "bench": ("apps/bench",),
    "campaigns": ("ruvmlx/store", "ruvmlx/sona", "ruvmlx/models", "apps/server", "tests/campaigns"),
    "chat": ("apps/chat", "apps/attach"),
    "chats": ("ruvmlx/chats", "ruvmlx/engine", "ruvmlx/store"),
    "cli": ("apps/cli",),
    "docs": ("docs", "README.md"),
    "engine": ("ruvmlx/engine", "ruvmlx/backends", "ruvmlx/sampling.py"),
    "kernels": ("ruvmlx/kernels", "neon"),
    "kv": ("ruvmlx/kv", "ruvmlx/kernels", "neon"),
    "kv_tuning": ("ruvmlx/kv_tuning", "ruvmlx/kv"),
    "lora": ("ruvmlx/lora",),
    "memory": ("ruvmlx/memory", "ruvmlx/platform"),
    "metal": ("metal_kernels", "ruvmlx/backends/mlx"),
    "models": ("ruvmlx/models", "ruvmlx/platform"),
    "prove": ("apps/prove",),
    "research": ("apps/bench", "apps/prove", "tests/research"),
    "server": ("apps/server", "apps/attach"),
    "sona": ("ruvmlx/sona", "ruvmlx/training"),
    "store": ("ruvmlx/store",),
}


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take from `items` what this run leaves out."""
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return
    dear = dear_tests()
    for item in items:
        if item.nodeid in dear and not item.get_closest_marker("full"):
            item.add_marker(pytest.mark.full(*subjects(item.nodeid)))
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
    run = [
        case for case in cases if not (mark := case.get_closest_marker("full")) or _has_changed(case, mark)
    ]
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


def _has_changed(item: pytest.Item, mark: pytest.Mark) -> bool:
    """Have the inputs that the mark names changed since the test passed?"""
    if not mark.args:
        return False
    file, now = PASSED / digest(item.nodeid), _inputs(mark.args)
    if not file.exists():  # the first run here
        _keep(item, now | {place: held for place, held in tested_contents().items() if place in now})
    return json.loads(file.read_text()) != now


def note_pass(item: pytest.Item) -> None:
    """Remember with what inputs a test passed."""
    if (mark := item.get_closest_marker("full")) and mark.args:
        _keep(item, _inputs(mark.args))


def subjects(name: str) -> tuple[str, ...]:
    """What the test with this id tests, and its own file."""
    file = name.partition("::")[0]
    return (*SUBJECTS.get(Path(file).parent.name, RUVMLX), file)


def dear_tests() -> set[str]:
    """Ids of the tests of DEAR_TESTS."""
    if not DEAR_TESTS.exists():
        return set()
    return {line.partition("\t")[2] for line in DEAR_TESTS.read_text("utf-8").splitlines()}


def _inputs(places: Iterable[str]) -> dict[str, str]:
    """The names of what each place holds; comments and docstrings do not count."""
    return {place: code(ROOT / place) for place in places}


def tested_contents() -> dict[str, str]:
    """What each place held when every case passed; places that are not in it are as they should be."""
    if not TESTED.exists():
        return {}
    return dict(line.split("\t") for line in TESTED.read_text("utf-8").splitlines())


def keep_dear(costs: Iterable[str]) -> None:
    """costs: lines that `--cost` wrote. A test that did not run stays as dear as it was."""
    rows = {name: float(cost) for cost, _, name in (line.partition("\t") for line in costs)}
    before = DEAR_TESTS.read_text("utf-8").splitlines() if DEAR_TESTS.exists() else []
    old = {name: float(cost) for cost, _, name in (line.partition("\t") for line in before)}
    dear = sorted(
        ((cost, name) for name, cost in (old | rows).items() if cost > DEAR), key=lambda row: row[1]
    )
    DEAR_TESTS.write_text("".join(f"{cost:.1f}\t{name}\n" for cost, name in dear), "utf-8")


def keep_tested(places: Iterable[str]) -> None:
    """Every case has passed with what these places hold now."""
    rows = sorted((tested_contents() | _inputs(places)).items())
    TESTED.write_text("".join(f"{place}\t{held}\n" for place, held in rows), "utf-8")


def _keep(item: pytest.Item, inputs: dict[str, str]) -> None:
    PASSED.mkdir(parents=True, exist_ok=True)
    part = PASSED / f"{digest(item.nodeid)}.{os.getpid()}"
    part.write_text(json.dumps(inputs))
    part.replace(PASSED / digest(item.nodeid))


if __name__ == "__main__":
    keep_dear(Path(sys.argv[1]).read_text("utf-8").splitlines())
    keep_tested({*RUVMLX, *(place for name in dear_tests() for place in subjects(name))})
