"""`best_of = auto`: from the times of steps to a number of replies, measured once on a machine."""

import json

import pytest

from ruvmlx.engine import auto_best_of as module
from ruvmlx.engine.auto_best_of import MAX_REPLIES, affordable, most_within, path, step_seconds


@pytest.fixture
def engine_and_calls(engine, monkeypatch, tmp_path):
    """(engine, the measurements made so far); four steps take 10, 12, 14 and 16 ms."""
    monkeypatch.setenv("RUVMLX_HOME", str(tmp_path / "data"))
    calls = []

    def seconds(backend):
        calls.append(backend)
        return [0.010, 0.012, 0.014, 0.016]

    monkeypatch.setattr(module, "step_seconds", seconds)
    return engine, calls


@pytest.mark.parametrize(
    "seconds, expected",
    [([1, 1.1, 1.2, 1.5], 4), ([1, 1.1, 1.4, 1.51], 3), ([1, 1.6, 1.4, 1.6], 3), ([1, 2, 3, 4], 1)],
)
def test_the_most_replies_within_the_limit(seconds, expected):
    assert most_within(seconds) == expected


def test_a_model_is_measured_once(engine_and_calls):
    engine, calls = engine_and_calls
    assert [affordable(engine), affordable(engine)] == [3, 3]
    assert calls == [engine.backend]
    kept = json.loads(path().read_text(encoding="utf-8"))["seconds"]
    assert kept == {f"{engine.backend.kernels} {engine.model.fingerprint}": [0.010, 0.012, 0.014, 0.016]}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "seconds": {}}', '{"format": 1, "seconds": {"KEY": [1, "x"]}}']
)
def test_a_damaged_file_is_measured_again(engine_and_calls, text):
    engine, calls = engine_and_calls
    path().parent.mkdir(parents=True)
    path().write_text(text.replace("KEY", f"{engine.backend.kernels} {engine.model.fingerprint}"))
    assert affordable(engine) == 3 and len(calls) == 1
    assert affordable(engine) == 3 and len(calls) == 1


def test_a_folder_that_cannot_be_written_is_no_error(engine_and_calls, tmp_path):
    engine, calls = engine_and_calls
    (tmp_path / "data").write_text("a file, where the folder should be")
    assert [affordable(engine), affordable(engine)] == [3, 3] and len(calls) == 2


def test_steps_are_timed_on_every_backend(each):
    seconds = step_seconds(each.backend)
    assert len(seconds) == MAX_REPLIES and all(0 < s < 60 for s in seconds)
