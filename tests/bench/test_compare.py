"""Two reports: what was planted is found, and what is chance is not."""

import json
import subprocess
import sys

import numpy as np
import pytest
from ruvmlx.apps.bench import compare
from ruvmlx.apps.bench.rows import at_most, median_row

from ..cli.verbs import run  # noqa: F401 - a fixture


def report(seed: int, slower: float = 1.0, rows: int = 40, noise: float = 0.04, hour: float = 1.0) -> dict:
    """Rows of a noisy machine, `hour` times as fast as usual; the first row is `slower`."""
    rng, made = np.random.default_rng(seed), []
    for i in range(rows):
        moment = hour * np.exp(rng.normal(0, 0.1, 12))  # hits ours and the reference alike
        own = 100 * moment * np.exp(rng.normal(0, noise, 12)) / (slower if i == 0 else 1)
        made.append(median_row(f"row {i}", own.tolist(), "tok/s", reference=tuple(moment)).facts)
    return {"rows": made, "machine": {"threads": 2}, "settings": {}}


def test_a_planted_slow_down_of_a_tenth_is_found_and_nothing_else():
    for seed in range(5):
        found = compare.changes(report(seed), report(100 + seed, slower=1.1, hour=0.7))
        assert [c.name for c in found if c.verdict == "slower"] == ["row 0"]
        assert all(c.verdict == "same" for c in found[1:])
        assert found[0].ratio == pytest.approx(1 / 1.1, abs=0.05)


def test_few_samples_are_enough_for_a_large_change_among_many_rows():
    """Most rows of a quick run have 8 samples, and so have the rows of the kernels and of learning in a whole
    run."""
    reports = []
    for slower in (1.0, 3.0):
        rng = np.random.default_rng(int(slower))
        times = 10 * np.exp(rng.normal(0, 0.04, (40, 8)))
        times[0] *= slower
        rows = [median_row(f"row {i}", row.tolist(), "ms", better="lower") for i, row in enumerate(times)]
        reports.append({"rows": [row.facts for row in rows]})
    found = compare.changes(*reports)
    assert [c.verdict for c in found] == ["slower"] + 39 * ["same"]


@pytest.mark.parametrize(
    ("samples", "rows", "expected"), [(3, 1, "too few samples"), (4, 1, "slower"), (4, 40, "too few samples")]
)
def test_few_samples_among_many_rows_cannot_tell(samples, rows, expected):
    """The time to load a model has 3 samples, and the time to resume a chat has 4. A time that is three times
    as long is not "the same", even if so few samples do not prove a change."""
    reports = []
    for v in (1.0, 3.0):
        times = [v + i / 10 for i in range(samples)]
        made = [median_row(f"row {i}", times, "s", better="lower").facts for i in range(rows)]
        reports.append({"rows": made})
    found = compare.changes(*reports)
    assert [c.verdict for c in found] == rows * [expected]


def test_a_row_without_a_verdict_shows_its_values(tmp_path, run):  # noqa: F811
    for name, v in (("a", 1.0), ("b", 3.0)):
        row = median_row("load", [v, v, v], "s", better="lower").facts
        (tmp_path / name).write_text(json.dumps({"rows": [row]}))
    code, out, _ = run("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    [line] = [line.split() for line in out.splitlines() if line.startswith("load")]
    assert code == 0 and line == ["load", "1", "3", "s", "too", "few", "samples"]
    assert "0 are the same, 1 is without a verdict." in out


def test_faster_is_told_from_slower_for_times_too():
    times = [
        median_row("t", [v + i / 100 for i in range(8)], "ms", better="lower").facts for v in (10.0, 5.0)
    ]
    reports = [{"rows": [row]} for row in times]
    assert compare.changes(*reports)[0].verdict == "faster"
    assert compare.changes(*reversed(reports))[0].verdict == "slower"


def test_verdicts_that_changed_are_named(tmp_path, run):  # noqa: F811
    for name, ms in (("a", (80.0, 80.0)), ("b", (80.0, 130.0))):
        rows = [at_most(f"row {i}", value, "ms", 100).facts for i, value in enumerate(ms)]
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
    code, out, _ = run("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (
        code == 0
        and "1 of 2 with the same verdict, 1 met in one and not in the other" in out
        and "row 1: met -> not met" in out
    )


def test_permutations_agree_with_counting_them_by_hand():
    x, y = np.array([1.0, 2, 3]), np.array([4.0, 5, 6])
    assert compare.permutation(x, y) == pytest.approx(2 / 20)  # this division and its mirror image
    rng = np.random.default_rng(1)
    p = [compare.permutation(rng.normal(size=9), rng.normal(size=9)) for _ in range(60)]
    assert np.mean(np.array(p) < 0.2) < 0.4  # about a fifth, where there is no difference


def test_what_else_differs_is_named(tmp_path, run):  # noqa: F811
    old, new = report(1), report(2)
    old |= {"model": "a.gguf", "quick": True}
    new |= {"model": "b.gguf", "quick": False}
    new["machine"] = {"threads": 4}
    new |= {"throttled": True, "drift": 0.2}
    for name, made in (("a", old), ("b", new)):
        (tmp_path / name).write_text(json.dumps(made))
    code, out, _ = run("bench", "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert "not the same: model: a.gguf -> b.gguf" in out and "not the same: quick: True -> False" in out
    assert code == 0 and "threads: 2 -> 4" in out and "20%" in out and "0 are slower, 40 are the same." in out


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"rows": 3}', '{"rows": [1]}', '{"rows": [{"name": "x"}]}']
)
def test_what_is_no_report_is_one_line(tmp_path, run, text):  # noqa: F811
    (tmp_path / "a").write_text(text)
    code, _, err = run("bench", "compare", str(tmp_path / "a"), str(tmp_path / "missing"))
    assert code == 2 and "is not a report" in err and err.count("\n") == 1


PLANTED = """
import time
from ruvmlx.apps.bench import players
def slowly(self, tokens, known=players.Ruvmlx.go_on):
    out = []
    for token in tokens:
        started = time.perf_counter()
        (seconds,) = known(self, [token])
        while time.perf_counter() - started < 1.1 * seconds:
            pass
        out.append(time.perf_counter() - started)
    return out
players.Ruvmlx.go_on = slowly
"""


def test_a_decoder_made_a_tenth_slower_is_found(tmp_path, starter_file, full):
    """A real run of the real model beside another in which every token takes 1.1 times as long."""
    if not full:
        pytest.skip("a minute of measuring; --full runs it")
    reports = []
    for name, planted in (("old", ""), ("again", ""), ("new", PLANTED)):
        file = tmp_path / f"{name}.json"
        code = f"import sys\nsys.path.insert(0, {str(tmp_path / name)!r})\n"
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(planted)
        arguments = ["bench", "model", "--context", "256", "--rounds", "16", "--json"]
        found = subprocess.run(
            [sys.executable, "-c", f"{code}from ruvmlx.apps.main import main; main()", *arguments],
            capture_output=True, text=True, check=True, env=_with_path(tmp_path / name),
        )  # fmt: skip
        file.write_text(found.stdout)
        reports.append(compare.read(file))
    decode = "decode at 256: ours"
    again = {c.name: c for c in compare.changes(reports[0], reports[1])}
    slower = {c.name: c for c in compare.changes(reports[0], reports[2])}
    print(again[decode], slower[decode])
    assert again[decode].verdict == "same" and slower[decode].verdict == "slower"


def _with_path(folder) -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(folder)}
