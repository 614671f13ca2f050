"""The campaign of damaged inputs: a sample of each kind, and every planted mistake is found."""

import sys

import pytest

from . import damaged_inputs
from .damaged_inputs import campaign
from .fuzz import NAMES

PLANTED = """
import os, subprocess, sys, time
from tests.campaigns import damaged_inputs
from tests.campaigns.fuzz_targets import TARGETS, Target

BUSY = "import time\\nwhile time.process_time() < 0.5: pass"

def run(data):
    if data == b"abort":
        os.abort()
    if data == b"exit":
        sys.exit(3)
    if data == b"hang":
        time.sleep(60)
    if data == b"slow":
        subprocess.run([sys.executable, "-c", BUSY])
    if data == b"memory":
        bytearray(60_000_000)
    if data == b"line":
        os.write(2, b"warning of a library")
    if data == b"error":
        raise ValueError("planted")

WORDS = [b"abort", b"exit", b"hang", b"slow", b"memory", b"line", b"error", b"good"]
damaged_inputs.damaged_input = lambda target, kind, number: WORDS[number]
TARGETS["planted"] = lambda folder: Target([b"good"], run, lambda data, rng: data)
damaged_inputs.main()
"""


def test_every_planted_mistake_is_found(monkeypatch):
    monkeypatch.setattr(damaged_inputs, "WORKER", [sys.executable, "-c", PLANTED])
    monkeypatch.setattr(damaged_inputs, "SLOWER", 0.4)
    monkeypatch.setattr(damaged_inputs, "MORE", 50.0)
    monkeypatch.setattr(damaged_inputs, "HANGS", 15.0)  # under load, the slow one takes 5 s
    row = campaign("planted", range(8))
    found = {int(line.split()[1].rstrip(":")): line for line in row.wrong}
    assert set(found) == set(range(7))
    assert "exit -6" in found[0] and "SystemExit" in found[1] and "hung" in found[2] and "0.5 s" in found[3]
    assert "MB, " in found[4] and "warning of a library" in found[5] and "ValueError: planted" in found[6]
    assert row.inputs == 6 and "| 7 |" in row.line()


@pytest.mark.parametrize("kind", NAMES)
def test_a_sample_is_clean(kind, full):
    """The sample has no limit of time, because machines differ. test_fuzz.py tries each kind in every run."""
    if not (full or kind == "gguf"):
        pytest.skip("with --full")
    row = campaign(kind, range(400 if full else 20))
    assert [line for line in row.wrong if " s, a good input" not in line] == []
    assert row.inputs == (400 if full else 20)
