"""`ruvmlx prove` from the outside, with very small numbers."""

import json
import subprocess
import sys

import pytest

SCORER = """
def shorter(prompt, reply, finished):
    return max(1, 5 - len(reply.split()) // 3)
def broken(prompt, reply, finished):
    return reply.nothing
def wrong(prompt, reply, finished):
    return 2.5
"""


@pytest.fixture
def prove(tmp_path):
    (tmp_path / "prompts").write_text("What is iron?\n\nWhat is a fjord?\n")
    (tmp_path / "heldout").write_text("What is tin?\nWhat is a lake?\nSay hello.\n")
    (tmp_path / "taste.py").write_text(SCORER)

    def run(*arguments):
        flags = ["--prompts", "prompts", "--heldout", "heldout", "--max-tokens", "12"]
        command = [sys.executable, "-m", "ruvmlx", "prove", *flags, "--threads", "1", "--json", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run


def test_report(prove):
    done = prove("--scorer", "taste.py:shorter", "--ratings", "4", "--every", "2", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [p["ratings"] for p in report["checkpoints"]] == [2, 4]
    assert report["arm"] == "instant" and report["seconds"] > 0
    for point in report["checkpoints"]:
        assert 1 <= point["score"] <= 5 and 1 <= point["score_base"] <= 5
        low, high = point["win_ci"]
        assert 0 <= low <= point["win_rate"] <= high <= 1
        assert 0 <= point["kl"] < 0.5 and point["mean_tokens"] <= 12


@pytest.mark.parametrize(
    "flags,arm",
    [
        (["--shuffle", "--flip", "0.2"], "instant + shuffled + 20% flipped"),
        (["--reverse", "1"], "instant + reversed at 1"),
        (["--examples", "1", "--learn", "off"], "examples"),
        (["--oracle", "Be brief.", "--learn", "off"], "oracle prompt"),
    ],
)
def test_arms(prove, flags, arm):
    done = prove("--scorer", "taste.py:shorter", "--ratings", "2", *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["arm"] == arm
    if "off" in flags:
        assert report["checkpoints"][-1]["kl"] < 1e-6


def test_nothing_learned_wins_nothing(prove):
    done = prove("--scorer", "taste.py:shorter", "--ratings", "2", "--learn", "off")
    point = json.loads(done.stdout)["checkpoints"][-1]
    assert point["win_rate"] == 0.5 and point["score"] == point["score_base"] and point["ppl_change"] == 0


def test_the_users_own_adapter_is_not_touched(prove, tmp_path, monkeypatch):
    monkeypatch.setenv("RUVMLX_HOME", str(tmp_path / "home"))
    assert prove("--ratings", "1").returncode == 0
    assert not (tmp_path / "home" / "ruvmlx.db").exists()


@pytest.mark.parametrize(
    "flags,expected",
    [
        (["--user", "nobody"], "no simulated user 'nobody'"),
        (["--scorer", "taste.py"], "give a Python file and a function"),
        (["--scorer", "taste.py:missing"], "has no function 'missing'"),
        (["--scorer", "taste.py:broken", "--ratings", "1"], "failed: AttributeError"),
        (["--scorer", "taste.py:wrong", "--ratings", "1"], "returned 2.5; expected a whole number"),
        (["--heldout", "absent"], "cannot read absent"),
    ],
)
def test_mistakes_are_one_line(prove, flags, expected):
    done = prove(*flags)
    assert done.returncode == 2 and expected in done.stderr
    assert "Traceback" not in done.stderr
