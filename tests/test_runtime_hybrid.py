"""Chats on the hybrid backend: replies and ratings as on the main side alone, work beside a reply."""

from threading import Event

import numpy as np
import pytest

from ruvmlx.backends.base import KL, QUESTIONS
from ruvmlx.engine import Sampling
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona import embedding
from ruvmlx.store import Store
from tests.backends.hybrid import Failing, join, open_side
from tests.test_runtime import say

GREEDY = Sampling(0.0)


@pytest.fixture(scope="module")
def native(tiny):
    return open_side("native", tiny)


@pytest.fixture(scope="module")
def mlx(tiny):
    return open_side("mlx", tiny)


@pytest.fixture
def open_on(tiny, tiny_neutral, tiny_whitening, home):
    """Open a runtime on a backend, with a store for each name."""

    def open_it(backend, name, measured=True, **settings) -> Runtime:
        store = Store(home / name / "ruvmlx.db")
        if measured and store.model_data.reference_text(tiny.fingerprint) is None:
            store.model_data.put_reference_text(tiny.fingerprint, tiny_neutral)
            store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
        return Runtime(store, tiny, backend, Settings(kv_disk=10, **settings))

    return open_it


def rows(runtime, kind):
    return [row.body for row in runtime.store.witness.rows(kind)]


def chat_on(runtime):
    """The replies of a chat with ratings, an undo, and examples of liked replies."""
    seen, chat = [], runtime.chats.new_chat()
    for text, rating in (("hello " * 9, "up"), ("and again", "down"), ("hello hello", "5")):
        seen.append(say(runtime, chat, text, n=30).token_ids)
        runtime.learning.settle()
        assert runtime.rate("last", rating).applied
    runtime.undo()
    return [*seen, say(runtime, chat, "after the undo", n=30).token_ids]


@pytest.mark.parametrize("name", ["native", "mlx"])
def test_a_chat_with_ratings_is_that_of_the_main_side(open_on, native, mlx, name):
    main, other = (native, mlx) if name == "native" else (mlx, native)
    with open_on(main, "alone", examples=1) as runtime:
        alone = chat_on(runtime)
    with open_on(join(main, other), "hybrid", examples=1) as runtime:
        both, micro = chat_on(runtime), runtime.learner.micro
        questions = runtime.backend.placement.other.intervals
    assert alone == both and np.abs(micro.lora_b).max() > 0
    assert {interval.kind for interval in questions} == {QUESTIONS}
    assert main.lora is None or other.lora is None


def test_the_question_is_read_while_the_reply_is_written(open_on, native, mlx, monkeypatch):
    """The question is read once, and a rating finds its vector; the log has the overlap."""
    other = Failing(mlx)
    hybrid = join(native, other)
    with open_on(hybrid, "a") as runtime:
        say(runtime, runtime.chats.new_chat(), "what is a river", n=40)
        for job in list(hybrid._jobs):
            job.result(30)
        monkeypatch.setattr(embedding, "read_question", None)
        reply = runtime.store.replies.get("last")
        vector = runtime.learner.rating_index.query(reply)
        assert vector is not None and runtime.rate("last", "up").applied
        assert other.seen == ["hidden_states"]
    with open_on(hybrid, "a") as runtime:
        [facts] = rows(runtime, "hybrid")
        assert runtime.store.witness.check().broken is None
    assert facts["placement"]["questions"] == "mlx" and facts["placement"]["replies"] == "native"
    assert facts["overlap_s"] >= 0 and facts["failed"] == []


def test_the_model_is_measured_while_the_first_reply_is_written(open_on, native, mlx):
    """The KL probe comes from the other side, and is that of a measurement alone."""
    hybrid = join(native, mlx)
    with open_on(hybrid, "a", measured=False) as runtime:
        say(runtime, runtime.chats.new_chat(), "what is a river", n=6)
        active = runtime.learner.active
        assert not active.knows_model
        active._ahead.result(60)
        assert {i.kind for i in hybrid.placement.other.intervals} >= {KL}
        before = len(hybrid.placement.main.intervals)
        active.measure()
        probe = active.frozen_probe
        assert len(hybrid.placement.main.intervals) == before and runtime.rate("last", "up").applied
    with open_on(mlx, "b", measured=False) as runtime:
        alone = runtime.learner.active.frozen_probe
    np.testing.assert_array_equal(probe.tokens, alone.tokens)
    np.testing.assert_allclose(probe.contexts, alone.contexts, atol=1e-4 * np.abs(alone.contexts).max())


def test_a_rating_ends_the_measurement_beside(open_on, native, mlx):
    """A rating does not wait for the whole measurement: it takes the rest over, in a hurry."""
    with open_on(join(native, mlx), "a", measured=False) as runtime:
        say(runtime, runtime.chats.new_chat(), "what is a river", n=6)
        assert runtime.rate("last", "up").applied
        active = runtime.learner.active
        assert active.is_measured and active._ahead is None and active._hurry.is_set()


@pytest.mark.parametrize("name", ["native", "mlx"])
def test_a_side_that_fails_within_a_reply(open_on, native, mlx, name):
    """The reply ends, one line and one row of the log say why, and the chat goes on with ratings."""
    main, other = (native, mlx) if name == "native" else (mlx, native)
    with open_on(main, "alone") as runtime:
        alone = say(runtime, runtime.chats.new_chat(), "hello " * 9, n=30)
    hybrid = join(Failing(main, 12, of=("decode", "decode_drafted")), other)
    with open_on(hybrid, "a") as runtime:
        chat = runtime.chats.new_chat()
        *_, last = runtime.chats.say(chat, "hello " * 9, max_new_tokens=30, sampling=GREEDY, cancel=Event())
        assert last.response.token_ids == alone.token_ids
        assert last.note.startswith(f"{name} failed (RuntimeError: the device is gone)")
        assert [row["side"] for row in rows(runtime, "side_failure")] == [name]
        assert runtime.rate("last", "up").applied
        again = say(runtime, chat, "and again", n=10)
        assert again.generation_tokens and len(rows(runtime, "side_failure")) == 1


def test_a_failure_beside_a_reply_costs_nothing(open_on, native, mlx):
    """The other side fails while it reads the question: the main side reads it, and the user is told."""
    hybrid = join(native, Failing(mlx, 0))
    with open_on(hybrid, "a") as runtime:
        say(runtime, runtime.chats.new_chat(), "what is a river", n=20)
        runtime.learning.settle()
        assert runtime.rate("last", "up").applied
        assert runtime.store.replies.query(runtime.store.replies.get("last").id) is not None
        say(runtime, runtime.chats.new_chat(), "and now", n=5)
        assert [row["side"] for row in rows(runtime, "side_failure")] == ["mlx"]


def test_unseen_replies_are_written_by_the_other_side(open_on, native, mlx):
    hybrid = join(native, mlx)
    with open_on(hybrid, "a") as runtime:
        say(runtime, runtime.chats.new_chat(), "what is a river", n=20)
        runtime.rate("last", "up")
        runtime.learning.settle(Event())
        kinds = [interval.kind for interval in hybrid.placement.other.intervals]
    assert "samples" in kinds


def test_texts_are_embedded_by_the_other_side(open_on, native, mlx):
    """A side that fails between two pieces of a text costs a second reading."""
    texts = ["a river " * 40, "a stream of water"]
    with open_on(mlx, "alone") as runtime:
        wanted = runtime.embed(texts)
    for calls in (None, 1):
        hybrid = join(native, Failing(mlx, calls))
        with open_on(hybrid, str(calls)) as runtime:
            got = runtime.embed(texts)
        assert bool(hybrid.take_failures()) == (calls is not None)
        for one, two in zip(got, wanted, strict=True):
            assert one @ two > 0.999
