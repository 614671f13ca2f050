"""Replies, ratings, undoing and going on, on the MLX backend: with its stream as without."""

import numpy as np
import pytest

from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.chats import stored_replies
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store
from tests.engine.test_stream import Synchronous
from tests.engine.test_stream_trace import assert_near
from tests.test_runtime import say


@pytest.fixture(scope="module")
def streaming(tiny):
    backend = MLXBackend(tiny, device="cpu")
    backend.streams = True  # by itself only where a GPU works beside the host
    return backend


@pytest.fixture
def open_on(tiny, tiny_neutral, tiny_whitening, home):
    """As `open_tiny`, on a backend, with a store for each name."""

    def open_it(backend, name: str) -> Runtime:
        store = Store(home / name / "ruvmlx.db")
        if store.model_data.reference_text(tiny.fingerprint) is None:
            store.model_data.put_reference_text(tiny.fingerprint, tiny_neutral)
            store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
        return Runtime(store, tiny, backend, Settings(kv_disk=10))

    return open_it


def chat_of(open_on, backend, name: str):
    """A chat with ratings, an undo and a restart: what there is to see of it."""
    seen = []
    with open_on(backend, name) as runtime:
        chat = runtime.chats.new_chat()
        for text, rating in (("hello " * 12, "up"), ("and again", "down"), ("more", "4")):
            seen.append(say(runtime, chat, text, n=40))
            seen.append(runtime.rate("last", rating))
        runtime.undo()
        seen.append(say(runtime, chat, "after the undo", cancel_at=9, n=40))
    with open_on(backend, name) as runtime:
        seen.append(say(runtime, chat, "after a restart", n=40))
        reply = runtime.store.replies.get("last")
        runtime.learning.settle()
        traces = runtime.learner.traces.held
        return seen, reply, traces[reply.id], runtime.learner.micro


def test_a_chat_is_the_same(open_on, streaming):
    """Texts, log-probabilities, traces, what ratings made of the adapter, what a restart reads again."""
    one = chat_of(open_on, streaming, "streaming")
    two = chat_of(open_on, Synchronous(streaming), "synchronous")
    for a, b in zip(one[0], two[0], strict=True):
        for name in ("text", "token_ids", "finish_reason", "cached_tokens", "applied", "adapter_version"):
            assert getattr(a, name, None) == getattr(b, name, None)
    (_, reply, trace, micro), (_, other, trace2, micro2) = one, two
    assert reply.sampled_ids == other.sampled_ids and reply.adapter_version == other.adapter_version > 0
    assert_near(reply.logprob, other.logprob)
    assert_near(trace.grad_b, trace2.grad_b)
    np.testing.assert_allclose(micro.lora_b, micro2.lora_b, atol=1e-3 * np.abs(micro2.lora_b).max())
    assert np.abs(micro.lora_b).max() > 0


def test_drafts_hold_what_was_drawn(open_on, streaming, monkeypatch):
    """Every draft has its tokens and their log-probability, as the reply has in the end."""
    monkeypatch.setattr(stored_replies, "SAVE_EVERY", 0.0)
    drafts = []
    with open_on(streaming, "drafts") as runtime:
        monkeypatch.setattr(runtime.store.drafts, "put", lambda chat, row, question: drafts.append(row))
        chat = runtime.chats.new_chat()
        say(runtime, chat, "hello", n=30)
        reply = runtime.store.replies.get("last")
    drawn = [draft for draft in drafts if draft.sampled_ids]
    assert len(drawn) >= 29
    for i, draft in enumerate(drawn):
        assert draft.sampled_ids == reply.sampled_ids[: i + 1]
    assert 0 > drawn[3].logprob > drawn[-1].logprob >= reply.logprob


def test_without_an_adapter(tiny, streaming, home):
    """Nothing learns: tokens are kept, no log-probability."""
    settings = Settings(adapter="none", kv_disk=None)
    with Runtime(Store(home / "ruvmlx.db"), tiny, streaming, settings) as runtime:
        response = say(runtime, runtime.chats.new_chat(), "hello")
        reply = runtime.store.replies.get("last")
    assert reply.sampled_ids[: len(response.token_ids)] == response.token_ids and reply.logprob is None
