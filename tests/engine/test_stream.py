"""The MLX backend's stream runs one step ahead of its reader, without any effect on the reply, the cache, the
session or the trace."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.base import Streaming
from ruvmlx.backends.mlx import sampler, stream
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.engine import LLMInferenceEngine, Sampling, source
from ruvmlx.engine.batch import generate_many
from ruvmlx.engine.best_of import BestOf
from ruvmlx.engine.run import Run
from ruvmlx.engine.scheduler import Arrivals, Scheduler
from ruvmlx.engine.source import StepSource, StreamSource
from ruvmlx.errors import RuvmlxError
from ruvmlx.kv.policy import TIERED, TierPolicy
from ruvmlx.kv.pool import PagePool
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx
from ruvmlx.sona.trace import Trace
from tests.backends.test_mlx_backend import broken, poison
from tests.models.make_models import make_safetensors_model
from tests.sona.test_trace import random_adapter

from .test_engine import GREEDY, request

SMALL = TierPolicy("tiered", (64, 128))
CACHES = {"plain": None, "tiered": SMALL}
SEEDED = Sampling(0.9, top_p=0.95, seed=11)
LONG = 2300


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """ "full": attends to all tokens; "window": to the last 48 tokens."""
    folder, more = tmp_path_factory.mktemp("stream"), {"max_context": LONG}
    full, window = (
        make_safetensors_model(folder / name, **more, **shape)
        for name, shape in (("full", {}), ("window", {"sliding_window": 48}))
    )
    return {"full": load_model(str(full)), "window": load_model(str(window))}


def open_streaming(model, own_layers=True) -> MLXBackend:
    backend = MLXBackend(model, device="cpu", chunk=64, own_layers=own_layers)
    backend.pool = PagePool(backend.pool.storage, pressure=lambda: 0.0)
    backend.streams = True  # by itself only where a GPU works beside the host
    return backend


@pytest.fixture(scope="module", params=["full", "window"])
def backend(request, models):
    return open_streaming(models[request.param])


@pytest.fixture(scope="module")
def full_backend(models):
    return open_streaming(models["full"])


class Synchronous:
    """A backend without its stream: the engine draws every token, and feeds it when the next one is
    needed."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        if name == "stream":
            raise AttributeError(name)
        return getattr(self._backend, name)


def engines(models, backend, policy=None) -> tuple[LLMInferenceEngine, LLMInferenceEngine]:
    """(with the stream, without it)"""
    model = next(m for m in models.values() if m.config == backend.config)
    assert isinstance(backend, Streaming) and not isinstance(Synchronous(backend), Streaming)
    return tuple(LLMInferenceEngine(model, b, policy) for b in (backend, Synchronous(backend)))


# Ahead of its reader ------------------------------------------------------------------------------


class Events:
    """Replaces mlx.core in the stream, and records submissions and waits in order."""

    def __init__(self, patch):
        self.seen, self._number = [], stream._number
        patch.setattr(stream, "mx", self)
        patch.setattr(stream, "_number", self._read)

    def __getattr__(self, name):
        return getattr(mx, name)

    def async_eval(self, *arrays):
        self.seen.append("submit")
        mx.async_eval(*arrays)

    def eval(self, *arrays):
        self.seen.append("wait")
        mx.eval(*arrays)

    def _read(self, array):
        self.seen.append("read")
        assert array.size == 1
        return self._number(array)


def events_of(backend, monkeypatch, n=6) -> list[str]:
    """The events of n tokens after a prompt of two chunks."""
    with monkeypatch.context() as patch:
        seen = Events(patch).seen
        tokens = backend.stream(backend.new_cache(), None, SEEDED, n)
        tokens.prefill([5] * 70)
        for _ in range(n):
            tokens.read()
            seen.append(".")
        tokens.close()
    return seen


AHEAD = [
    *["submit", "submit", "wait"],  # two chunks: the first is waited for when the second is under way
    *[
        "submit",
        "submit",
        "wait",
        "read",
        "read",
        ".",
    ],  # the first token, and what comes after it
    *(["submit", "read", "read", "."] * 4),  # the next step before the token
    *["read", "read", "."],  # the limit: no step ahead
]


def test_the_next_step_is_submitted_before_the_token_is_read(full_backend, monkeypatch):
    """Nothing but the token and one number of the step before is read, and that after the next submission."""
    assert events_of(full_backend, monkeypatch) == AHEAD


def test_a_synchronous_loop_would_be_seen(full_backend, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(full_backend.new_cache()), "room", 0)
        assert events_of(full_backend, monkeypatch) != AHEAD


@pytest.mark.parametrize(
    ("policy", "own_layers"),
    [(None, True), *((policy, False) for policy in CACHES.values())],  # the CPU's tiers are read by the host
    ids=["cpu-plain", *(f"graph-{name}" for name in CACHES)],
)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, Sampling(0.7, top_k=7, min_p=0.1)], ids=str)
def test_a_step_reads_nothing(models, policy, own_layers, sampling, monkeypatch):
    """Under mx.compile arrays have no values: whatever read one would raise."""
    backend = open_streaming(models["full"], own_layers)
    cache = backend.new_cache(policy)
    tokens = backend.stream(cache, random_adapter(backend.config), sampling, 9)
    tokens.prefill([5] * 70)
    tokens.read()
    monkeypatch.setattr(mx, "async_eval", lambda *_: None)
    step = mx.compile(lambda token: tuple(tokens._feed_token(token)))
    assert [a.shape for a in step(mx.array([7], mx.uint32))] == [(1,), (), (1, 64)]
    drawn = sampler.MLXSampler.__call__

    def reads(self, logits):
        logits.max().item()
        return drawn(self, logits)

    monkeypatch.setattr(sampler.MLXSampler, "__call__", reads)
    with pytest.raises(ValueError, match="eval"):
        mx.compile(lambda token: tuple(tokens._feed_token(token)))(mx.array([7], mx.uint32))


def test_memory_is_tidied(full_backend, monkeypatch):
    """As mlx-lm does, every so many tokens; a pool that grows does it, too."""
    calls = []
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(1))
    events_of(full_backend, monkeypatch, n=9)
    others = len(calls)
    monkeypatch.setattr(stream, "TIDY", 4)
    events_of(full_backend, monkeypatch, n=9)
    assert len(calls) == 2 * others + 2


def test_the_prompts_end_is_known_without_waiting_for_it(models, full_backend):
    """The prompt's end is known, though nobody waited for it on the way."""
    engine, _ = engines(models, full_backend)
    run = Run(engine, request(prompt="word " * 300))
    response = list(run.chunks())[-1].response
    assert run.started < run.source.prefilled_at <= run.first_token
    assert 0 < response.generation_tps < 1e5 and 0 < response.prompt_tps < 1e6
    assert 0 < response.ttft_ms < response.latency_ms


# The same replies, and nothing left behind --------------------------------------------------------


def state(engine, session="s"):
    """Everything that a reply leaves behind."""
    held = engine.sessions.get(session)
    cache = held.cache
    assert len(held.tokens) == cache.offset
    pages = [p and p.tier for p in cache.pages] if hasattr(cache, "pages") else None
    return held.tokens, cache.offset, pages, cache.stats()


class DrawsOfMLX:
    """An engine's Sampler that draws with MLX, as a stream does. NumPy adds probabilities in float64, MLX in
    float32: about one draw in 10,000 is another token (seen where the sum before an id was 1.6e-8 from
    top_p)."""

    def __init__(self, sampling, rule=None, draws=0):
        self._draw = sampler.MLXSampler(sampling, draws=draws)

    def __call__(self, logits):
        return self._draw(mx.array(logits[None])).item()

    def work(self, logits, drawn):
        return None


@pytest.mark.parametrize("policy", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_replies_over_page_boundaries(models, backend, policy, sampling, monkeypatch):
    """Tokens 40 to 700: hot pages at 64, 128 ..., demotions, a window's pages dropped, its buffer shifted.
    MLX draws for both replies."""
    monkeypatch.setattr(source, "Sampler", DrawsOfMLX)
    some = request(prompt=None, input_ids=[7] * 40, max_new_tokens=660, sampling=sampling, session_id="s")
    with_, without = engines(models, backend, policy)
    one, two = with_.generate(some), without.generate(some)
    assert one.token_ids == two.token_ids and len(set(one.token_ids)) > 3
    assert (one.text, one.finish_reason, one.kv) == (two.text, two.finish_reason, two.kv)
    assert state(with_) == state(without)


def test_the_tiers_of_the_real_policy(models, full_backend):
    """Over 2,111, where the first page becomes cold."""
    ids = [(7 * i) % 251 + 3 for i in range(2100)]
    some = request(prompt=None, input_ids=ids, max_new_tokens=30, session_id="s")
    with_, without = engines(models, full_backend, TIERED)
    assert with_.generate(some).token_ids == without.generate(some).token_ids
    assert state(with_) == state(without) and state(with_)[2][:2] == [0, 1]


def end_reply(engine, how, at, tokenizer, monkeypatch, ids):
    """A reply of `at` tokens to `ids`, ended in this way, and the turn after it."""
    fields = {"prompt": None, "input_ids": ids, "session_id": "s", "max_new_tokens": 90}
    if how == "limit":
        fields["max_new_tokens"] = at
    some = request(**fields)
    drawn = [5 + i for i in range(90)]  # tokens that never repeat: the engine's tokens are forced below
    with monkeypatch.context() as patch:
        force(patch, drawn)
        if how == "eos":
            patch.setattr(tokenizer, "eos_ids", frozenset([drawn[at]]))
            some.ignore_eos = False
        if how == "stop":
            some.stop = (tokenizer.decode([drawn[at - 1]]),)
        for chunk in engine.stream(some):
            if how == "cancel" and chunk.generated == at:
                some.cancel.set()
            if how == "closed" and chunk.generated == at:
                break
    left = state(engine)
    after = [*ids, *drawn[: at - 1], 9, 9]
    return left, engine.generate(request(prompt=None, input_ids=after, session_id="s", max_new_tokens=9))


def force(patch, drawn):
    """Make every sampler draw these tokens."""
    from ruvmlx.sampling import Sampler

    def ours(self, logits):
        self.at = getattr(self, "at", -1) + 1
        return mx.array([drawn[self.at]], mx.uint32) if isinstance(logits, mx.array) else drawn[self.at]

    patch.setattr(sampler.MLXSampler, "__call__", ours)
    patch.setattr(Sampler, "__call__", ours)


@pytest.mark.parametrize("policy", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("how", ["limit", "eos", "stop", "cancel", "closed"])
def test_endings_leave_what_a_synchronous_reply_leaves(models, backend, policy, how, monkeypatch):
    """Around token 192, where pages are made, demoted and left behind by the window, and around 256, where a
    plain cache's buffer grows, or is shifted."""
    tokenizer = models["full"].tokenizer
    for model in models.values():
        monkeypatch.setattr(model, "tokenizer", tokenizer)
    later = () if policy else (75, 76, 77, 78)
    for at in (1, 2, 11, 12, 13, 14, 15, 16, 17, *later):
        with_, without = engines(models, backend, policy)
        ids = [(3 * i) % 200 + 40 for i in range(180)]
        left, after = end_reply(with_, how, at, tokenizer, monkeypatch, ids)
        other, then = end_reply(without, how, at, tokenizer, monkeypatch, ids)
        assert left == other and left[1] == 180 + at - 1 + (how == "eos")
        assert (after.token_ids, after.cached_tokens) == (then.token_ids, then.cached_tokens)
        assert after.cached_tokens == 180 + at - 1


def test_what_stays_ahead_would_be_seen(models, full_backend, monkeypatch):
    """Were the step ahead not taken back, the session would say so."""
    monkeypatch.setattr(stream.MLXTokenStream, "close", lambda self: None)
    with pytest.raises(AssertionError):
        with_, without = engines(models, full_backend, SMALL)
        some = request(session_id="s", stop=("a",), max_new_tokens=60)
        for engine in (with_, without):
            for chunk in engine.stream(some):
                if chunk.generated == 5:
                    break
        assert state(with_) == state(without)


def test_pages_demoted_early_do_not_cut_the_reply(models, full_backend):
    """Pages that were demoted early: a trim would cut the reply back to where they begin."""
    with_, without = engines(models, full_backend, TIERED)
    try:
        full_backend.pool.level, full_backend.pool.pressure = 5, lambda: 1.0
        left = []
        for engine in (with_, without):
            some = request(prompt=None, input_ids=[7] * 300, max_new_tokens=40, session_id="s")
            for chunk in engine.stream(some):
                if chunk.generated == 30:
                    some.cancel.set()
            left.append(state(engine))
        assert left[0] == left[1] and left[0][1] == 329
    finally:
        full_backend.pool = PagePool(full_backend.pool.storage, pressure=lambda: 0.0)


def test_cancel_in_the_prompt(models, full_backend):
    """Between two chunks of a piece: the cache holds what was reported."""
    for engine in engines(models, full_backend, SMALL):
        some = request(prompt=None, input_ids=[7] * 600, session_id="s")
        for chunk in engine.stream(some):
            if chunk.prefilled == 256:
                some.cancel.set()
        assert (chunk.response.finish_reason, chunk.response.text) == ("cancelled", "")
        assert state(engine)[1] == 256


def test_a_session_goes_on(models, backend):
    """Turns, edits and stops on one session, with the stream and without."""
    with_, without = engines(models, backend, SMALL)
    prompt = [(5 * i) % 230 + 3 for i in range(50)]
    for turn in range(12):
        some = request(prompt=None, input_ids=prompt, session_id="s", max_new_tokens=7 + 9 * turn % 40)
        one, two = with_.generate(some), without.generate(some)
        assert one.token_ids == two.token_ids and one.cached_tokens == two.cached_tokens
        assert state(with_) == state(without)
        prompt = (prompt + one.token_ids)[: -(turn % 3) or None] + [turn + 3] * 5


# Failures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", CACHES.values(), ids=CACHES)
def test_nan_is_an_error(models, policy):
    """The line that every backend has for it; no session is left, no page."""
    backend = open_streaming(broken(models["full"], poison))
    engine = LLMInferenceEngine(models["full"], backend, policy)
    line = ""
    try:
        engine.generate(request(session_id="s"))
    except RuvmlxError as e:
        line = str(e)
    assert "answered NaN or infinity" in line and "\n" not in line
    assert not len(engine.sessions) and backend.pool.pages == [0, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_logit_is_an_error(models, bad, monkeypatch):
    backend = open_streaming(models["full"])
    head, bad = backend.output_head, mx.array([0.0] * 319 + [bad])
    monkeypatch.setattr(backend, "output_head", lambda hidden: head(hidden) + bad)
    with pytest.raises(RuvmlxError, match="answered NaN or infinity"):
        LLMInferenceEngine(models["full"], backend).generate(request())


def test_a_failing_step_drops_the_session(models, full_backend, monkeypatch):
    engine, _ = engines(models, full_backend, SMALL)
    want = engine.generate(request()).token_ids
    layer = full_backend._graph.model.layers[1]
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        for chunk in engine.stream(request(session_id="s")):
            if chunk.generated == 3:
                patch.setitem(layer, "mlp", lambda x: 1 / 0)
    assert engine.sessions.get("s") is None
    assert engine.generate(request(session_id="s")).token_ids == want


# Together with others ----------------------------------------------------------------------------


def test_who_feeds_the_tokens_himself_gets_steps(models, full_backend):
    """batch.py: one step for several requests."""
    engine, _ = engines(models, full_backend)
    assert isinstance(Run(engine, request(), steps=True).source, StepSource)


@pytest.mark.parametrize("policy", CACHES.values(), ids=CACHES)
def test_several_requests_at_once(models, full_backend, policy):
    """They are fed by batch.py, each as it would be alone."""
    engine, _ = engines(models, full_backend, policy)
    some = [request(prompt="request " * (1 + i), max_new_tokens=5 + 30 * i % 70) for i in range(5)]
    alone = {r.request_id: engine.generate(r) for r in some}
    for response in generate_many(engine, some, width=3):
        assert response.token_ids == alone[response.request_id].token_ids
        assert response.cache_tokens == alone[response.request_id].cache_tokens


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", CACHES.values(), ids=CACHES)
def test_a_request_streams_while_it_is_alone(models, full_backend, policy, sampling, monkeypatch):
    """A second one joins and leaves: its tokens, trace, session and first-token time are as if none had."""
    monkeypatch.setattr(source, "Sampler", DrawsOfMLX)
    engine, _ = engines(models, full_backend, policy)
    adapter = random_adapter(full_backend.config)
    asked = request(prompt="request " * 9, session_id="s", max_new_tokens=90, sampling=sampling)
    want = Trace(adapter, 0)
    alone = engine.generate(replace(asked, session_id=None), adapter, want)
    engine.sessions.clear()  # else the second one starts from the first one's cached prompt
    got, kinds, running = Trace(adapter, 0), [], Scheduler(engine)
    job = BestOf(engine, [asked], adapter, [got])
    for i, chunk in enumerate(running.stream(asked, lambda: job)):  # noqa: B007 - the last one is read
        kinds.append(type(job.leader.source))
        if i in (20, 50):
            running.submit(request(prompt="other " * 20, max_new_tokens=9), Arrivals())
    assert kinds[15] is kinds[45] is kinds[-1] is StreamSource and kinds.count(StepSource) > 18
    assert chunk.response.token_ids == alone.token_ids == got.tokens
    np.testing.assert_allclose(got.hidden_states, want.hidden_states, atol=1e-4)
    assert 0 < chunk.response.ttft_ms < chunk.response.latency_ms
    session = engine.sessions.get("s")
    assert len(session.tokens) == session.cache.offset == alone.cache_tokens


def test_a_second_request_joins_while_the_first_one_reads(models, full_backend):
    """The first one's stream gives way in the middle of its prompt."""
    engine, _ = engines(models, full_backend)
    some = [request(prompt="word " * 60, max_new_tokens=20), request(max_new_tokens=30)]
    alone = [engine.generate(asked).token_ids for asked in some]
    running, replies = Scheduler(engine), [Arrivals(), Arrivals()]
    for asked, reply in zip(some, replies, strict=True):
        running.submit(asked, reply)
        running.step()
    while running.step():
        pass
    assert [[*reply.drain()][-1].response.token_ids for reply in replies] == alone


@pytest.mark.parametrize("policy", CACHES.values(), ids=CACHES)
def test_replies_change_threads(models, full_backend, policy):
    """What a reply leaves on the device, a step that was taken back included, is of use to any thread."""
    with_, without = engines(models, full_backend, policy)
    prompt = [9] * 50
    for turn in range(4):
        some = request(prompt=None, input_ids=prompt, session_id="s", max_new_tokens=60)
        made = []
        thread = threading.Thread(
            target=lambda some=some, made=made: made.append(tokens_when_stopped(with_, some))
        )
        thread.start()
        thread.join()
        assert made == [tokens_when_stopped(without, some)] and state(with_) == state(without)
        prompt = [*prompt, *made[0], turn + 5]


def tokens_when_stopped(engine, some) -> list[int]:
    """The tokens of a reply whose reader stops after 37."""
    for chunk in engine.stream(some):
        if chunk.generated == 37:
            break
    return engine.sessions.get("s").tokens[len(some.input_ids) :]
