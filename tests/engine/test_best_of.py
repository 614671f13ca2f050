"""Best of n: every reply is the one that its seed gives alone, the prompt is read once, a judge chooses."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import LLMInferenceEngine, Sampling, run
from ruvmlx.engine.best_of import CHECKPOINTS, FAILED, MARGIN, BestOf, requests_for
from ruvmlx.engine.queue import Arrivals
from ruvmlx.engine.run import sync_at_exit
from ruvmlx.engine.scheduler import Scheduler
from ruvmlx.engine.session import Session
from ruvmlx.engine.source import StepSource
from ruvmlx.engine.types import Chunk
from ruvmlx.kernels.micro import NotFinite
from ruvmlx.lora.micro_lora import MicroLoRA
from ruvmlx.sona.trace import Trace
from ruvmlx.tiers import PAGE

from .test_batch import fresh
from .test_engine import request

SEEDED = Sampling(1.5, top_p=0.98, seed=7)
PROMPT = "tell me " * 30  # not a whole number of pages


def seeded_request(**fields):
    return request(**{"prompt": PROMPT, "sampling": SEEDED, "max_new_tokens": 40} | fields)


def chunks_of(replies, engine, first):
    return Scheduler(engine).stream(first, lambda: replies)


def write_all(engine, some, adapter=None, score=None, recorders=None):
    """(chunks, the replies)"""
    best = BestOf(engine, some, adapter, recorders or [None] * len(some), score)
    return list(chunks_of(best, engine, some[0])), best


def by_place(*stars):
    """A judge that knows each reply by its place."""
    return lambda runs: np.array(stars)


class Recorder:
    def __init__(self):
        self.seen = []

    def add(self, hidden, logits, token):
        self.seen.append((hidden.copy(), logits.copy(), token))


def tokens_alone(engine, some, adapter=None):
    return [fresh(engine).generate(replace(r, session_id=None), adapter).token_ids for r in some]


@pytest.mark.parametrize("count", [2, 4, 7])
def test_each_reply_is_the_one_of_its_seed_alone(each, count):
    """Pages demoted on the way and an adapter included; reply 0 has the request's own seed."""
    rng, c = np.random.default_rng(3), each.model.config
    a, b = rng.normal(size=(c.hidden_size, 2)), 0.2 * rng.normal(size=(2, c.vocab_size))
    adapter = MicroLoRA(a.astype(np.float32), b.astype(np.float32))
    for lora in (None, adapter):
        some = requests_for(seeded_request(), count)
        chunks, _ = write_all(each, some, lora)
        best = chunks[-1].response
        got = [best.token_ids, *(r.token_ids for r in best.others)]
        assert got == tokens_alone(each, some, lora)
        assert got[0] == fresh(each).generate(seeded_request(), lora).token_ids
        assert len({tuple(ids) for ids in got}) == count


def test_the_prompt_is_read_once(each, monkeypatch):
    read, prefill = [], each.backend.prefill

    def prefill_and_count(tokens, *args, **fields):
        read.append(len(tokens) if len(tokens) > 1 else 0)  # the reference decodes with it, too
        return prefill(tokens, *args, **fields)

    monkeypatch.setattr(each.backend, "prefill", prefill_and_count)
    chunks, _ = write_all(each, requests_for(seeded_request(), 4))
    best = chunks[-1].response
    assert sum(read) == best.prompt_tokens
    assert [r.cached_tokens for r in best.others] == [best.prompt_tokens] * 3


def test_the_prompt_is_looked_up_once(engine, monkeypatch):
    """Each other reply looked for the longest kept sequence, copied it, and dropped the copy at once."""
    found, forked = [], []
    find, fork = engine.sessions.get_or_create, Session.fork
    monkeypatch.setattr(engine.sessions, "get_or_create", lambda *some: found.append(some) or find(*some))
    monkeypatch.setattr(Session, "fork", lambda self: forked.append(self) or fork(self))
    write_all(engine, requests_for(seeded_request(max_new_tokens=4), 4))
    assert (len(found), len(forked)) == (1, 3)


@pytest.mark.parametrize(
    ("place", "name"), [(run, "StopStrings"), (StepSource, "fork")], ids=["run", "source"]
)
def test_a_reply_that_cannot_begin_keeps_no_session(engine, monkeypatch, place, name):
    """A running session can never be evicted."""
    best = BestOf(engine, requests_for(seeded_request(max_new_tokens=4), 2), None, [None, None])

    def out_of_memory(*_):
        raise MemoryError

    with sync_at_exit([best.start()]):
        list(best.leader.prefill())
        with monkeypatch.context() as m, pytest.raises(MemoryError):
            m.setattr(place, name, out_of_memory)
            best.join()
        assert [*engine.sessions._running] == [best.leader.session]
    assert not engine.sessions._running


def test_pages_of_the_prompt_are_shared(packed_model):
    """All but the last, which each reply fills in a copy of its own."""
    engine = LLMInferenceEngine(packed_model, NativeBackend(packed_model, threads=2))
    replies = BestOf(engine, requests_for(seeded_request(max_new_tokens=4), 4), None, [None] * 4)
    pool, pages = engine.backend.pool, -(-len(engine.prompt_ids(seeded_request())) // PAGE)
    for chunk in chunks_of(replies, engine, seeded_request()):
        if chunk.generated == 2:
            assert sum(pool.pages) == pages + 3


def test_every_token_is_recorded_with_what_it_was_drawn_from(each):
    some, recorders = requests_for(seeded_request(max_new_tokens=9), 3), [Recorder() for _ in range(3)]
    write_all(each, some, recorders=recorders)
    for r, recorder in zip(some, recorders, strict=True):
        want = Recorder()
        fresh(each).generate(r, None, want)
        for got, single in zip(recorder.seen, want.seen, strict=True):
            assert got[2] == single[2]
            np.testing.assert_allclose(got[0], single[0], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(got[1], single[1], rtol=1e-4, atol=1e-4)


def test_traces_of_a_batch_are_those_of_each_reply_alone(packed_model):
    """Bit for bit, though the decoder's threads draw and record them at the same time."""
    engine, rng = (
        LLMInferenceEngine(packed_model, NativeBackend(packed_model, threads=3)),
        np.random.default_rng(4),
    )
    c = packed_model.config
    a, b = rng.normal(size=(c.hidden_size, 2)), 0.1 * rng.normal(size=(2, c.vocab_size))
    adapter = MicroLoRA(a.astype(np.float32), b.astype(np.float32))
    some, traces = requests_for(seeded_request(max_new_tokens=20), 5), [Trace(adapter, 0) for _ in range(5)]
    write_all(engine, some, adapter, recorders=traces)
    for r, trace in zip(some, traces, strict=True):
        single = Trace(adapter, 0)
        fresh(engine).generate(r, adapter, single)
        assert trace.tokens == single.tokens and len(trace.tokens) == 20
        assert (trace.logprob, trace.frozen_logprob) == (single.logprob, single.frozen_logprob)
        for name in ("grad_a", "grad_b", "hidden_states"):
            np.testing.assert_array_equal(getattr(trace, name), getattr(single, name))


def test_a_trace_that_is_not_finite_is_an_error_in_a_batch_too(packed_model):
    engine, c = LLMInferenceEngine(packed_model, NativeBackend(packed_model, threads=2)), packed_model.config
    adapter = MicroLoRA(np.zeros((c.hidden_size, 2), np.float32), np.zeros((2, c.vocab_size), np.float32))
    broken = replace(adapter, lora_a=np.full_like(adapter.lora_a, np.inf))
    with pytest.raises(NotFinite):
        write_all(
            engine,
            requests_for(seeded_request(), 2),
            adapter,
            recorders=[Trace(adapter, 0), Trace(broken, 0)],
        )


def test_without_a_judge_reply_0_streams_and_all_are_written(engine):
    chunks, _ = write_all(engine, requests_for(seeded_request(max_new_tokens=50), 3))
    best = chunks[-1].response
    assert best.token_ids == engine.generate(seeded_request(max_new_tokens=50)).token_ids
    assert "".join(chunk.text for chunk in chunks) == best.text
    assert sum(bool(chunk.text) for chunk in chunks) > 10
    assert [len(r.token_ids) for r in best.others] == [50, 50]
    assert chunks[-2].replies == 0 and max(chunk.replies for chunk in chunks) == 3


def test_the_judge_chooses(engine):
    """Close replies are written to their ends; the text comes when the choice is made."""
    some = requests_for(seeded_request(max_new_tokens=50), 3)
    chunks, replies = write_all(engine, some, score=by_place(3.0, 3.0 + MARGIN / 2, 2.9))
    best = chunks[-1].response
    assert best.token_ids == tokens_alone(engine, some)[1]
    assert replies.leader.request is some[1] and best.request_id == some[1].request_id
    assert [len(r.token_ids) for r in best.others] == [50, 50]
    assert [chunk.text for chunk in chunks if chunk.text] == [best.text]


def test_clearly_worse_replies_are_dropped_and_the_leader_streams(engine):
    first = CHECKPOINTS[0]
    some = requests_for(seeded_request(max_new_tokens=50), 3)
    chunks, _ = write_all(engine, some, score=by_place(3.0, 3.1 + MARGIN, 1.0))
    best = chunks[-1].response
    assert [len(r.token_ids) for r in best.others] == [first, first]
    assert {r.finish_reason for r in best.others} == {"cancelled"}
    assert best.token_ids == tokens_alone(engine, some)[1]
    assert "".join(chunk.text for chunk in chunks) == best.text
    assert not any(chunk.text for chunk in chunks if chunk.generated < first)
    assert [chunk.replies for chunk in chunks if chunk.generated > first][:2] == [1, 1]


def test_a_dropped_reply_is_not_chosen_in_the_end(engine):
    """The judge likes it better once it is too late."""

    def judge(runs):
        late = len(runs[0].ids) > CHECKPOINTS[0]
        return np.array([1.0, 3.0, 3.0]) if not late else np.array([9.0, 3.0, 3.5])

    chunks, replies = write_all(engine, requests_for(seeded_request(max_new_tokens=50), 3), score=judge)
    assert len(chunks[-1].response.others[0].token_ids) == CHECKPOINTS[0]
    assert replies.leader.request.sampling.seed != 7


@pytest.mark.parametrize(("tokens", "at", "place"), [(20, 0, 0), (50, 0, 0), (50, CHECKPOINTS[0] + 1, 1)])
def test_a_judge_that_fails_lets_the_first_reply_be_shown(engine, tokens, at, place):
    """At its first choice or at a later one, in one line; a reply that was dropped before is not shown."""

    def judge(runs):
        if len(runs[1].ids) >= at:
            raise ValueError("singular matrix")
        return np.array([1.0, 3.0, 3.0])

    some = requests_for(seeded_request(max_new_tokens=tokens), 3)
    chunks, _ = write_all(engine, some, score=judge)
    best = chunks[-1].response
    assert best.token_ids == tokens_alone(engine, some)[place]
    assert "".join(chunk.text for chunk in chunks) == best.text
    assert [chunk.note for chunk in chunks if chunk.note] == [FAILED.format("ValueError")]


@pytest.mark.parametrize("at", [5, 40])
def test_stopping_keeps_the_leader(engine, at):
    """And none of the replies that the user did not let finish; those dropped before stay."""
    some = requests_for(seeded_request(max_new_tokens=60), 3)
    replies = BestOf(engine, some, None, [None] * 3, by_place(0.0, 3.0, 3.5))
    for chunk in chunks_of(replies, engine, some[0]):
        if chunk.generated == at:
            some[0].cancel.set()
    best = chunk.response
    assert best.request_id == some[2].request_id and best.finish_reason == "cancelled"
    assert len(best.token_ids) == at and best.text == "".join(replies.leader.text)
    assert [r.request_id for r in best.others] == [some[0].request_id] * (at > CHECKPOINTS[0])


def test_stopping_before_the_prompt_is_read(engine):
    some = requests_for(seeded_request(), 3)
    some[0].cancel.set()
    chunks, replies = write_all(engine, some, score=by_place(0.0))
    assert chunks[-1].response.finish_reason == "cancelled" and replies.others == []


def test_the_session_goes_on_after_the_reply_that_was_chosen(each):
    some = requests_for(seeded_request(session_id="s", max_new_tokens=20), 3)
    chunks, _ = write_all(each, some, score=by_place(0.0, 0.5, 0.1))
    best = chunks[-1].response
    assert best.session_id == "s"
    ids = [*each.prompt_ids(some[0]), *best.token_ids, 40, 41]
    again = each.generate(request(prompt=None, input_ids=ids, session_id="s"))
    assert again.cached_tokens >= len(ids) - 3
    assert again.token_ids == each.generate(request(prompt=None, input_ids=ids)).token_ids


def test_no_note_for_the_user_takes_the_place_of_another(engine):
    """The user stops the replies before the first chunk: the judge fails at the end."""

    def fail(runs):
        raise np.linalg.LinAlgError

    some = requests_for(seeded_request(max_new_tokens=1), 2)
    some[0].cancel.set()
    best = BestOf(engine, some, None, [None] * 2, fail, note="There is room for two.")
    *_, last = chunks_of(best, engine, some[0])
    both = f"There is room for two. {FAILED.format('LinAlgError')}"
    assert last.note == both
    arrived = Arrivals()
    for note in ("There is room for two.", "", FAILED.format("LinAlgError")):
        arrived.take(Chunk("", note=note))
    assert arrived.drain_joined().note == both


def test_a_step_that_fails_leaves_no_half_cache(engine, tiny_backend, monkeypatch):
    def fails(*_):
        raise RuntimeError("device lost")

    with monkeypatch.context() as m:
        m.setattr(tiny_backend, "decode_batch", fails)
        with pytest.raises(RuntimeError):
            write_all(engine, requests_for(seeded_request(session_id="b"), 2))
    assert engine.generate(seeded_request(session_id="b")).cached_tokens == 0


def test_seeds_differ_and_follow_from_the_first(engine):
    seeds = [r.sampling.seed for r in requests_for(seeded_request(), 5)]
    assert seeds[0] == 7 and len(set(seeds)) == 5
    assert seeds == [r.sampling.seed for r in requests_for(seeded_request(), 5)]
    unseeded = requests_for(seeded_request(sampling=Sampling(0.9)), 3)
    assert [r.sampling.seed for r in unseeded] == [None] * 3
    assert len({r.request_id for r in unseeded}) == 3
