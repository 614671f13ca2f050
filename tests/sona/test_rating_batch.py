"""Several ratings as one update: one version, one undo, all or nothing."""

import numpy as np
import pytest

from ruvmlx.errors import NotFound, RuvmlxError, UsageError
from ruvmlx.ratings import FACTS
from ruvmlx.sona import learner
from ruvmlx.sona.rating_batch import RatingBatch
from ruvmlx.store.audit import disagreement

from .feedback import reply, weights
from .layers_below import learned_state
from .training_runs import steady, tiny_backend  # noqa: F401 - fixtures

RATINGS = ("up", "down", "up", "2")


def batch_of(runtime, ids) -> RatingBatch:
    batch = RatingBatch()
    for n, (id_, rating) in enumerate(zip(ids, RATINGS, strict=True)):
        assert batch.accumulate(runtime.learner, id_, rating) == n + 1 == batch.pending
    return batch


@pytest.mark.parametrize("targets", ["head", "head,attention", "q_proj,v_proj:1"])
def test_a_batch_is_one_version_and_one_undo(open_tiny, targets):
    """Nothing changes before; then all ratings are in force, and one undo takes them back bit for bit."""
    with open_tiny(learn_targets=targets) as runtime:
        ids = [reply(runtime, seed=i) for i in range(len(RATINGS))]
        before, batch = learned_state(runtime), batch_of(runtime, ids)
        assert learned_state(runtime) == before and runtime.status().ratings == 0
        result = batch.apply(runtime.learner)
        assert (result.ratings, result.applied, batch.pending) == (4, True, 0)
        assert result.adapter_version == runtime.status().adapter_version == 1
        assert 0 < result.kl <= result.kl_cap and learned_state(runtime) != before
        assert {row.reply_id: row.rating for row in runtime.learner.history.ratings()} == dict(
            zip(ids, RATINGS, strict=True)
        )
        assert runtime.store.witness.check().broken is None and disagreement(runtime.store) == ""
        after = learned_state(runtime)
        with open_tiny(learn_targets=targets) as again:
            assert learned_state(again) == after
        runtime.undo()
        assert learned_state(runtime) == before and runtime.status().ratings == 0


def test_a_batch_of_one_is_a_rating(open_tiny):
    with open_tiny() as runtime:
        id_ = reply(runtime)
        runtime.rate(id_, "down", "too long")
        wanted = weights(runtime)
        runtime.undo()
        batch = RatingBatch()
        batch.accumulate(runtime.learner, id_, "up")
        batch.accumulate(runtime.learner, id_, "down", "too long")  # the later one counts
        assert batch.apply(runtime.learner).ratings == 1
        assert weights(runtime) == wanted
        assert runtime.learner.history.ratings()[0].note == "too long"


def test_a_penalty_keeps_more_of_an_earlier_version(open_tiny):
    """With the penalty, a batch against what was learned leaves the liked reply likelier than without."""
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(4)]
        for id_ in ids:
            liked = runtime.rate(id_, "up").adapter_version
        found = []
        for strength in (None, 1e4):
            batch = RatingBatch()
            for id_ in ids[:3]:
                batch.accumulate(runtime.learner, id_, "down")
            learner = runtime.learner
            batch.apply(learner) if strength is None else batch.apply_with_ewc(learner, liked, strength)
            trace = learner.traces.of(runtime.store.replies.get(ids[3]), learner.state)
            found.append(trace.logprob)
            runtime.undo()
        assert found[1] > found[0]


def test_what_fails_changes_nothing_and_the_ratings_still_wait(open_tiny, monkeypatch):
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(len(RATINGS))]
        batch, before = batch_of(runtime, ids), learned_state(runtime)
        with monkeypatch.context() as m:
            m.setattr(type(runtime.learner), "weigh", lambda *_: np.nan)
            with pytest.raises(RuvmlxError):
                batch.apply(runtime.learner)
        assert learned_state(runtime) == before and runtime.status().ratings == 0 and batch.pending == 4
        with pytest.raises(NotFound):
            batch.apply_with_ewc(runtime.learner, 77)
        with pytest.raises(UsageError):
            batch.apply_with_ewc(runtime.learner, 0, -1.0)
        assert batch.apply(runtime.learner).ratings == 4


def test_a_wrong_rating_is_refused_at_once(open_tiny):
    with open_tiny() as runtime:
        batch = RatingBatch()
        with pytest.raises(UsageError):
            batch.accumulate(runtime.learner, reply(runtime), "great")
        with pytest.raises(NotFound):
            batch.accumulate(runtime.learner, "nobody", "up")
        with pytest.raises(UsageError):
            batch.apply(runtime.learner)
        batch.accumulate(runtime.learner, reply(runtime), "up")
        batch.reset()
        assert batch.pending == 0 and runtime.status().adapter_version == 0


@pytest.mark.parametrize("rated", [False, True])
def test_a_rating_of_a_deleted_reply_does_not_stop_the_others(open_tiny, rated):
    """A deleted reply keeps its row in the store only if the reply has an earlier rating."""
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(len(RATINGS))]
        if rated:
            runtime.rate(ids[1], "up")
        batch = batch_of(runtime, ids)
        runtime.store.replies.forget([ids[1]])
        assert batch.apply(runtime.learner).ratings == 3 and batch.pending == 0
        given = {row.reply_id for row in runtime.learner.history.ratings()}
        assert given == set(ids) - ({ids[1]} if not rated else set())
        batch.accumulate(runtime.learner, ids[0], "down")
        runtime.store.replies.forget([ids[0]])
        before = learned_state(runtime)
        with pytest.raises(NotFound, match="all were deleted"):
            batch.apply(runtime.learner)
        assert batch.pending == 0 and learned_state(runtime) == before


def test_one_rating_of_a_batch_is_taken_back_alone(open_tiny):
    """The others stay in force, with the weights that they give alone; none of them takes a reason."""
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(len(RATINGS))]
        batch_of(runtime, ids).apply(runtime.learner)
        with pytest.raises(UsageError):
            runtime.choices.give_reason(ids[1], "long")
        later = reply(runtime, seed=9)
        runtime.rate(later, "up")
        runtime.unrate(ids[1])
        left = {row.reply_id: row.rating for row in runtime.learner.history.ratings()}
        assert left == {ids[0]: "up", ids[2]: "up", ids[3]: "2", later: "up"}
        found = weights(runtime)
        runtime.rollback(0)
        for id_, rating in left.items():
            runtime.rate(id_, rating)
        assert weights(runtime) == found and disagreement(runtime.store) == ""


def test_another_rating_of_one_reply_leaves_the_rest_of_the_batch(open_tiny):
    """What the batch taught stays in the sums; the ratings in force are the new one and the other three."""
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(len(RATINGS))]
        batch_of(runtime, ids).apply(runtime.learner)
        taught = runtime.learner.micro.evidence[2].copy()
        runtime.rate(ids[1], "up")
        assert np.all(runtime.learner.micro.evidence[2] >= 0.6 * taught) and taught.any()
        given = {row.reply_id: row.rating for row in runtime.learner.history.ratings()}
        assert given == dict(zip(ids, RATINGS, strict=True)) | {ids[1]: "up"}
        assert disagreement(runtime.store) == ""


def test_a_batch_that_only_takes_back_has_changed_the_weights(open_tiny):
    """A rating for wrong facts teaches nothing, but it replaces the rating before. So it changes the adapter,
    and the result says "applied"."""
    with open_tiny() as runtime:
        id_, before, applied = reply(runtime), weights(runtime), []
        for rating, note in (("up", ""), ("down", FACTS)):
            batch = RatingBatch()
            batch.accumulate(runtime.learner, id_, rating, note)
            applied.append(batch.apply(runtime.learner).applied)
        assert applied == [True, True] and weights(runtime) == before


def test_a_rating_by_another_process_meanwhile_is_kept(open_tiny, monkeypatch):
    """The batch is computed again over the other's version."""
    with open_tiny() as runtime, open_tiny() as other:
        ids = [reply(runtime, seed=i) for i in range(len(RATINGS))]
        extra, batch, real = reply(other, seed=8), batch_of(runtime, ids), learner.pack_adapter
        begun = []

        def pack_late(*args):
            monkeypatch.setattr(learner, "pack_adapter", real)
            begun.append(other.rate(extra, "up").adapter_version)
            return real(*args)

        monkeypatch.setattr(learner, "pack_adapter", pack_late)
        assert batch.apply(runtime.learner).adapter_version == begun[0] + 1
        assert runtime.status().ratings == 5
