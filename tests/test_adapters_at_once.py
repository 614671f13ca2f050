"""A hundred requests at once, each under its own adapter: what they hold stays within the budgets."""

import pytest

import ruvmlx
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.engine.types import Chunk
from ruvmlx.models.config.model import Message
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

from .engine.test_admission import CountedBytes

REQUESTS, ADAPTERS, PAGES = 100, 9, 12


class LastChunk:
    """A sink that keeps the end of a reply."""

    def __init__(self) -> None:
        self.response = self.error = None

    def take(self, chunk: Chunk) -> None:
        self.response = chunk.response

    def fail(self, error: BaseException) -> None:
        self.error = error


@pytest.fixture
def runtime(tiny, tiny_neutral, tiny_whitening, home):
    """With a KV budget of PAGES pages, and room for three adapters."""
    store = Store(home / "ruvmlx.db")
    store.model_data.put_reference_text(tiny.fingerprint, tiny_neutral)
    store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
    backend = NativeBackend(tiny, threads=1)
    with Runtime(store, tiny, backend, Settings(kv="f16", kv_disk=None)) as opened:
        backend.pool.budget = PAGES * backend.pool.sizes[-1]
        opened.learning.residency.budget = 3 * opened.learning.learner.active.nbytes
        yield opened


def request_for(i: int) -> GenerationRequest:
    return GenerationRequest(
        messages=[Message("user", f"question {i}")], max_new_tokens=3 + i % 5, sampling=Sampling(0.0),
        ignore_eos=True, adapter_id=f"a{i % ADAPTERS}",
    )  # fmt: skip


def test_a_hundred_requests_at_once_stay_within_the_budgets(runtime):
    """KV caches and adapters are within theirs after every step; every reply is its adapter's, and whole."""
    held, residency = CountedBytes(runtime.backend.pool), runtime.learning.residency
    requests = [request_for(i) for i in range(REQUESTS)]
    sinks = [LastChunk() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        runtime.writer.submit(request, sink)
    widest = most_adapters = 0
    while runtime.writer.scheduler.step():
        widest = max(widest, runtime.writer.scheduler.counts[0])
        loaded = sum(adapter.bytes for adapter in residency.tiers())
        most_adapters = max(most_adapters, loaded)
    assert widest > 1 and 0 < held.most <= runtime.backend.pool.budget
    assert 0 < most_adapters <= residency.budget
    for request, sink in zip(requests, sinks, strict=True):
        assert sink.error is None and sink.response.generation_tokens == request.max_new_tokens
        assert sink.response.adapter == request.adapter_id
        assert runtime.store.replies.get(request.request_id).adapter == request.adapter_id
    assert runtime.learning.label == "default@0"
    cold = [adapter for adapter in residency.tiers() if adapter.tier == "cold"]
    assert len(cold) >= ADAPTERS - 3 and residency.tiers()[0].name == "default"


def test_a_hundred_streams_of_the_api_at_once(tiny_folder, home):
    """They are answered in order, each by its adapter, under one KV budget."""
    with ruvmlx.open(
        tiny_folder, backend="native", threads=1, kv_budget=1, temperature=0, max_tokens=2
    ) as model:
        held = CountedBytes(model._runtime.backend.pool)
        streams = [model.stream(f"question {i}", adapter=f"a{i % ADAPTERS}") for i in range(REQUESTS)]
        assert [stream.reply.adapter for stream in streams] == [f"a{i % ADAPTERS}" for i in range(REQUESTS)]
        assert 0 < held.most <= model._runtime.backend.pool.budget
        assert model.adapter == "default@0"
