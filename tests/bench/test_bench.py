"""The benchmark runs whole on a tiny model, and takes others with it where they are."""

import importlib.util
import json

import numpy as np
import pytest
from ruvmlx.apps.bench import chat, kernels, learning, machine, suites
from ruvmlx.apps.bench.model import prompt
from ruvmlx.apps.bench.other_runtimes import LlamaCpp
from ruvmlx.apps.bench.players import Ruvmlx
from ruvmlx.apps.bench.serving_player import ServingPlayer
from ruvmlx.apps.bench.stage import OnStage, take_turns

from ruvmlx.backends import select
from ruvmlx.backends.sharded import place
from ruvmlx.errors import RuvmlxError
from ruvmlx.kv.policy import EIGHT_BITS
from ruvmlx.models.load import load_model

from ..cli.verbs import run  # noqa: F401 - a fixture


def rows_of(out: str) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(out)["rows"]}


REPORT = {
    "rows": [],
    "model": "m.gguf",
    "machine": {"chip": "c", "threads": 1, "versions": {}},
    "limits": {"memory": 1, "products": 1},
    "seconds": 1,
    "throttled": False,
}


def test_figures_are_printed_if_the_report_cannot_be_written(run, tmp_path, monkeypatch):  # noqa: F811
    def take_the_name(*_):
        (tmp_path / "r.md").touch()  # another program takes the name during the minutes of the run
        return REPORT

    monkeypatch.setattr(suites, "run", take_the_name)
    code, out, err = run("bench", "kernels", "--json", "--report", str(tmp_path / "r.md"))
    assert code == 2 and "exists already" in err and json.loads(out)["model"] == "m.gguf"


def test_a_report_names_the_command_that_made_it(run, tmp_path, tiny_folder, monkeypatch):  # noqa: F811
    """The command has all options that change the figures, and no folders of files."""
    monkeypatch.setattr(suites, "run", lambda *_: REPORT)
    options = ["--rounds", "5", "--context", "256", "--context", "1024"]
    where = ["--backend", "native", "--threads", "1"]
    file = tmp_path / "my report.md"
    model = ["--model", str(tiny_folder)]
    assert run("bench", "model", "--quick", *options, *model, *where, "--report", str(file))[0] == 0
    words = " ".join(["ruvmlx bench model --quick", *options, "--model", tiny_folder.name, *where])
    assert f"Made by `{words} --report 'my report.md'`;" in file.read_text()


@pytest.mark.parametrize(
    "leader, backend, words",
    [
        ("127.0.0.1:2000", "ring", "-n 2"),
        ("10.0.0.1:2000", "ring", "--hosts HOST0,HOST1"),
        ("10.0.0.1:2000", "mpi", "--backend mpi --hosts HOST0,HOST1"),
    ],
)
def test_a_report_names_the_launch(run, tmp_path, tiny_folder, monkeypatch, leader, backend, words):  # noqa: F811
    """The figures are those of a divided model. The report has no address."""
    monkeypatch.setattr(suites, "run", lambda *_: REPORT)
    monkeypatch.setenv(place.RANKS, "2")
    monkeypatch.setenv(place.LEADER, leader)
    monkeypatch.setenv(place.BACKEND, backend)
    file = tmp_path / "r.md"
    assert run("bench", "model", "--model", str(tiny_folder), "--report", str(file))[0] == 0
    made = f"`ruvmlx launch {words} -- bench model --model {tiny_folder.name} --report r.md`"
    assert f"Made by {made};" in file.read_text()


@pytest.fixture
def tiny_bench(run, tiny_folder):  # noqa: F811
    def bench(*arguments: str) -> dict[str, dict]:
        tiny = ("--model", str(tiny_folder), "--backend", "native", "--json")
        code, out, err = run("bench", *arguments, *tiny)
        assert code == 0, err
        return rows_of(out)

    return bench


def test_the_limit_of_prefill_counts_the_weights_that_a_token_of_a_prompt_needs(tiny_folder):
    """All linear layers, but of the last layer only those that give queries, keys and values."""
    c = load_model(str(tiny_folder)).config
    keys = c.hidden_size * (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
    rest = c.n_heads * c.head_dim * c.hidden_size + 3 * c.hidden_size * c.intermediate_size
    facts = Ruvmlx(str(tiny_folder), "native", 1).facts
    assert facts["prompt_weights"] == c.n_layers * keys + (c.n_layers - 1) * rest


def test_the_model_suite_measures_ours_and_the_memory(tiny_bench):
    rows = tiny_bench("model", "--context", "256", "--context", "1000000", "--rounds", "3")
    assert all(rows[name]["value"] > 0 for name in ("decode at 256: ours", "resident memory"))
    assert "prefill 256: ours" in rows  # of so small a model a busy machine may be thought to read too fast
    assert rows["time to first token, 256 cached and 16 new: ours"]["condition"] == "cached prefix"
    ours = rows["decode at 256: ours"]
    assert len(ours["samples"]) == len(ours["reference"]) == 3
    assert ours["limit"] is None  # so few weights are never read from memory
    assert "shorter" in rows["decode at 1000000: ours"]["note"]
    assert "not asked for" in rows["beside llama.cpp"]["note"]


def test_the_cache_suite_measures_tiers_beside_f16(tiny_bench):
    rows = tiny_bench("kv", "--quick", "--rounds", "3")
    share = next(row for name, row in rows.items() if name.endswith("share of f16"))
    assert 0 < share["value"] <= 1 and rows["decode at 256: tiered / f16"]["value"] > 0
    usual, tight = (row for name, row in rows.items() if name.startswith("KL to f16"))
    assert usual["target"] == 0.004 and usual["met"]  # so short a context is all hot
    assert tight["target"] is None and tight["value"] >= 0
    resumed = next(row for name, row in rows.items() if name.endswith("resumed / read again"))
    assert resumed["value"] > 0 and resumed["unit"] == "x" and resumed["better"] == "lower"


def test_what_a_policy_costs_is_told_by_tiers_that_hold_something(tiny_folder):
    ours, text = Ruvmlx(str(tiny_folder), "native", 1), "the words of a text, again and again " * 40
    wide, tight = (ours.quality(text, 240, *tiers) for tiers in ((256, 2048), (64, 64)))
    assert wide["kl"] == 0 and wide["change"] == 0 and wide["share"] == pytest.approx(1, abs=0.01)
    assert tight["kl"] > 0 and tight["change"] != 0 and tight["share"] < 0.8


def test_a_policy_is_measured_without_the_tiers_that_the_model_never_has(tiny_folder, monkeypatch):
    ours, text = Ruvmlx(str(tiny_folder), "native", 1), "the words of a text, again and again " * 40
    four = ours.quality(text, 240, 64, 64)
    monkeypatch.setattr(select, "default_policy", lambda shape: EIGHT_BITS)
    eight = ours.quality(text, 240, 64, 64)
    assert (four["bits"], eight["bits"]) == (4, 8)
    assert four["share"] < eight["share"] < 1 and 0 < eight["kl"] < four["kl"]


def test_a_reply_alone_is_measured_without_guesses(starter_file):
    """A right guess needs no step of its own. With guesses, the measured steps would be far too short."""
    serving = ServingPlayer(str(starter_file), "native", 1).in_parallel([prompt(64)], 64)
    assert serving["decode"] > 0.5
    best = Ruvmlx(str(starter_file), "native", 1).best_of(prompt(64), 1, 64)
    assert best["decode"] > 0.5 * (best["seconds"] - best["prompt"])


def test_the_learning_suite_rates_real_replies_and_spares_the_users_store(tiny_bench, home, monkeypatch):
    monkeypatch.setitem(learning.RATINGS_GIVEN, "quick", 20)
    rows = tiny_bench("learning", "--quick")
    assert "20 ratings" in rows["rating: weights updated, median"]["note"]
    momentum = rows.pop("momentum of that update")  # a difference, which noise may hide
    assert momentum["value"] >= 0 and all(row["value"] > 0 for row in rows.values())
    assert rows["learning overhead of a reply of 64 tokens"]["target"] == 1000
    assert not (home / "ruvmlx.db").exists()


def test_the_load_suite_loads_more_than_once(tiny_bench):
    rows = tiny_bench("load", "--quick")
    assert len(rows["this model: load"]["samples"]) == 3 and rows["this model: peak"]["value"] > 0
    assert any("not in a quick run" in row["note"] for row in rows.values())


def test_the_chat_suite_types_into_the_real_app(tiny_bench, home, monkeypatch):
    """On a pseudo-terminal: keys while a paced reply and the model's come, Esc, memory. Nothing of it is the
    user's."""
    monkeypatch.setitem(chat.SIZES, "quick", chat.Size(1, 200, 3, 0, 1, 5))
    rows = tiny_bench("chat", "--quick")
    keys = [row for name, row in rows.items() if name.startswith("key while") and name.endswith("median")]
    assert len(keys) == 2 and all(row["target"] == 50 for row in keys) and keys[0]["value"] > 0
    assert rows["screen behind a reply of 200 tokens: first quarter"]["value"] > 0
    assert (
        rows["Esc in a reply, until idle: median"]["target"] == 200
    )  # the tiny model may be too fast for it
    assert "after 5 turns" in rows["memory, paced replies: growth"]["note"]
    assert "not in a quick run" in rows["key while it trains"]["note"]
    assert not (home / "ruvmlx.db").exists()


def test_a_token_is_drawn_with_its_own_word_or_a_later_one():
    arrived = [(1.0, b"x w00000 w0"), (2.0, b"0001 \x1b[1m"), (3.0, b"w00003")]
    assert chat._times_of_words(arrived) == [1.0, 2.0, 3.0, 3.0]


def test_kernels_stand_beside_their_twins_and_limits(run):  # noqa: F811
    code, out, _ = run("bench", "kernels", "--quick", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["rows"]) == 10
    assert all(row["limit"] > 0 and "twin" in row["note"] for row in found["rows"])
    assert all(
        "refused" in row["note"] if row["value"] is None else row["value"] > 0 for row in found["rows"]
    )
    assert found["limits"]["products"] > 0 and found["machine"]["cores"] >= 1


def test_every_kernel_in_every_implementation_is_near_its_twin():
    for kernel in kernels.kernels():
        for impl in kernel.implementations:
            assert kernels.distance(kernel, impl) < 1e-3, (kernel.name, impl)


@pytest.mark.full("apps/bench")
def test_llama_cpp_takes_part(run, starter_file):  # noqa: F811
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed (uv sync --group oracle)")
    code, out, _ = run(
        "bench", "model", "--vs", "llama.cpp", "--context", "256", "--rounds", "3", "--quick", "--json"
    )
    rows = rows_of(out)
    assert code == 0
    assert rows["decode at 256: ours / llama.cpp"]["value"] > 0
    assert rows["time to first token, 256 new: llama.cpp"]["value"] > 0


@pytest.mark.parametrize("unified", [False, True])
def test_llama_cpp_decodes_several_sequences_at_once(starter_file, unified):
    """The last batch has each sequence's own logits: those that a batch of it alone has, up to rounding."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (uv sync --group oracle)")
    prompts = [[504, 2365, 6354], [260, 1379, 282, 260, 905], [9906]]

    def logits(of: list[list[int]]) -> np.ndarray:
        player = LlamaCpp(str(starter_file), 1, 1024, sequences=len(of), unified=unified)
        assert player.in_parallel(of, 4)["rate"] > 0
        return np.stack([player.logits(i) for i in range(len(of))])

    got, want = logits(prompts), np.concatenate([logits([prompt]) for prompt in prompts])
    close = np.sqrt(np.mean((got - want) ** 2, axis=1)) / want.std(axis=1)
    assert (close < 0.05).all()
    assert np.abs(got[0] - got[1]).max() > 1


def test_mlx_lm_takes_part(run, tiny_folder):  # noqa: F811
    arguments = ("--vs", "mlx-lm", "--model", str(tiny_folder), "--context", "256", "--rounds", "3", "--json")
    code, out, _ = run("bench", "model", *arguments)
    rows = rows_of(out)
    assert code == 0
    assert "beside mlx-lm" in rows or rows["decode at 256: ours / mlx-lm"]["value"] > 0


def test_a_peer_that_is_not_known_is_one_line(run):  # noqa: F811
    code, _, err = run("bench", "model", "--vs", "ollama")
    assert code == 2 and "llama.cpp and mlx-lm" in err and err.count("\n") == 1


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


def test_a_player_that_cannot_play_says_why():
    with pytest.raises(RuvmlxError, match="cannot be measured"):
        OnStage("ruvmlx", model="no-such-model", backend="auto", threads=1)


def test_a_limit_is_the_most_that_was_reached():
    assert machine.Limits(1, 5, 2).or_more(machine.Limits(2, 4, 2)) == machine.Limits(2, 5, 2)


def test_a_machine_that_slows_down_marks_the_run():
    steady, hot = machine.Thermometer([1.0, 1.01, 1.03]), machine.Thermometer([1.0, 1.02, 1.09, 1.2])
    assert not steady.is_throttled and hot.is_throttled and hot.drift == pytest.approx(0.09)
    quick = machine.Thermometer([1.0, 0.8, 0.8])
    assert quick.drift == 0 and not quick.is_throttled
