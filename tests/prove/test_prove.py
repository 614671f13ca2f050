"""`ruvmlx prove` from the outside, with very small numbers."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from ruvmlx.apps.cli import prove as command
from ruvmlx.apps.cli.options import resolve

from ruvmlx.errors import UsageError

SCORER = """
def shorter(prompt, reply, finished):
    return max(1, 5 - len(reply.split()) // 3)
def broken(prompt, reply, finished):
    return reply.nothing
def wrong(prompt, reply, finished):
    return 2.5
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "prompts").write_text("What is iron?\n\nWhat is a fjord?\n")
    (tmp_path / "heldout").write_text("What is tin?\nWhat is a lake?\nSay hello.\n")
    (tmp_path / "taste.py").write_text(SCORER)
    monkeypatch.chdir(tmp_path)
    return ["--prompts", "prompts", "--heldout", "heldout", "--max-tokens", "12", "--threads", "1", "--json"]


@pytest.fixture
def prove(files):
    """Runs the command as a process."""

    def run(*arguments):
        command = [sys.executable, "-m", "ruvmlx", "prove", *files, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture(scope="module")
def bench(starter_file):
    return command.open_bench(resolve({"threads": 1}), lambda line: None)


@pytest.fixture
def prove_here(files, bench, monkeypatch):
    """The same within this process, which reads the neutral text only once."""
    monkeypatch.setattr(command, "open_bench", lambda settings, say: bench)

    def run(*arguments):
        return CliRunner().invoke(command.prove, [*files, *arguments])

    return run


def test_the_report_of_two_seeds_leaves_the_users_adapter_alone(prove, home):
    """Of two seeds; the user's own adapter is not touched."""
    done = prove("--scorer", "taste.py:shorter", "--ratings", "2", "--every", "1", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [p["ratings"] for p in report["checkpoints"]] == [1, 2]
    assert report["arm"] == "instant" and report["seconds"] > 0
    for point in report["checkpoints"]:
        assert 1 <= point["score"] <= 5 and 1 <= point["score_base"] <= 5
        low, high = point["win_ci"]
        assert 0 <= low <= point["win_rate"] <= high <= 1
        assert 0 <= point["kl"] < 0.5 and point["mean_tokens"] <= 12
    assert not (home / "ruvmlx.db").exists()


@pytest.mark.parametrize(
    "flags,arm",
    [
        (["--shuffle", "--flip", "0.2"], "instant + shuffled + 20% flipped"),
        (["--reverse", "1"], "instant + reversed at 1"),
        (["--examples", "1", "--learn", "off"], "examples"),
        (["--oracle", "Be brief.", "--learn", "off"], "oracle prompt"),
    ],
)
def test_the_report_names_the_arm_that_the_flags_choose(prove_here, flags, arm):
    done = prove_here("--scorer", "taste.py:shorter", "--ratings", "2", *flags)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["arm"] == arm
    if "off" in flags:
        assert report["checkpoints"][-1]["kl"] < 1e-6


def test_nothing_learned_wins_nothing(prove_here):
    done = prove_here("--scorer", "taste.py:shorter", "--ratings", "2", "--learn", "off")
    point = json.loads(done.stdout)["checkpoints"][-1]
    assert point["win_rate"] == 0.5 and point["score"] == point["score_base"] and point["ppl_change"] == 0


@pytest.mark.parametrize(
    "flags,expected",
    [
        (["--user", "nobody"], "no simulated user 'nobody'"),
        (["--scorer", "taste.py"], "give a Python file and a function"),
        (["--scorer", "taste.py:missing"], "has no function 'missing'"),
        (["--heldout", "absent"], "cannot read absent"),
    ],
)
def test_mistakes_are_one_line(prove, flags, expected):
    done = prove(*flags)
    assert done.returncode == 2 and expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "scorer,expected",
    [("broken", "failed: AttributeError"), ("wrong", "returned 2.5; expected a whole number")],
)
def test_a_scorer_that_is_wrong(prove_here, scorer, expected):
    done = prove_here("--scorer", f"taste.py:{scorer}", "--ratings", "1")
    assert isinstance(done.exception, UsageError) and expected in str(done.exception)
