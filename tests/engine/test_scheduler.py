"""The scheduler: requests join and leave at any step, and each reply is the one written alone."""

import gc
import random
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import LLMInferenceEngine, Sampling, reading_order, scheduler
from ruvmlx.engine.best_of import requests_for
from ruvmlx.engine.queue import Ticket
from ruvmlx.engine.reading_order import ReadingPace
from ruvmlx.engine.scheduler import Arrivals, Scheduler
from ruvmlx.engine.source import StepSource
from ruvmlx.errors import CacheTooLarge, UsageError
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.lora.micro_lora import MicroLoRA
from ruvmlx.sampling import Sampler

from .test_batch import fresh
from .test_engine import GREEDY, request


class Reply(Arrivals):
    """A sink that collects everything of one request."""

    def __init__(self):
        super().__init__()
        self.chunks = []

    def take(self, chunk):
        super().take(chunk)
        self.chunks.append(chunk)

    @property
    def response(self):
        if self.error is not None:
            raise self.error
        return self.chunks[-1].response


def some_requests(n=12, seed=5):
    """Greedy and drawn, of prompts from a few to 330 tokens."""
    rng = random.Random(seed)
    return [
        request(
            prompt=f"{i} " + "".join(rng.choices("abcdefgh ", k=rng.choice((3, 40, 150, 320)))),
            max_new_tokens=rng.randint(1, 60),
            sampling=Sampling(0.9, top_p=0.95, seed=i) if i % 3 == 0 else GREEDY,
        )
        for i in range(n)
    ]


def serve_randomly(engine, some, adapters=None, seed=0, **settings):
    """The replies of requests that arrive at random moments. Prompts are read in the smallest parts."""
    rng, todo, replies = random.Random(seed), list(some), []
    running = Scheduler(engine, **settings)
    while todo or running:
        while todo and rng.random() < 0.3:
            replies.append(Reply())
            running.submit(todo.pop(0), replies[-1], adapters[len(replies) - 1] if adapters else None)
        running.step()
    return [reply.response for reply in replies]


def assert_equal(got, want):
    for reply, alone in zip(got, want, strict=True):
        assert reply.token_ids == alone.token_ids
        assert (reply.text, reply.finish_reason) == (alone.text, alone.finish_reason)
        assert (reply.prompt_tokens, reply.cache_tokens) == (alone.prompt_tokens, alone.cache_tokens)


def adapter_of(config, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(config.hidden_size, 2)), rng.normal(size=(2, config.vocab_size))
    return MicroLoRA(a.astype(np.float32), b.astype(np.float32))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("width", [2, 16])
def test_replies_that_join_at_random_moments_are_those_written_alone(each, seed, width):
    """Adapters, and none, side by side; parts of prompts between the steps; demoted pages included."""
    some = some_requests(seed=seed)
    adapters = [None if i % 4 == 0 else adapter_of(each.model.config, i) for i in range(len(some))]
    want = [fresh(each).generate(r, a) for r, a in zip(some, adapters, strict=True)]
    fresh(each)
    assert_equal(serve_randomly(each, some, adapters, seed, width=width), want)
    assert len({tuple(r.token_ids) for r in want}) > 6


@pytest.mark.parametrize("pace", [0.0, 900.0, 3000.0])
def test_parts_of_a_prompt_have_the_bits_of_the_whole(packed_model, pace, monkeypatch):
    """With pages in three tiers: none is demoted before its chunk is read."""
    backend = NativeBackend(packed_model, threads=2, chunk=128)
    engine = LLMInferenceEngine(packed_model, backend, TierPolicy("tiered", (64, 128)))
    monkeypatch.setattr(ReadingPace, "measure", lambda self, *_: setattr(self, "speed", pace))
    monkeypatch.setattr(scheduler, "ALONE", 0.05)  # also when the other reply has ended
    monkeypatch.setattr(reading_order, "FIRST", 16)
    long = request(prompt="tell me about the sea and the ship " * 12, max_new_tokens=20, logprobs=3)
    other, reply, running = Reply(), Reply(), Scheduler(engine)
    running.submit(request(max_new_tokens=60), other)
    running.step()
    running.submit(long, reply)
    while running.step():
        pass
    alone = fresh(engine).generate(long)
    assert alone.kv.tokens[0] > 0 and alone.prompt_tokens > 256
    assert reply.response.token_ids == alone.token_ids and reply.response.logprobs == alone.logprobs
    read = [c.prefilled for c in reply.chunks if not c.generated and c.prefilled]
    sizes = np.diff([0, *read])
    assert min(sizes) >= 16 and max(sizes) <= max(31, pace * 0.05 + 15) and sum(sizes) == alone.prompt_tokens


def test_a_prompt_is_read_in_whole_chunks_if_nobody_waits_and_they_are_fast(packed_model, monkeypatch):
    monkeypatch.setattr(ReadingPace, "measure", lambda self, *_: setattr(self, "speed", 3000.0))
    monkeypatch.setattr(reading_order, "FIRST", 512)
    engine = LLMInferenceEngine(packed_model, NativeBackend(packed_model, threads=2, chunk=128))
    reply, running = Reply(), Scheduler(engine)
    running.submit(request(prompt="word " * 80, max_new_tokens=2), reply)
    while running.step():
        pass
    read = [c.prefilled for c in reply.chunks if not c.generated and c.prefilled]
    assert set(np.diff([0, *read[:-1]])) == {128}


def test_running_replies_get_a_token_in_every_step_while_a_prompt_is_read(engine, monkeypatch):
    monkeypatch.setattr(ReadingPace, "measure", lambda *_: None)  # the pace is not known
    first, second, running = Reply(), Reply(), Scheduler(engine)
    running.submit(request(max_new_tokens=100), first)
    running.step()
    running.submit(request(prompt="long " * 50, max_new_tokens=2), second)
    while not second.chunks or not second.chunks[-1].generated:
        before = first.chunks[-1].generated
        running.step()
        assert first.chunks[-1].generated == before + 1
    assert len([c for c in second.chunks if not c.generated]) > 4


@pytest.mark.parametrize("when", ["waiting", "reading", "decoding"])
def test_cancelling_takes_one_step_and_frees_the_pages(packed_model, when):
    """The pool has as many pages as before; the others go on."""
    engine = LLMInferenceEngine(packed_model, NativeBackend(packed_model, threads=2, chunk=64))
    pool, running, other, reply = engine.backend.pool, Scheduler(engine, width=2), Reply(), Reply()
    running.submit(request(max_new_tokens=80), other)
    running.step()
    if when == "waiting":
        running.submit(request(max_new_tokens=80), Reply())
        running.step()
    pages, asked = list(pool.pages), request(prompt="x " * 200, max_new_tokens=90)
    running.submit(asked, reply)
    running.step()
    while when == "decoding" and len(reply.chunks) < 40:
        running.step()
    pages = pages if when != "decoding" else None
    asked.cancel.set()
    running.step()
    response = reply.response
    assert response.finish_reason == "cancelled" and response.token_ids == response.token_ids[:90]
    assert (response.generation_tokens > 0) == (when == "decoding")
    if when == "reading":
        fresh(engine)
        gc.collect()
        assert list(pool.pages) == pages
    while running.step():
        pass
    assert other.response.token_ids == fresh(engine).generate(request(max_new_tokens=80)).token_ids
    fresh(engine)
    del running, other
    gc.collect()
    assert sum(pool.pages) == 0


def test_higher_priorities_come_first_and_need_no_free_place(engine):
    running, replies = Scheduler(engine, width=2), [Reply() for _ in range(6)]
    for reply in replies[:4]:
        running.submit(request(max_new_tokens=30), reply)
    running.step()
    running.step()
    running.submit(request(max_new_tokens=3, priority=1), replies[4])
    running.submit(request(max_new_tokens=3, priority=2), replies[5])
    assert running.counts == (2, 4)
    running.step()
    assert running.counts == (4, 2)
    while not replies[5].chunks:
        running.step()
    assert not replies[4].chunks  # one piece a step: the highest first
    while not replies[4].over:
        running.step()
    assert replies[5].over and not replies[0].over and not replies[2].chunks


def test_a_question_does_not_wait_for_the_end_of_many_replies(engine):
    """It gets its token in the step after its prompt is read, beside as many replies as a server writes."""
    running, replies, question = Scheduler(engine), [Reply() for _ in range(40)], Reply()
    for reply in replies:
        running.submit(request(max_new_tokens=80), reply)
    while not all(reply.chunks for reply in replies):
        running.step()
    running.submit(request(max_new_tokens=3), question)
    for _ in range(3):
        running.step()
    assert question.chunks and not any(reply.over for reply in replies)


def test_others_wait_in_order(engine):
    running, ended = Scheduler(engine, width=1), []
    for i in range(4):
        reply = Reply()
        reply.fail = ended.append
        reply.take = lambda chunk, i=i: ended.append(i) if chunk.response else None
        running.submit(request(max_new_tokens=9 - 2 * i), reply)
    while running.step():
        pass
    assert ended == [0, 1, 2, 3]


def test_a_request_waits_for_memory_and_fails_if_it_can_never_fit(packed_model):
    engine = LLMInferenceEngine(packed_model, NativeBackend(packed_model, threads=2))
    pool = engine.backend.pool
    pool.budget = 6 * pool.sizes[-1]  # six pages of 64 tokens
    running, replies = Scheduler(engine), [Reply() for _ in range(4)]
    for reply, tokens in zip(replies, (130, 130, 450, 20), strict=True):
        running.submit(request(max_new_tokens=tokens), reply)
    running.step()
    assert running.counts == (2, 1)  # what can never fit does not wait
    most = 0
    while running.step():
        most = max(most, pool.nbytes)
    assert most <= pool.budget
    with pytest.raises(CacheTooLarge, match=r"4 tokens and up to 450 .* of 262 kB; the budget is 197 kB"):
        _ = replies[2].response
    lengths = [len(replies[i].response.token_ids) for i in (0, 1, 3)]
    assert lengths == [130, 130, 20]


def test_a_bad_request_fails_alone(engine):
    running, good, bad = Scheduler(engine), Reply(), Reply()
    running.submit(request(max_new_tokens=9), good)
    running.submit(request(prompt=" "), bad)
    while running.step():
        pass
    assert isinstance(bad.error, UsageError)
    assert good.response.token_ids == fresh(engine).generate(request(max_new_tokens=9)).token_ids


def test_a_reader_that_raises_fails_alone(engine):
    class BrokenReply(Reply):
        def take(self, chunk):
            if chunk.generated == 3:
                raise OSError("disk full")

    running, good, bad = Scheduler(engine), Reply(), BrokenReply()
    running.submit(request(max_new_tokens=9), good)
    running.submit(request(max_new_tokens=9), bad)
    while running.step():
        pass
    assert str(bad.error) == "disk full" and len(good.response.token_ids) == 9


@pytest.mark.parametrize("fails_in", ["_apply_rules", "_took"])
def test_a_draw_that_fails_ends_its_reply_alone(each, monkeypatch, fails_in):
    """A rule on the tokens can fail before the draw, and when it hears of the token."""
    good = request(max_new_tokens=9, sampling=Sampling(0.9, seed=1))
    bad = request(max_new_tokens=9, sampling=Sampling(0.9, seed=2))
    want = fresh(each).generate(good).token_ids
    work, calls = getattr(Sampler, fails_in), []

    def fail_at_third(self, found):
        if self.sampling.seed == 2:
            calls.append(self)
        if len(calls) == 3 and self.sampling.seed == 2:
            raise UsageError("too many states")
        return work(self, found)

    monkeypatch.setattr(Sampler, fails_in, fail_at_third)
    running, replies = Scheduler(each), [Reply() for _ in range(3)]
    for one, reply in zip((good, bad, good), replies, strict=True):
        running.submit(one, reply)
    while running.step():
        pass
    assert str(replies[1].error) == "too many states"
    assert replies[0].response.token_ids == replies[2].response.token_ids == want


def test_a_failed_batch_fails_its_requests_and_drops_their_caches(engine, tiny_backend, monkeypatch):
    """One whose prompt is still being read goes on."""

    def fails(*_):
        raise RuntimeError("device lost")

    running, replies = Scheduler(engine), [Reply() for _ in range(3)]
    for i, reply in enumerate(replies[:2]):
        running.submit(request(session_id=f"s{i}"), reply)
    while not all(reply.chunks and reply.chunks[-1].generated for reply in replies[:2]):
        running.step()
    running.submit(request(prompt="long " * 40, session_id="s2"), replies[2])
    with monkeypatch.context() as m:
        m.setattr(tiny_backend, "decode_batch", fails)
        running.step()
    assert [str(reply.error) for reply in replies[:2]] == ["device lost"] * 2
    assert engine.sessions.get("s0") is None and engine.sessions.get("s1") is None
    while running.step():
        pass
    assert len(replies[2].response.token_ids) == 12


@pytest.mark.parametrize("ends_by", ["fail_all", "step"])
def test_a_request_whose_end_fails_too_leaves_no_reader_waiting(engine, tiny_backend, monkeypatch, ends_by):
    """The end of a run works on the backend, which has perhaps failed. Every reader gets the first error, and
    no cache stays pinned."""

    def fails(*_):
        raise RuntimeError("device lost")

    running, replies = Scheduler(engine), [Reply() for _ in range(3)]
    for i, reply in enumerate(replies):
        running.submit(request(session_id=f"s{i}"), reply)
    while not all(reply.chunks and reply.chunks[-1].generated for reply in replies):
        running.step()
    with monkeypatch.context() as m:
        m.setattr(StepSource, "close", fails)
        m.setattr(tiny_backend, "decode_batch", fails)
        with pytest.raises(RuntimeError, match="device lost"):
            running.step() if ends_by == "step" else running.fail_all(KeyError("gone"))
    assert [type(reply.error) for reply in replies] == [RuntimeError if ends_by == "step" else KeyError] * 3
    assert not len(running) and not engine.sessions._running


def test_a_session_answers_one_request_after_the_other(engine):
    running, replies = Scheduler(engine), [Reply(), Reply()]
    for reply in replies:
        running.submit(request(session_id="one", max_new_tokens=7), reply)
    running.step()
    assert running.counts == (1, 1)
    while running.step():
        pass
    first, second = (reply.response for reply in replies)
    assert first.token_ids == second.token_ids and second.cached_tokens == second.prompt_tokens - 1


def base_lora(config, seed):
    rng, place = np.random.default_rng(seed), ("q_proj", 0)
    rows, cols = config.n_heads * config.head_dim, config.hidden_size
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((cols, 2), (2, rows)))
    return BaseLoRA({place: (a, b)}, 1.0)


def test_different_base_loras_take_turns(each):
    """Each reply is the one written alone under its LoRA; afterwards the backend has its own again."""
    backend, config = each.backend, each.model.config
    loras = [None, base_lora(config, 1), base_lora(config, 2)]
    some, want, installs = some_requests(6, seed=9), [], []
    for i, r in enumerate(some):
        backend.set_lora(loras[i % 3])
        want.append(fresh(each).generate(r))
    backend.set_lora(loras[1])
    running, replies = Scheduler(each), [Reply() for _ in some]
    install, backend.set_lora = backend.set_lora, lambda lora: (installs.append(lora), install(lora))
    try:
        for i, (r, reply) in enumerate(zip(some, replies, strict=True)):
            job = scheduler.BestOf(each, [r], None, [None], lora=loras[i % 3])
            running.add(r, lambda job=job: job, reply)
        steps = 1
        while running.step():
            steps += 1
    finally:
        del backend.set_lora
    running.rest()
    assert_equal([reply.response for reply in replies], want)
    assert backend.lora is loras[1] and 3 < len(installs) <= steps
    assert len({tuple(r.token_ids) for r in want}) == 6
    backend.set_lora(None)


def test_chunks_carry_the_logprobs_of_their_tokens(engine):
    running, replies = Scheduler(engine), [Reply(), Reply()]
    for reply in replies:
        running.submit(request(logprobs=2, max_new_tokens=9), reply)
    while running.step():
        pass
    for reply in replies:
        assert [p for c in reply.chunks for p in c.logprobs] == reply.response.logprobs
        assert max(len(c.logprobs) for c in reply.chunks) == 1 and len(reply.response.logprobs) == 9


def test_no_chunk_has_a_logprob_of_the_stop_string(engine, tiny, monkeypatch):
    """The first character of the first stop string has two tokens. The first token alone gives no text."""
    asked = request(max_new_tokens=4, sampling=Sampling(1.0, seed=3), logprobs=1)
    parts = dict(zip(engine.generate(asked).token_ids, (b"a", b"\xc3", b"\xa9", b"b"), strict=True))
    assert len(parts) == 4
    monkeypatch.setattr(tiny.tokenizer, "token_bytes", lambda token: parts.get(token, b""))
    for stop, shown in (("\u00e9", 1), ("b", 3), ("c", 4)):
        running, reply = Scheduler(engine), Reply()
        running.submit(replace(asked, stop=(stop,)), reply)
        while running.step():
            pass
        assert [p for c in reply.chunks for p in c.logprobs] == reply.response.logprobs
        assert len(reply.response.logprobs) == shown


def test_a_stream_that_is_left_ends_its_request_alone(engine):
    running, other = Scheduler(engine), Reply()
    running.submit(request(max_new_tokens=20), other)
    asked = request(max_new_tokens=20)
    stream = running.stream(asked, lambda: scheduler.BestOf(engine, [asked], None, [None]))
    next(stream)
    stream.close()
    assert len(running) == 1
    while running.step():
        pass
    assert len(other.response.token_ids) == 20


def test_a_cancelled_reply_leaves_a_session_that_goes_on(engine):
    """Cancelled in a batch, between its step and its draw: the session's ids are those in the cache."""
    running, other, reply = Scheduler(engine), Reply(), Reply()
    asked = request(session_id="s", max_new_tokens=50)
    running.submit(request(max_new_tokens=50), other)
    running.submit(asked, reply)
    while len(reply.chunks) < 8:
        running.step()
    decode, engine.backend.decode_batch = engine.backend.decode_batch, None
    engine.backend.decode_batch = lambda *a: (decode(*a), asked.cancel.set())[0]
    try:
        running.step()
    finally:
        del engine.backend.decode_batch
    assert reply.response.finish_reason == "cancelled"
    session = engine.sessions.get("s")
    assert len(session.tokens) == session.cache.offset
    ids = [*engine.prompt_ids(asked), *reply.response.token_ids, 40, 41]
    again = engine.generate(request(prompt=None, input_ids=ids, session_id="s"))
    assert again.cached_tokens == len(ids) - 2
    assert again.token_ids == fresh(engine).generate(request(prompt=None, input_ids=ids)).token_ids


def test_best_of_joins_the_batch(engine):
    """Its replies are those without company."""
    asked = request(sampling=Sampling(1.5, seed=3), max_new_tokens=20)

    def replies_to(running, company):
        some = scheduler.BestOf(engine, requests_for(asked, 3), None, [None] * 3)
        for _ in range(company):
            running.submit(request(max_new_tokens=33), Reply())
        last = list(running.stream(asked, lambda: some))[-1].response
        return [last.token_ids, *(r.token_ids for r in last.others)]

    assert replies_to(Scheduler(engine), 2) == replies_to(Scheduler(engine), 0)


def test_requests_are_not_changed(engine):
    """The scheduler keeps requests as they are: a caller may use them again."""
    asked = request(max_new_tokens=5)
    before = replace(asked)
    for _ in range(2):
        reply, running = Reply(), Scheduler(engine)
        running.submit(asked, reply)
        while running.step():
            pass
    assert asked == before


def test_a_request_that_eight_later_ones_overtook_is_one_more_important():
    waiting = Ticket(request(priority=2), begin=None, sink=None)
    waiting.overtaken = 7
    assert waiting.rank == 2
    waiting.overtaken = 8
    assert waiting.rank == 3
