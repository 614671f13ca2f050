"""The rank of the MicroLoRA: a choice for an adapter that begins; what has learned keeps its own."""

import numpy as np
import pytest

from ruvmlx.errors import UsageError
from ruvmlx.sona.base_probe import limit_rank
from ruvmlx.sona.rating_batch import RatingBatch

from .feedback import reply, weights
from .layers_below import true_logprob
from .training_runs import steady, tiny_backend  # noqa: F401 - fixtures


def log_softmax(z):
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("rating,way", [("up", 1), ("down", -1)])
def test_a_rating_moves_the_reply_at_either_rank(open_tiny, rank, rating, way):
    """The KL is that of the whole model's distributions, read by the slow way."""
    with open_tiny(micro_rank=rank) as runtime:
        reply_id = reply(runtime)
        before = true_logprob(runtime, reply_id)
        result = runtime.rate(reply_id, rating)
        micro, probe = runtime.learner.micro, runtime.learner.probe
        assert (micro.rank, micro.scale, micro.lora_b.shape[0]) == (rank, 4.0 / rank, rank)
        assert (true_logprob(runtime, reply_id) - before) * way > 0 and result.applied
        assert 0 < result.kl <= result.kl_cap
        n = probe.answers
        z = probe.head(probe.contexts[:n]).astype(np.float64)
        new = z + micro.scale * (probe.contexts[:n].astype(np.float64) @ micro.lora_a) @ micro.lora_b
        old, new = log_softmax(z), log_softmax(new)
        kl = float(np.mean(np.sum(np.exp(new) * (new - old), axis=1)))
        assert probe.kl(micro) == pytest.approx(kl, rel=0.02) and result.kl == pytest.approx(kl, rel=0.05)


def test_undo_and_restart_work_at_rank_1(open_tiny):
    with open_tiny(micro_rank=1) as runtime:
        first = reply(runtime)
        before = weights(runtime)
        for i in range(3):
            runtime.rate(reply(runtime, seed=i), "down" if i % 2 else "up")
        learned = weights(runtime)
        with open_tiny(micro_rank=1) as again:
            assert weights(again) == learned and again.rate(first, "up").applied
            again.undo()
        runtime.rollback(0)
        assert weights(runtime) == before


def test_an_adapter_that_has_learned_keeps_its_rank(open_tiny):
    """Another setting counts for adapters that begin; a rollback to a version of another rank works."""
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        learned = weights(runtime)
    with open_tiny(micro_rank=1) as runtime:
        assert runtime.learner.micro.rank == 2 and weights(runtime) == learned
        assert runtime.rate(reply(runtime, seed=2), "down").applied and runtime.learner.micro.rank == 2
        runtime.rollback(0)
    with open_tiny(micro_rank=1) as runtime:
        assert runtime.learner.micro.rank == 1
        one = runtime.rate(reply(runtime, seed=3), "up").adapter_version
        batch = RatingBatch()
        batch.accumulate(runtime.learner, reply(runtime, seed=4), "up")
        with pytest.raises(UsageError):
            batch.apply_with_ewc(runtime.learner, 1)
        runtime.rollback(1)
        runtime.learner.sync()
        assert weights(runtime) == learned
        assert runtime.rate(reply(runtime, seed=5), "up").applied and runtime.learner.micro.rank == 2
        runtime.rollback(one)
        runtime.learner.sync()
        assert runtime.learner.micro.rank == 1 and runtime.rate(reply(runtime, seed=6), "up").applied


def test_a_probe_of_less_rank_computes_nothing_again(open_tiny):
    """It shares what the head has said of the contexts, and reads the first directions of the whole."""
    with open_tiny() as runtime:
        whole = runtime.learner.probe
        whole.look()
        one = limit_rank(whole, 1)
        assert one.packed_probs is whole.packed_probs and limit_rank(whole, 2) is whole
        np.testing.assert_array_equal(one.directions, whole.directions[:, :1])
        assert (one.coordinates.rank, whole.coordinates.rank) == (1, 2)
        np.testing.assert_array_equal(one.drift, whole.drift[:1])
