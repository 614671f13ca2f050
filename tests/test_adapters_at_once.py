"""A hundred requests at once, each under its own adapter: what they hold stays within the budgets."""

import pytest

import ruvmlx
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.config.model import Message
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

from .engine.test_admission import CountedBytes

REQUESTS, ADAPTERS, PAGES = 100, 9, 12


@pytest.fixture
def runtime(tiny, tiny_neutral, tiny_whitening, home):
    """The runtime has a KV budget of PAGES pages. Its memory holds three adapters and their traces."""
    store = Store(home / "ruvmlx.db")
    store.model_data.put_reference_text(tiny.fingerprint, tiny_neutral)
    store.model_data.put_whitening(tiny.fingerprint, tiny_whitening)
    backend = NativeBackend(tiny, threads=1)
    with Runtime(store, tiny, backend, Settings(kv="f16", kv_disk=None)) as opened:
        backend.pool.budget = PAGES * backend.pool.sizes[-1]
        opened.learning.residency.budget = 4 * opened.learning.learner.active.nbytes
        yield opened


def request_for(i: int) -> GenerationRequest:
    return GenerationRequest(
        messages=[Message("user", f"question {i}")], max_new_tokens=3 + i % 5, sampling=Sampling(0.0),
        ignore_eos=True, adapter_id=f"a{i % ADAPTERS}",
    )  # fmt: skip


def test_a_hundred_requests_at_once_stay_within_the_budgets(runtime, monkeypatch):
    """KV caches are within theirs after every step, adapters after every request for one; every reply is its
    adapter's, and whole."""
    held, residency = CountedBytes(runtime.backend.pool), runtime.learning.residency
    loaded, get = [], residency.get

    def count_loaded(name):
        found = get(name)
        loaded.append(sum(adapter.bytes for adapter in residency.tiers()))
        return found

    monkeypatch.setattr(residency, "get", count_loaded)
    requests = [request_for(i) for i in range(REQUESTS)]
    streams = {request.request_id: runtime.writer.generate(request) for request in requests}
    responses, widest = {}, 0
    while streams:
        for id_, chunk in [(id_, next(stream, None)) for id_, stream in streams.items()]:
            if chunk is None:
                del streams[id_]
            elif chunk.response is not None:
                responses[id_] = chunk.response
        widest = max(widest, runtime.writer.scheduler.counts[0])
    assert widest > 1 and 0 < held.most <= runtime.backend.pool.budget
    assert 0 < max(loaded) <= residency.budget
    for request in requests:
        response = responses[request.request_id]
        assert response.generation_tokens == request.max_new_tokens
        assert response.adapter == request.adapter_id
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
