"""Several requests at once: each gets the same reply as alone."""

import numpy as np
import pytest

from ruvmlx.engine import Sampling
from ruvmlx.engine.batch import generate_many
from ruvmlx.errors import UsageError
from ruvmlx.lora.micro_lora import MicroLoRA

from .test_engine import GREEDY, request


def requests(**fields):
    """13 requests of unequal prompts and lengths, greedy and seeded."""
    return [
        request(
            prompt=f"request {i} " + "and so on " * (i % 5 * 3),
            max_new_tokens=1 + 37 * i % 50,
            sampling=GREEDY if i % 2 else Sampling(0.9, top_p=0.95, seed=i),
            **fields,
        )
        for i in range(13)
    ]


def replies_alone(engine, some, adapter=None):
    """Each reads its whole prompt: what an earlier request has read may have lost precision since."""
    return {r.request_id: fresh(engine).generate(r, adapter) for r in some}


def fresh(engine):
    engine.sessions.clear()
    return engine


def together(engine, some, adapter=None, width=5):
    fresh(engine)
    return {r.request_id: r for r in generate_many(engine, some, adapter, width)}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for key, response in want.items():
        assert got[key].token_ids == response.token_ids
        assert (got[key].text, got[key].finish_reason) == (response.text, response.finish_reason)
        assert got[key].cache_tokens == response.cache_tokens
        assert got[key].prompt_tokens == response.prompt_tokens


@pytest.mark.parametrize("width", [1, 2, 5, 40])
def test_replies_are_those_of_each_request_alone(each, width):
    """Shorter ones make room for the next; the widest batch is more than one call's rows."""
    some = requests()
    assert_same(together(each, some, width=width), replies_alone(each, some))


def test_under_an_adapter(each):
    rng, c = np.random.default_rng(3), each.model.config
    a, b = rng.normal(size=(c.hidden_size, 2)), rng.normal(size=(2, c.vocab_size))
    adapter, some = MicroLoRA(a.astype(np.float32), b.astype(np.float32)), requests()
    want = replies_alone(each, some, adapter)
    assert_same(together(each, some, adapter), want)
    plain = together(each, some)
    assert any(plain[key].token_ids != want[key].token_ids for key in want)


def test_each_with_its_own_adapter(each):
    """Or none: every third request."""
    rng, c, some = np.random.default_rng(4), each.model.config, requests()
    own = {}
    for i, r in enumerate(some):
        a, b = rng.normal(size=(c.hidden_size, 2)), rng.normal(size=(2, c.vocab_size))
        own[r.request_id] = None if i % 3 == 2 else MicroLoRA(a.astype(np.float32), b.astype(np.float32))
    want = {r.request_id: each.generate(r, own[r.request_id]) for r in some}
    assert_same(together(each, some, lambda request: own[request.request_id]), want)


def test_eos_and_stop_strings(engine, tiny, monkeypatch):
    monkeypatch.setattr(tiny.tokenizer, "eos_ids", frozenset(range(0, 320, 9)))
    some = [*requests(stop=("e", "a")), *requests(ignore_eos=False)]
    for r in some[13:]:
        r.ignore_eos = False
    want = replies_alone(engine, some)
    assert {r.finish_reason for r in want.values()} == {"stop", "length"}
    assert_same(together(engine, some), want)


def test_cancelling_one_leaves_the_others(engine):
    """One before it began, one in its middle."""
    some = [request(max_new_tokens=n, prompt=f"p{n}") for n in (3, 40, 20, 30)]
    want = replies_alone(engine, some)
    some[3].cancel.set()
    got = {}
    for response in generate_many(engine, some, width=3):
        got[response.request_id] = response
        some[1].cancel.set()
    reasons = [got[r.request_id].finish_reason for r in some]
    assert reasons == ["length", "cancelled", "length", "cancelled"]
    cut, never = got[some[1].request_id].token_ids, got[some[3].request_id]
    assert 3 <= len(cut) < 40 and cut == want[some[1].request_id].token_ids[: len(cut)]
    assert (never.text, never.token_ids) == ("", [])
    assert got[some[2].request_id].token_ids == want[some[2].request_id].token_ids


def test_responses_come_as_they_finish_and_requests_are_taken_as_needed(engine):
    some = [request(max_new_tokens=n) for n in (30, 2, 10, 3)]
    taken = []

    def stream():
        for r in some:
            taken.append(r)
            yield r

    responses = generate_many(engine, stream(), width=2)
    assert len(next(responses).token_ids) == 2 and len(taken) == 2
    assert [len(r.token_ids) for r in responses] == [10, 3, 30]


def test_sessions_go_on_afterwards(engine):
    """Of a batch that was left, too."""
    some = [request(session_id=f"s{i}", prompt=f"hello {i}", max_new_tokens=4 + 9 * i) for i in range(3)]
    responses = generate_many(engine, some)
    next(responses)
    responses.close()
    for r in some:
        ids = [*engine.prompt_ids(r), 40, 41]
        again = engine.generate(request(prompt=None, input_ids=ids, session_id=r.session_id))
        assert again.cached_tokens == len(ids) - 2
        assert again.token_ids == engine.generate(request(prompt=None, input_ids=ids)).token_ids


def test_a_step_that_fails_leaves_no_half_cache(engine, tiny_backend, monkeypatch):
    def fails(*_):
        raise RuntimeError("device lost")

    with monkeypatch.context() as m:
        m.setattr(tiny_backend, "decode_batch", fails)
        with pytest.raises(RuntimeError):
            list(generate_many(engine, [request(session_id="a"), request(session_id="b")]))
    assert engine.generate(request(session_id="a")).cached_tokens == 0


@pytest.mark.parametrize(
    "bad,message",
    [
        ({"prompt": " "}, "empty"),
        ({"max_new_tokens": 0}, "1 or more"),
        ({"session_id": "s"}, "one request at a time"),
    ],
)
def test_bad_requests_of_a_batch_are_refused(engine, bad, message):
    with pytest.raises(UsageError, match=message):
        list(generate_many(engine, [request(session_id="s"), request(**bad)]))
    with pytest.raises(UsageError, match="width is 0"):
        list(generate_many(engine, [], width=0))
