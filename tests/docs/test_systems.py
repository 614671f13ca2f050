"""docs/systems.md says what systems.toml says, of tests, commands and figures that there are."""

from dataclasses import replace

import pytest

from . import systems
from .systems import WrongRow

ROWS, TARGETS = systems.read()
IDS = [
    *(f"E{i}" for i in range(1, 9)), *(f"K{i}" for i in range(1, 8)), *(f"M{i}" for i in range(1, 5)),
    *(f"A{i}" for i in range(1, 11)), *(f"S{i}" for i in range(1, 11)),
]  # fmt: skip


def test_the_page_is_what_the_script_writes():
    """`python -m tests.docs.systems` writes it again. Each named test, command and figure is there."""
    assert systems.PAGE.read_text("utf-8") == systems.page(ROWS, TARGETS) + "\n"


def test_every_system_of_the_design_has_one_row():
    assert [row.id for row in ROWS] == IDS
    assert len({target.name for target in TARGETS}) == len(TARGETS) == 19


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"tests": ["tests/cli/test_log.py::test_that_is_not_there"]}, "no test"),
        ({"tests": ["tests/nowhere.py::test_log"]}, "no test"),
        ({"tests": ["tests/cli/test_log.py::shown"]}, "no test"),
        ({"tests": []}, "names no test"),
        ({"command": "levitate"}, "no command"),
        ({"command": "log shew"}, "no command"),
        ({"command": "log"}, "no command"),
        ({"command": "generate hi --no-such-flag"}, "no command"),
        ({"command": "learn consolidate --ewc much"}, "no command"),
        ({"figure": ["bench: decode at 256: theirs"]}, "no committed report"),
        ({"figure": ["suite: charm, instant; 30; win_rate"]}, "no committed report"),
        ({"figure": ["hearsay: 12"]}, "no committed report"),
    ],
)
def test_a_row_that_names_what_there_is_not_is_refused(planted, said):
    with pytest.raises(WrongRow, match=said):
        systems.page([replace(ROWS[0], **planted)], TARGETS)


def test_figures_are_cells_of_the_report():
    """Value and verdict; a row that was left out has no figure."""
    rows = systems.bench_rows()
    assert rows["decode at 256: ours"].value.endswith("tok/s") and rows["decode at 256: ours"].met == "yes"
    assert "energy of a decoded token" not in rows and "what" not in rows
    assert rows["7B-shaped random model, 4 bits: decode"].met == "**no**"


def test_a_wrong_file_is_one_line(monkeypatch, capsys, tmp_path):
    """And the page stays."""
    wrong = replace(ROWS[0], command="levitate")
    monkeypatch.setattr(systems, "read", lambda: ([wrong], TARGETS))
    monkeypatch.setattr(systems, "PAGE", tmp_path / "systems.md")
    assert systems.main() == 1 and not systems.PAGE.exists()
    assert capsys.readouterr().err.count("\n") == 1
