"""Another process removes the adapter of an open model and makes one of the same name: nothing of the removed
adapter comes back. A copy keeps the weights of few versions: all that a user can do works at the oldest."""

import numpy as np
import pytest

from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.ratings import FACTS, REASONS
from ruvmlx.sona.rating_batch import RatingBatch
from ruvmlx.store import versions
from ruvmlx.store.audit import disagreement

from .feedback import reply, weights
from .test_deep import promoted_runtime  # noqa: F401 - a fixture
from .training_runs import rated_runtime, steady, tiny_backend  # noqa: F401 - fixtures


def remove(runtime, name="default") -> None:
    """As `adapters rm` in another process does."""
    runtime.store.adapters.delete(runtime.model.fingerprint, name)


def add(runtime, state: bytes, base: bytes | None = None) -> int:
    return runtime.store.adapters.add(runtime.model.fingerprint, "default", state, base, 0.0, 0.0)


def test_a_new_adapter_of_the_same_name_has_its_own_weights(open_tiny):
    with open_tiny() as runtime, open_tiny() as other:
        ids = [reply(runtime, seed=i) for i in range(3)]
        blank = weights(runtime)
        for reply_id in ids[:2]:
            runtime.rate(reply_id, "up")
        remove(other)
        assert weights(runtime) == blank
        imported = runtime.learner.micro.to_bytes()
        number = add(other, imported)
        assert weights(runtime) == blank and runtime.learner.version == number
        assert runtime.rate(ids[2], "up").applied
        runtime.undo()
        assert weights(runtime) == blank and disagreement(runtime.store) == ""


def test_versions_of_one_name_never_have_one_number(open_tiny):
    """So an open model sees that the version in use is another one, also if it looks only afterwards."""
    with open_tiny() as runtime, open_tiny() as other:
        ids = [reply(runtime, seed=i) for i in range(4)]
        runtime.rate(ids[0], "up")
        removed = weights(runtime)
        remove(other)
        first = other.rate(ids[1], "down").adapter_version
        assert first == 2 and weights(runtime) == weights(other) != removed
        runtime.rate(ids[2], "up")
        assert len(runtime.learner.history.ratings()) == 2
        with open_tiny() as third:
            assert weights(third) == weights(runtime)


def test_a_base_of_a_removed_adapter_is_not_used_again(promoted_runtime):  # noqa: F811
    runtime = promoted_runtime
    base, micro = runtime.learner.base, runtime.learner.micro
    old = runtime.learner.state.base
    other = BaseLoRA(base.pairs, base.scale / 2)
    remove(runtime)
    add(runtime, micro.to_bytes(), other.to_bytes())
    runtime.learner.sync()
    assert runtime.learner.state.base > old
    assert runtime.learner.base.scale == pytest.approx(base.scale / 2)


def test_a_copy_to_the_name_of_a_removed_adapter_goes_on_with_its_numbers(open_tiny):
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(3)]
        for reply_id in ids[:2]:
            runtime.rate(reply_id, "up")
        key = runtime.model.fingerprint
        runtime.store.adapters.copy(key, "default", "work")
        kept = weights(runtime)
        remove(runtime)
        runtime.rate(ids[2], "down")
        remove(runtime)
        runtime.store.adapters.copy(key, "work", "default")
        assert weights(runtime) == kept and runtime.learner.version == 3 + 2
        assert [row.version_after for row in runtime.learner.history.ratings()] == [4, 5]
        assert disagreement(runtime.store) == ""
        runtime.undo()
        assert runtime.learner.history.version() == 4
        runtime.rate(ids[1], "up")
        assert weights(runtime) == kept


def test_the_loops_of_an_open_model_leave_no_rows_of_a_removed_adapter(rated_runtime):  # noqa: F811
    """The rows stayed on the disk, and the next adapter of this name began with them."""
    history, store = rated_runtime.learner.history, rated_runtime.store
    key = rated_runtime.model.fingerprint, "default"
    remove(rated_runtime)
    history.put_training(b"a run that was stopped before")
    history.refuse(14, {"promoted": False, "reason": "the replies were worse"}, ends_run=False)
    history.deep.put_measurement(b"half")
    assert not history.deep.end_run(14, 0, None, {"tasks": 1}, {}, 3, lambda a, b: b)
    assert not history.attempts() and history.deep.last_run() is None
    assert not store.checkpoints.has_training(*key) and store.checkpoints.measurement(*key) is None


def test_a_trace_of_a_removed_adapter_is_computed_again(promoted_runtime):  # noqa: F811
    """Its hidden states come from the removed base LoRA."""
    runtime = promoted_runtime
    written = reply(runtime, seed=77)
    assert runtime.learner.traces.held[written].version > 0
    remove(runtime)
    runtime.learner.sync()
    rated = runtime.rate(written, "up")
    moved = runtime.learner.micro.lora_b.copy()
    runtime.undo()
    runtime.learner.traces.held.clear()
    assert rated.applied and runtime.rate(written, "up").applied
    np.testing.assert_allclose(runtime.learner.micro.lora_b, moved, atol=1e-6)


def test_a_reply_of_another_rank_can_be_rated(open_tiny):
    """Version 0 has the rank of the version that was in use before."""
    with open_tiny() as runtime:
        two = runtime.rate(reply(runtime), "up").adapter_version
        runtime.rollback(0)
    with open_tiny(micro_rank=1) as runtime:
        blank = reply(runtime, seed=2)
        assert runtime.learner.micro.rank == 1
        runtime.rollback(two)
        runtime.learner.sync()
        runtime.rollback(0)
        runtime.learner.sync()
        assert runtime.learner.micro.rank == 2
        assert runtime.rate(blank, "up").applied
        assert runtime.learner.micro.rank == 2 and runtime.learner.micro.norm > 0


@pytest.fixture
def oldest_of_a_copy(open_tiny, monkeypatch):
    """A copy that keeps the weights of two versions, at the oldest of them: (runtime, ids of the replies)."""
    monkeypatch.setattr(versions, "KEEP_COPIED", 2)
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(4)]
        for reply_id in ids:
            runtime.rate(reply_id, "down")
        runtime.store.adapters.copy(runtime.model.fingerprint, "default", "copy")
    with open_tiny(adapter="copy") as runtime:
        runtime.undo()
        yield runtime, ids


def test_rating_again_works_at_the_oldest_version(oldest_of_a_copy):
    runtime, ids = oldest_of_a_copy
    assert runtime.rate(ids[2], "up").replaces == "down"
    assert [row.rating for row in runtime.learner.history.ratings()] == ["down", "down", "up"]


def test_a_reason_works_at_the_oldest_version(oldest_of_a_copy):
    runtime, ids = oldest_of_a_copy
    reason = next(iter(REASONS))
    assert runtime.learner.give_reason(ids[2], reason).reason == reason
    assert len(runtime.learner.history.ratings()) == 3


def test_taking_back_says_that_the_weights_are_gone(oldest_of_a_copy):
    runtime, ids = oldest_of_a_copy
    with pytest.raises(Exception, match=r"version 1 .*no longer kept"):
        runtime.unrate(ids[1])


def test_wrong_facts_in_a_batch_leave_the_bank(open_tiny):
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(2)]
        runtime.rate(ids[0], "up")
        batch = RatingBatch()
        batch.accumulate(runtime.learner, ids[0], "down", FACTS)
        batch.accumulate(runtime.learner, ids[1], "up")
        batch.apply(runtime.learner)
        runtime.learner.rating_index.sync()
        assert runtime.learner.rating_index.bank.labels() == {ids[1]: "up"}


def test_ratings_that_cannot_train_make_no_training_due(open_tiny):
    with open_tiny() as runtime:
        for i in range(16):
            runtime.rate(reply(runtime, seed=i, settle=False), "down", FACTS)
        assert runtime.learner.history.new_and_missing() == (0, 16)
        runtime.rate(reply(runtime, seed=99, settle=False), "up")
        assert runtime.learner.history.new_and_missing() == (1, 15)
