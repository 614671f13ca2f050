"""Who waits for whom: by a clock that counts work, so that no machine's speed matters."""

import itertools
import random
from statistics import median

import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import LLMInferenceEngine, Sampling, scheduler
from ruvmlx.engine.reading_order import MORE, ReadingOrder
from ruvmlx.engine.scheduler import Scheduler

from .test_batch import fresh
from .test_engine import GREEDY, request
from .test_scheduler import Reply, assert_equal

PIECE = 16  # tokens


def equal_shares(prompts):
    """When each prompt ends if all that have arrived are read at the same pace. prompts: (arrival, tokens,
    share); one token takes one unit of time."""
    left = {i: tokens for i, (_, tokens, _) in enumerate(prompts)}
    now, ends = 0.0, {}
    while left:
        here = [i for i in left if prompts[i][0] <= now]
        coming = [prompts[i][0] for i in left if prompts[i][0] > now]
        if not here:
            now = min(coming)
            continue
        shares = sum(prompts[i][2] for i in here)
        step = min(left[i] * shares / prompts[i][2] for i in here)
        step = min([step, *(at - now for at in coming)])
        now += step
        for i in here:
            left[i] -= step * prompts[i][2] / shares
            if left[i] < 1e-6:
                ends[i] = now
                del left[i]
    return ends


@pytest.mark.parametrize("seed", range(40))
def test_no_prompt_ends_later_than_with_equal_shares(seed):
    """Random arrivals, lengths and priorities; a piece that has begun is read to its end."""
    rng = random.Random(seed)
    prompts = [
        (rng.randint(0, 3000), rng.choice([5, 60, 400, 4000]), MORE ** rng.choice([0, 0, 0, 1]))
        for _ in range(16)
    ]
    order, places, left, now, ends = ReadingOrder(), {}, {}, 0, {}
    while len(ends) < len(prompts):
        for i, (at, tokens, share) in enumerate(prompts):
            if at <= now and i not in places:
                places[i], left[i] = order.join(tokens, {1.0: 0, MORE: 1}[share]), tokens
        if not left:
            now += 1
            continue
        i = min(left, key=lambda i: places[i].end)
        piece = min(PIECE, left[i])
        order.count(places[i], piece)
        now, left[i] = now + piece, left[i] - piece
        if not left[i]:
            ends[i] = now
            del left[i]
    fair = equal_shares(prompts)
    assert all(ends[i] <= fair[i] + 2 * PIECE for i in fair)


def test_a_prompt_that_leaves_takes_no_share():
    order = ReadingOrder()
    left, stays = order.join(100), order.join(100)
    order.leave(left)
    order.count(stays, 50)
    assert order.join(49).end < stays.end < order.join(51).end


def test_a_prompt_with_fewer_tokens_than_expected_gives_its_time_to_the_others():
    """Both machines do the same work, so the imagined machine ends when the real machine ends."""
    order = ReadingOrder()
    shorter, other = order.join(100), order.join(100)
    order.count(shorter, 60)
    order.leave(shorter)
    assert order.join(0).end == pytest.approx(30)
    order.count(other, 100)
    assert order.join(5).end == pytest.approx(105)


TOKEN, STEP = 0.01, 0.02  # seconds on the clock: of a prompt's token; of one step for all replies


class ClockedScheduler:
    """A scheduler whose time is what the backend was asked to do. Each token's moment is noted."""

    def __init__(self, packed, monkeypatch):
        backend = NativeBackend(packed, threads=1, chunk=128)
        self.engine = LLMInferenceEngine(packed, backend)
        self.now, self.read, self.tokens = 0.0, 0, {}
        for name, cost in (("prefill", TOKEN), ("decode_batch", None), ("decode", None)):
            monkeypatch.setattr(backend, name, self._with_cost(getattr(backend, name), cost))
        monkeypatch.setattr(scheduler, "perf_counter", lambda: self.now)
        self.running = Scheduler(self.engine)

    def _with_cost(self, call, cost):
        def call_and_advance(tokens, *args, **kwargs):
            self.now += STEP if cost is None else cost * len(tokens)
            return call(tokens, *args, **kwargs)

        return call_and_advance

    def submit(self, asked):
        reply, clock = Reply(), self
        moments = self.tokens[asked.request_id] = [self.now]
        take = reply.take

        def take_and_note(chunk):
            if chunk.generated >= len(moments):
                moments.append(clock.now)
            take(chunk)

        reply.take = take_and_note
        self.running.submit(asked, reply)
        return reply

    def seconds_to_first(self, asked):
        """Seconds from the request to its first token."""
        arrived, first, *_ = self.tokens[asked.request_id]
        return first - arrived

    def gaps(self, asked):
        _, *moments = self.tokens[asked.request_id]
        return [after - before for before, after in itertools.pairwise(moments)]

    def finish(self):
        while self.running.step():
            pass


@pytest.fixture
def clocked_scheduler(packed_model, monkeypatch):
    return ClockedScheduler(packed_model, monkeypatch)


def words(tokens, seed):
    return "".join(random.Random(seed).choices("abcdefgh ", k=tokens))


def test_no_prompt_stays_in_the_order(clocked_scheduler):
    """The expected number of tokens is too large for a cancelled prompt, and for a prompt of which another
    request reads the tokens meanwhile."""
    for i in range(4):
        same = [request(prompt=words(300, i), max_new_tokens=2, sampling=GREEDY) for _ in range(3)]
        cancelled = request(prompt=words(400, 100 + i), max_new_tokens=2, sampling=GREEDY)
        for asked in (*same, cancelled):
            clocked_scheduler.submit(asked)
        for _ in range(2):
            clocked_scheduler.running.step()
        cancelled.cancel.set()
        clocked_scheduler.finish()
    assert len(clocked_scheduler.running._order._read_there) <= 1


def test_a_short_request_does_not_wait_for_a_long_prompt(clocked_scheduler):
    """At most three times as long as alone, and 200 ms. The long prompt and both replies are as alone."""
    long, short = (request(prompt=words(n, n), max_new_tokens=9, sampling=GREEDY) for n in (470, 12))
    alone = [fresh(clocked_scheduler.engine).generate(r) for r in (long, short)]
    fresh(clocked_scheduler.engine)
    clocked_scheduler.now, began = 0.0, 12 * TOKEN + STEP
    replies = [clocked_scheduler.submit(long)]
    clocked_scheduler.running.step()
    replies.append(clocked_scheduler.submit(short))
    clocked_scheduler.finish()
    assert clocked_scheduler.seconds_to_first(short) <= 3 * began + 0.2
    assert clocked_scheduler.seconds_to_first(long) <= 2 * 470 * TOKEN
    assert_equal([reply.response for reply in replies], alone)


def test_running_replies_keep_half_of_their_pace_while_a_prompt_is_read(clocked_scheduler):
    streams = [request(prompt=words(9, i), max_new_tokens=400, ignore_eos=True) for i in range(3)]
    for asked in streams:
        clocked_scheduler.submit(asked)
    for _ in range(20):
        clocked_scheduler.running.step()
    long, begun = request(prompt=words(300, 9), max_new_tokens=1), clocked_scheduler.now
    reply = clocked_scheduler.submit(long)
    while not reply.over:
        clocked_scheduler.running.step()
    seconds, drawn = (
        clocked_scheduler.now - begun,
        [sum(at > begun for at in clocked_scheduler.tokens[s.request_id]) for s in streams],
    )
    assert clocked_scheduler.seconds_to_first(long) <= 2.2 * 300 * TOKEN
    for asked, tokens in zip(streams, drawn, strict=True):
        assert tokens >= 0.45 * seconds / STEP
        assert median(clocked_scheduler.gaps(asked)[-tokens:]) <= 2 * STEP


def test_of_sixteen_prompts_none_is_later_than_twice_its_fair_share(clocked_scheduler):
    """Of all work: prompts and replies. Each reply is the one written alone."""
    rng = random.Random(3)
    some = [
        request(
            prompt=words(rng.choice([8, 40, 200, 450]), i), max_new_tokens=5, sampling=Sampling(0.8, seed=i)
        )
        for i in range(16)
    ]
    want = [fresh(clocked_scheduler.engine).generate(asked) for asked in some]
    fresh(clocked_scheduler.engine)
    clocked_scheduler.now, replies = 0.0, []
    for asked in some:
        replies.append(clocked_scheduler.submit(asked))
        clocked_scheduler.running.step()
    clocked_scheduler.finish()
    work = [len(clocked_scheduler.engine.prompt_ids(asked)) * TOKEN + 5 * STEP for asked in some]
    arrived = [clocked_scheduler.tokens[asked.request_id][0] for asked in some]
    fair = equal_shares([(at, seconds, 1.0) for at, seconds in zip(arrived, work, strict=True)])
    for i, asked in enumerate(some):
        assert clocked_scheduler.seconds_to_first(asked) <= 2 * (fair[i] - arrived[i])
    assert_equal([reply.response for reply in replies], want)


def test_many_short_requests_do_not_starve_a_long_prompt(clocked_scheduler):
    """A new one comes as soon as one ends, with a higher priority; they want more than the machine has."""
    long = request(prompt=words(450, 1), max_new_tokens=1)
    reply, some = clocked_scheduler.submit(long), []
    while not reply.over:
        while len(clocked_scheduler.running) < 6:
            asked = request(prompt=words(40, len(some)), max_new_tokens=1, priority=len(some) % 2)
            some.append(asked)
            clocked_scheduler.submit(asked)
        clocked_scheduler.running.step()
        assert len(some) < 400
    assert clocked_scheduler.seconds_to_first(long) <= 450 * TOKEN * (1 + 5 * MORE)
