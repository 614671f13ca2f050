"""What rows say of made-up figures is right."""

import json

import pytest
from ruvmlx.apps.bench import energy, markdown, model, page, projection, terminal
from ruvmlx.apps.bench.rows import Row, at_most, median_row, refuse_impossible, spread, verdict


def test_a_figure_near_its_target_is_neither_met_nor_missed():
    """Two runs of the same code may fall on both sides of it."""
    assert [at_most("n", x, "MB", 5).is_met for x in (5, 5.1)] == [True, False]  # a count of bytes is exact
    assert [at_most("n", x, "us", 5).is_met for x in (4, 4.9, 5.1, 6)] == [True, None, None, False]
    assert [Row("n", x, "x", 2.0).is_met for x in (2.1, 2.05, 1.95, 1.9)] == [True, None, None, False]
    assert [verdict(at_most("n", x, "us", 5).facts) for x in (4, 5, 6)] == ["met", "close", "not met"]


def test_a_figure_is_as_sure_as_its_samples():
    wide = [8.0, 9, 10, 11, 12]
    assert spread(wide) == pytest.approx(0.15) and spread([10.0] * 5) == 0
    assert [median_row("n", wide, "x", t).is_met for t in (8.0, 9.0, 11.0, 12.0)] == [True, None, None, False]
    lower = [median_row("n", wide, "x", t, better="lower").is_met for t in (8.0, 9.0, 11.0, 12.0)]
    assert lower == [False, None, None, True]
    assert median_row("n", wide, "x").is_met is None and verdict(median_row("n", wide, "x").facts) == ""


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        (Row("n", 104.0, "tok/s", limit=100.0), False),
        (Row("n", 106.0, "tok/s", 50, limit=100.0), True),
        (Row("n", 10.0, "us", limit=9.0, better="lower"), False),
        (Row("n", 8.0, "us", 20, limit=9.0, better="lower"), True),
        (Row("n", 8.0, "us"), False),
    ],
)
def test_a_planted_impossible_number_is_refused(row, refused):
    kept = refuse_impossible(row)
    assert (kept.value is None) == refused
    if refused:
        assert kept.is_met is None and "at fault" in kept.note
    else:
        assert kept is row


def test_ratios_are_taken_turn_by_turn():
    """A machine that slows down in the middle hits both: the ratio does not move."""
    rates = {"ours": [200.0, 100, 50], "llama.cpp": [100.0, 50, 25], "llama.cpp flash": [90.0, 45, 20]}
    (row,) = model.ratios("x", rates, 1.8)
    assert row.name == "x: ours / llama.cpp" and row.value == 2.0 and row.is_met
    (row,) = model.ratios("x", rates | {"llama.cpp flash": [400.0, 200, 100]}, 1.8)
    assert row.name == "x: ours / llama.cpp" and row.value == 0.5 and "llama.cpp flash" in row.note


class Package:
    """Counters as Linux shows them: one package and a part of it, which must not be counted twice."""

    def __init__(self, folder, joules, range_=1000):
        self.files = [folder / "intel-rapl:0", folder / "intel-rapl:0:0"]
        for file in self.files:
            file.mkdir()
            (file / "max_energy_range_uj").write_text(str(range_ * 10**6))
        self.set(joules)

    def set(self, joules):
        for file in self.files:
            (file / "energy_uj").write_text(str(joules * 10**6))


def test_energy_is_that_of_the_packages(tmp_path):
    package, spent = Package(tmp_path, 990), iter([996, 2, 8, 14])  # the counter starts again after 1000

    def decode() -> int:
        package.set(next(spent))
        return 3

    row = energy.row(decode, 4, tmp_path)
    assert row.samples == pytest.approx((2.0, 2.0, 2.0, 2.0)) and row.value == pytest.approx(2.0)


def test_energy_that_nobody_may_read_is_left_out(tmp_path):
    row = energy.row(lambda: 1, 2, tmp_path)
    assert row.value is None and "left out" in row.note


ROWS = {
    "model": [
        Row("decode at 256: ours", 400.0, "tok/s", 100, 500.0),
        Row("decode at 4096: ours", 250.0, "tok/s"),
        Row("decode at 256: <b>llama</b>", 150.0, "tok/s"),
        Row("decode at 256: share of memory bandwidth", 0.8, "", 0.75, 1.0),
    ],
    "kv": [Row("cache at 4096: share of f16", 0.43, "", 0.45, better="lower")],
    "learning": [Row("prove: better than the untouched model after 30 ratings", 0.7, "")],
}
REPORT = {
    "rows": [{"suite": suite, **row.facts} for suite, rows in ROWS.items() for row in rows],
    "machine": {"chip": "A chip", "threads": 2, "memory": 16 * 10**9, "versions": {"ruvmlx": "0.1.0"}},
    "limits": {"memory": 40e9, "products": 1e12, "products_1": 5e11},
    "model": "m.gguf",
    "weights": 100_000_000,
    "drift": 0.08,
    "throttled": True,
    "settings": {},
    "seconds": 60.0,
}


def test_the_page_holds_every_row_and_needs_nothing_else():
    text = page.html(REPORT)
    assert all(part in text for part in ("prove: better", "43%", "80%", "M4 Pro", "8% slower", "<svg"))
    assert "<b>llama" not in text and "&lt;b&gt;llama" in text
    assert "src=" not in text and "href=" not in text and "not measured" in text


def test_the_sheet_has_every_row_and_its_command():
    text = "\n".join(markdown.lines(REPORT, "ruvmlx bench --report x.md"))
    assert "Made by `ruvmlx bench --report x.md`" in text and "8% slower" in text
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(any(row["name"].replace("|", "\\|") in line for line in table) for row in REPORT["rows"])
    assert {line.replace("\\|", "").count("|") for line in table} == {8}


def test_the_table_has_every_row_and_bars_by_context():
    report = json.loads(json.dumps(REPORT))
    text = "\n".join(terminal.end_lines(report))
    rows = [row for _, of_suite in terminal.by_suite(report["rows"]) for row in of_suite]
    assert all(name.startswith(row["name"]) for row, (name, *_) in zip(REPORT["rows"], rows, strict=True))
    assert all(len(row) == 5 for row in rows)
    assert "█" in text and "   256 ours" in text and "slower during the run" in text


def test_projections_follow_the_measured_share():
    found = {p.chip: p for p in projection.project_chips(REPORT["rows"], 1e9)}
    assert found["M4 Pro"].most == pytest.approx(273) and found["M4 Pro"].expected == pytest.approx(0.8 * 273)
    assert projection.project_chips([], 1e9) == []
