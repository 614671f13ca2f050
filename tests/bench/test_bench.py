"""The benchmark runs whole on a tiny model; what it says of made-up figures is right."""

import importlib.util
import json

import pytest
from ruvmlx.apps.bench import model as suite
from ruvmlx.apps.bench.rows import at_most
from ruvmlx.apps.bench.stage import OnStage, spread, take_turns

from ruvmlx.errors import RuvmlxError

from ..cli.test_cli import run  # noqa: F401 - a fixture


def rows_of(out: str) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(out)["rows"]}


def test_the_model_suite_measures_ours_and_the_memory(run, tiny_folder):  # noqa: F811
    tiny = ("--model", str(tiny_folder), "--backend", "native")
    code, out, _ = run("bench", "model", *tiny, "--long", "300", "--rounds", "2", "--json")
    rows = rows_of(out)
    assert code == 0
    for name in ("prefill 256: ours", "decode at 256: ours", "decode at 300: ours", "resident memory"):
        assert rows[name]["value"] > 0, name
    share = rows["decode at 256: share of memory bandwidth"]
    assert share["value"] > 0 and share["limit"] == 1.0
    assert rows["decode at 256: ours / llama.cpp"]["value"] is None
    assert "not asked for" in rows["decode at 256: ours / llama.cpp"]["note"]


def test_the_learning_suite_rates_real_replies_and_spares_the_users_store(run, tiny_folder, home):  # noqa: F811
    code, out, _ = run("bench", "learning", "--model", str(tiny_folder), "--rounds", "2", "--json")
    rows = rows_of(out)
    assert code == 0 and "44 ratings" in rows["rating: weights updated, median"]["note"]
    assert all(row["value"] > 0 for row in rows.values())
    assert not (home / "ruvmlx.db").exists()


def test_the_kernel_suite_has_the_designs_rows(run):  # noqa: F811
    code, out, _ = run("bench", "kernels", "--json")
    rows = rows_of(out)
    assert code == 0 and len(rows) == 6
    assert all(row["value"] > 0 and row["limit"] > 0 for row in rows.values())


def test_llama_cpp_takes_part(run, starter_file):  # noqa: F811
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed (uv sync --group oracle)")
    code, out, _ = run("bench", "--vs", "llama.cpp", "--long", "0", "--rounds", "2", "--json")
    rows = rows_of(out)
    assert code == 0
    ratio = rows["decode at 256: ours / llama.cpp"]["value"]
    assert ratio > 0 and rows["decode at 256: llama.cpp"]["value"] > 0


def test_everyone_plays_every_round_after_a_warm_up():
    class Counting:
        def __init__(self):
            self.calls = 0

    players = {"a": Counting(), "b": Counting()}
    order = []

    def play(player):
        player.calls += 1
        order.append(player)
        return player.calls

    assert take_turns(players, play, 3) == {"a": [2, 3, 4], "b": [2, 3, 4]}
    assert order[:4] == [players["a"], players["b"]] * 2


def test_ratios_are_taken_turn_by_turn():
    """A machine that slows down in the middle hits both: the ratio does not move."""
    rates = {"ours": [200.0, 100, 50], "llama.cpp": [100.0, 50, 25], "memory": [400.0, 200, 100]}
    rows = {r.name: r for r in suite._speed_rows("x", rates, 1.8, "")}
    assert rows["x: ours / llama.cpp"].value == 2.0 and rows["x: ours / llama.cpp"].met
    assert rows["x: share of memory bandwidth"].value == 0.5
    assert rows["x: share of memory bandwidth"].met is False


def test_a_player_that_cannot_play_says_why():
    with pytest.raises(RuvmlxError, match="cannot be measured"):
        OnStage("ruvmlx", model="no-such-model", backend="auto", threads=1)


def test_spread_and_verdicts():
    assert spread([10.0] * 5) == 0
    assert spread([8.0, 9, 10, 11, 12]) == pytest.approx(0.15)
    assert at_most("n", 5, "us", 5).met and not at_most("n", 5.1, "us", 5).met
