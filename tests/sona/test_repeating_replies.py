"""A reply that repeats itself can be rated as any other, but nothing is learned from it."""

import threading

import numpy as np

from ruvmlx.engine.types import GenerationRequest
from ruvmlx.sampling import Sampling
from tests.test_runtime import say


def looping_reply(runtime, question="tell me of the sea"):
    sampling = Sampling(0.0, logit_bias=((7, 100.0),))
    request = GenerationRequest(prompt=question, sampling=sampling, max_new_tokens=200)
    return list(runtime.writer.generate(request))[-1].response


def test_a_rating_of_a_loop_is_kept_and_changes_nothing(open_tiny):
    """Up and down: the rating is there and can be taken back, and no weight moves."""
    with open_tiny() as runtime:
        for rating in ("up", "down"):
            reply = looping_reply(runtime)
            assert reply.repeats
            result = runtime.rate(reply.request_id, rating)
            assert not result.applied and result.micro_norm == 0
        assert (runtime.status().ratings, runtime.status().updates) == (2, 0)
        assert runtime.undo().ratings == 1


def test_no_part_of_learning_reads_a_loop(open_tiny):
    """Neither the taste model, nor the background loop, nor the examples get it; another reply they do."""
    with open_tiny() as runtime:
        other = say(runtime, runtime.chats.new_chat(), "name a river", n=12)
        runtime.rate(other.request_id, "up")
        reply = looping_reply(runtime)
        runtime.rate(reply.request_id, "up")
        learner = runtime.learner
        assert [id_ for id_, _, _ in learner.taste._rated_features()] == [other.request_id]
        assert [row.reply_id for row in learner.history.rated_replies(10)] == [other.request_id]
        assert learner.rating_index._example(reply.request_id) is None


def test_a_choice_with_a_loop_changes_nothing(open_tiny):
    """The reply beside a loop is not praised for being no loop."""
    with open_tiny() as runtime:
        better = list(runtime.writer.generate(GenerationRequest(
            prompt="tell me of the sea", sampling=Sampling(0.0), max_new_tokens=9, cancel=threading.Event()
        )))[-1].response  # fmt: skip
        worse = looping_reply(runtime)
        before = runtime.learner.micro.lora_b.copy()
        assert not runtime.choices.prefer(better.request_id, worse.request_id).applied
        assert np.array_equal(before, runtime.learner.micro.lora_b)
