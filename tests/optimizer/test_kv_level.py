"""Memory pressure takes the old tokens to 4 bits at once; the log has the action, its reason and its end."""

import pytest

from ruvmlx.kv.policy import FOUR_BIT_LEVEL, TIERED, tighten
from ruvmlx.kv.pool import HIGH
from ruvmlx.store.audit import disagreement

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
