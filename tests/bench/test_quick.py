"""`bench --quick`: rows come suite by suite, and it says how long it takes on this machine."""

import pytest
from ruvmlx.apps.bench import suites
from ruvmlx.apps.bench.rows import Row

from ..cli.verbs import run  # noqa: F401 - a fixture


def test_the_time_left_follows_this_machines_pace():
    """Suites that took three times as long as usual: so will the others."""
    usual = suites.QUICK_SECONDS
    assert set(usual) == set(suites.NAMES) and sum(usual.values()) <= 120
    left = suites.seconds_left(["kernels", "model"], ["kv"], 3 * (usual["kernels"] + usual["model"]))
    assert left == pytest.approx(3 * usual["kv"])


@pytest.fixture
def two_suites(monkeypatch):
    """Suites that end at once, and write down what was shown before each of them began."""
    began: list[list[str]] = []
    shown: list[str] = []

    def suite(name):
        def measure(*_):
            began.append(list(shown))
            return [Row(f"row of {name}", 1.0, "x")]

        return measure

    monkeypatch.setattr(suites, "_SUITES", {name: suite(name) for name in suites.NAMES})
    monkeypatch.setattr("ruvmlx.apps.cli.bench.show_whole", shown.append)
    monkeypatch.setattr("ruvmlx.apps.cli.bench.table", lambda _, rows: shown.extend(row[0] for row in rows))
    return began, shown


@pytest.mark.parametrize("quick", [True, False])
def test_rows_are_printed_as_they_come(two_suites, run, tiny_folder, quick):  # noqa: F811
    """A suite's rows are on the screen before the next suite begins; a quick run says what is left."""
    began, shown = two_suites
    code, _, err = run("bench", "--model", str(tiny_folder), *["--quick"] * quick)
    assert code == 0, err
    assert [any("row of kernels" in line for line in before) for before in began] == [False] + [True] * 6
    assert sum("row of" in line for line in shown) == len(suites.NAMES)
    assert ("on an idle machine" in err) is quick and err.count(" left") == 6 * quick


def test_json_comes_whole(two_suites, run, tiny_folder):  # noqa: F811
    _, shown = two_suites
    code, out, _ = run("bench", "--quick", "--json", "--model", str(tiny_folder))
    assert code == 0 and out.startswith("{") and not shown
