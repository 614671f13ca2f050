"""Ratings change the model, survive restarts, and can be taken back."""

from contextlib import contextmanager

import numpy as np
import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.errors import AdapterMismatch, NotFound, RuvmlxError, StoreBusy, StoreError
from ruvmlx.ratings import FACTS
from ruvmlx.sona import learner as learner_module
from ruvmlx.store import Store
from ruvmlx.store import traces as traces_module

from .feedback import reply, weights


@pytest.mark.parametrize("rating,way", [("up", 1), ("5", 1), ("down", -1), ("1", -1)])
def test_a_rating_moves_the_replys_logprob(open_tiny, rating, way):
    with open_tiny() as runtime:
        result = runtime.rate(reply(runtime), rating)
    assert result.applied
    assert (result.logprob_after - result.logprob_before) * way > 0
    assert 0 < result.kl <= result.kl_cap
    assert result.micro_norm > 0 and result.adapter_version == 1


def test_the_next_reply_comes_from_changed_weights(open_tiny):
    """Same prompt and seed, other log-probabilities."""

    def logprobs(runtime):
        request = GenerationRequest(prompt="hello", max_new_tokens=1, sampling=Sampling(0.0), logprobs=5)
        return [chunk.response for chunk in runtime.writer.generate(request)][-1].logprobs[0].top

    with open_tiny() as runtime:
        before = logprobs(runtime)
        runtime.rate(reply(runtime), "up")
        assert logprobs(runtime) != before


def test_rating_in_another_process_uses_the_stored_trace(open_tiny, monkeypatch):
    with open_tiny() as runtime:
        reply_id = reply(runtime)
    with open_tiny() as runtime:
        monkeypatch.setattr(runtime.backend, "hidden_states", None)  # a replay would fail
        result = runtime.rate("last", "up")
    assert result.reply_id == reply_id and result.logprob_after > result.logprob_before


def test_a_reply_whose_trace_is_gone_is_replayed_from_its_tokens(open_tiny):
    """The replayed gradient gives the same update as the trace."""
    with open_tiny() as runtime:
        first = reply(runtime)
        with_trace = runtime.rate(first, "up")
        runtime.undo()
        runtime.learner.traces.held.clear()
        runtime.store.db.execute("DELETE FROM traces")
        replayed = runtime.rate(first, "up")
    assert replayed.logprob_after == pytest.approx(with_trace.logprob_after, abs=1e-4)


def test_only_the_newest_traces_are_kept(open_tiny, monkeypatch):
    monkeypatch.setattr(traces_module, "KEEP_TRACES", 3)
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(5)]
        kept = [i for i in ids if runtime.store.traces.get(i) is not None]
    assert kept == ids[-3:]


def test_ten_restarts_lose_nothing(open_tiny):
    expected = None
    for i in range(10):
        with open_tiny() as runtime:
            if expected is not None:
                assert weights(runtime) == expected
            runtime.rate(reply(runtime, seed=i), "up")
            expected = weights(runtime)
            assert runtime.status().ratings == i + 1


def test_a_changed_rating_replaces_the_old_one(open_tiny):
    """up, then down, is the same as down alone."""
    with open_tiny() as runtime:
        reply_id = reply(runtime)
        runtime.rate(reply_id, "down")
        only_down = runtime.learner.micro
        runtime.undo()
        assert runtime.rate(reply_id, "up").replaces == ""
        up = weights(runtime)
        assert runtime.rate(reply_id, "down").replaces == "up"
        np.testing.assert_allclose(runtime.learner.micro.lora_b, only_down.lora_b, atol=1e-7)
        assert runtime.status().ratings == 1
        runtime.undo()
        assert weights(runtime) == up and runtime.status().ratings == 1


def test_changing_ones_mind_twice_is_the_last_word_alone(open_tiny):
    """up, down, up is up: bit for bit, however often."""
    with open_tiny() as runtime:
        reply_id = reply(runtime)
        runtime.rate(reply_id, "up")
        only_up = runtime.learner.micro
        for rating in ("down", "3", "up"):
            runtime.rate(reply_id, rating)
        for name in ("lora_a", "lora_b"):
            np.testing.assert_array_equal(getattr(runtime.learner.micro, name), getattr(only_up, name))


def test_changing_an_older_rating_again_and_again_always_moves_it_the_right_way(open_tiny):
    with open_tiny() as runtime:
        first = reply(runtime, "one")
        results = [runtime.rate(first, "up"), runtime.rate(reply(runtime, "two"), "up")]
        for rating in ("down", "up", "down", "up", "down"):
            results.append(runtime.rate(first, rating))
            moved = results[-1].logprob_after - results[-1].logprob_before
            assert moved > 0 if rating == "up" else moved < 0
        assert results[-1].logprob_after < results[0].logprob_before
        assert runtime.status().ratings == 2


def test_the_sums_lose_exactly_what_the_ratings_of_one_reply_added(open_tiny):
    """Remove the newer rating from the sums before the older one. In the other order, the code subtracts a
    square twice, and the limit of 0 falsifies the sum."""
    with open_tiny() as runtime:
        changed, *others = (reply(runtime, f"question {i}", seed=i) for i in range(3))
        for reply_id, rating in ((changed, "up"), (others[0], "up"), (changed, "down"), (others[1], "up")):
            runtime.rate(reply_id, rating)
        learner = runtime.learner
        sums = [np.zeros_like(learner.micro.evidence)]
        sums += [learner.active.load(version).micro.evidence for version in range(1, 5)]
        expected = sums[4] - (sums[1] - sums[0]) - (sums[3] - sums[2])
        expected[1:] = np.maximum(expected[1:], 0)
        runtime.rate(changed, "down", FACTS)
        np.testing.assert_allclose(learner.micro.evidence, expected, rtol=1e-3, atol=1e-3)


def test_a_rating_in_another_process_at_the_same_time_is_not_lost(open_tiny, monkeypatch):
    """The other one commits between our look at the store and our commit: we start again from its weights."""
    with open_tiny() as one, open_tiny() as two:
        mine, other = reply(one), reply(two, seed=2)
        weigh, calls = one.learner.rating_index.reward_and_value, []

        def weigh_slowly(*args):
            if not calls:
                two.rate(other, "up")
            calls.append(args)
            return weigh(*args)

        monkeypatch.setattr(one.learner.rating_index, "reward_and_value", weigh_slowly)
        assert one.rate(mine, "up").adapter_version == 2
        assert len(calls) == 2
        assert one.learner.history.adapter(2).parent == 1
        assert one.status().ratings == 2


def test_a_rating_is_not_refused_because_others_rate_all_the_time(open_tiny, monkeypatch):
    """Another process commits before us each time, until we hold the write lock from the beginning."""
    with open_tiny() as one, open_tiny() as two:
        mine, others = reply(one), [reply(two, seed=2 + i) for i in range(learner_module._ATTEMPTS)]
        weigh = one.learner.rating_index.reward_and_value

        def weigh_slowly(*args):
            if not one.store.db.in_transaction:
                two.rate(others.pop(), "up")
            return weigh(*args)

        monkeypatch.setattr(one.learner.rating_index, "reward_and_value", weigh_slowly)
        result = one.rate(mine, "up")
        assert result.adapter_version == learner_module._ATTEMPTS + 1 and not others
        assert one.status().ratings == learner_module._ATTEMPTS + 1
        two.learner.sync()
        assert weights(two) == weights(one)


def test_weights_whose_commit_failed_are_not_used(open_tiny, monkeypatch):
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        before, reply_id, begin = weights(runtime), reply(runtime, seed=2), runtime.store.transaction

        @contextmanager
        def fail_at_commit():
            outermost = not runtime.store.db.in_transaction
            with begin():
                yield
                if outermost:
                    raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(learner_module, "_ATTEMPTS", 0)
            patch.setattr(runtime.store, "transaction", fail_at_commit)
            with pytest.raises(StoreError):
                runtime.rate(reply_id, "down")
        assert runtime.learner.micro.to_bytes() == before and runtime.status().ratings == 1


def test_the_trace_of_another_adapter_is_not_taken_for_ones_own(open_tiny):
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        reply_id = reply(runtime, seed=2)  # drawn by default@1
    with open_tiny(adapter="work") as runtime:
        runtime.rate(reply(runtime, seed=3), "down")  # work@1 is quite another adapter
        row, learner = runtime.store.replies.get(reply_id), runtime.learner
        trace = learner.traces.of(row, learner.state)
        expected = learner.traces.replay(row, learner.state)
        np.testing.assert_allclose(trace.grad_a, expected.grad_a, atol=1e-4)
        assert trace.log_ratio == pytest.approx(expected.log_ratio, abs=1e-6)


@pytest.mark.parametrize("adapter", ["default", None])
def test_a_lost_trace_changes_nothing_about_how_hard_a_rating_pushes(open_tiny, adapter):
    """A reply keeps its own log-probability: importance is the same from its trace and its tokens."""
    with open_tiny(adapter=adapter) as runtime:
        reply_id = reply(runtime, seed=9)
    with open_tiny() as runtime:
        for i in range(4):
            runtime.rate(reply(runtime, seed=i), "up")
        row, learner = runtime.store.replies.get(reply_id), runtime.learner
        kept = learner.traces.of(row, learner.state).importance
        replayed = learner.traces.replay(row, learner.state).importance
        assert kept == pytest.approx(replayed, rel=1e-3) and 0 < kept <= 1


def test_an_older_rating_can_be_changed_too(open_tiny):
    with open_tiny() as runtime:
        first, second = reply(runtime, "one"), reply(runtime, "two")
        runtime.rate(first, "up")
        runtime.rate(second, "up")
        result = runtime.rate(first, "down")
        assert result.logprob_after < result.logprob_before
        assert runtime.status().ratings == 2


def test_another_process_moving_the_adapter_is_noticed(open_tiny):
    with open_tiny() as one, open_tiny() as two:
        one.rate(reply(one), "up")
        assert weights(two) == weights(one)
        two.rate(reply(two, seed=2), "up")
        assert weights(one) == weights(two) and one.status().ratings == 2


def test_a_failed_commit_changes_nothing(open_tiny, home):
    """The store is locked by someone else: the weights in memory are still those on disk."""
    with open_tiny() as runtime:
        reply_id = reply(runtime)
        before = weights(runtime)
        runtime.store.db.execute("PRAGMA busy_timeout = 50")
        other = Store(home / "ruvmlx.db")
        with other.transaction(), pytest.raises(StoreBusy, match="locked"):
            runtime.rate(reply_id, "up")
        assert weights(runtime) == before and runtime.status().ratings == 0
        assert runtime.rate(reply_id, "up").applied


def test_an_update_that_is_not_finite_is_refused(open_tiny):
    with open_tiny() as runtime:
        reply_id = reply(runtime)
        before = weights(runtime)
        trace = runtime.learner.traces.held[reply_id]
        trace.grad_b[0, 0], trace.stats = np.nan, None
        with pytest.raises(RuvmlxError, match="not finite"):
            runtime.rate(reply_id, "up")
        assert weights(runtime) == before and runtime.status().ratings == 0


def test_unknown_replies_and_other_models(open_tiny):
    with open_tiny() as runtime:
        with pytest.raises(NotFound, match="no reply to rate yet"):
            runtime.rate("last", "up")
        with pytest.raises(NotFound, match="nope"):
            runtime.rate("nope", "up")
        reply_id = reply(runtime)
        runtime.store.db.execute("UPDATE replies SET fingerprint = 'other', model = 'bigger'")
        with pytest.raises(AdapterMismatch, match="Open it in a chat by `/model`, for a command"):
            runtime.rate(reply_id, "up")


def test_adapter_none_learns_nothing_but_can_be_rated_later(open_tiny):
    with open_tiny(adapter=None) as runtime:
        reply_id = reply(runtime)
        assert runtime.learning.label is None
        with pytest.raises(NotFound, match="no adapter"):
            runtime.rate(reply_id, "up")
    with open_tiny() as runtime:
        assert runtime.rate(reply_id, "up").applied
