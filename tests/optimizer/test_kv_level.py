"""Memory pressure takes the old tokens to 4 bits at once; the log has the action, its reason and its end."""

from collections import deque
from types import SimpleNamespace

import pytest

from ruvmlx.kv.policy import EIGHT_BITS, FOUR_BIT_LEVEL, TIERED, TierPolicy, limit_to, tighten
from ruvmlx.kv.pool import HIGH, LevelChange
from ruvmlx.optimizer.kv_levels import LevelRecorder
from ruvmlx.store.audit import disagreement
from ruvmlx.tiers import WARM

from .test_monitor import write


@pytest.fixture
def squeeze(tiny_backend, monkeypatch):
    """Sets the pressure on the machine's memory."""
    pool = tiny_backend.pool
    monkeypatch.setattr(pool, "level", 0)
    pool.level_changes.clear()

    def set_pressure(value: float) -> None:
        monkeypatch.setattr(pool, "pressure", lambda: value)

    set_pressure(0.1)
    yield set_pressure
    pool.level_changes.clear()


def actions(runtime) -> list[dict]:
    return [row.body for row in runtime.store.witness.rows("optimizer")]


def test_all_old_tokens_have_four_bits_at_that_level():
    hot, *lower = tighten(TIERED, FOUR_BIT_LEVEL).lengths
    assert {hot, *lower} == {256}


def test_a_squeeze_is_a_row_and_its_end_names_that_row(open_tiny, squeeze, tiny_backend):
    with open_tiny() as runtime:
        write(runtime, 1)
        assert actions(runtime) == []
        squeeze(0.95)
        write(runtime, 2, input_ids=list(range(3, 70)))
        (forced,) = actions(runtime)
        assert (forced["knob"], forced["outcome"]) == ("kv_level", "forced")
        assert (forced["before"], forced["after"]) == ("256,2048", "256,256")
        assert str(HIGH) in forced["why"] and forced["facts"]["pressure"] == 0.95
        assert tiny_backend.pool.level == FOUR_BIT_LEVEL
        squeeze(0.3)
        for i in range(3, 10):
            write(runtime, i, input_ids=list(range(i, i + 150)))
        *eased, undone = actions(runtime)[1:]
        assert {row["outcome"] for row in eased} == {"eased"}
        assert undone["outcome"] == "undone" and undone["after"] == "256,2048"
        number = next(r.seq for r in runtime.store.witness.rows("optimizer") if r.body == forced)
        assert undone["undoes"] == number and "below" in undone["why"]
        assert runtime.store.witness.check().broken is None and disagreement(runtime.store) == ""


def test_a_level_ends_with_the_process(open_tiny, squeeze):
    with open_tiny() as runtime:
        squeeze(0.95)
        write(runtime, 1, input_ids=list(range(3, 70)))
    with open_tiny() as again:
        *_, last = actions(again)
        assert last["outcome"] == "undone" and "closed" in last["why"]


def test_a_level_ends_although_the_policy_has_changed(open_tiny):
    """The policy that was chosen meanwhile has the same lengths at each level."""
    with open_tiny() as runtime:
        pool = SimpleNamespace(level=0, level_changes=deque(), pressure=lambda: 0.1)
        policies = [EIGHT_BITS, limit_to(TierPolicy(lengths=(64, 2048)), WARM)]
        recorder = LevelRecorder(runtime.optimizer.log, pool, lambda: policies[0])
        pool.level_changes.extend(LevelChange(a, b, 0.95, 1, "short") for a, b in [(0, 3), (3, 4)])
        recorder.record()
        del policies[0]
        pool.level_changes.extend(LevelChange(a, a - 1, 0.1, 1, "room") for a in (4, 3, 2, 1))
        recorder.record()
        assert [row["outcome"] for row in actions(runtime)] == ["forced", "undone"]
