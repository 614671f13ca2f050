"""A side of the hybrid backend fails within a reply: the reply ends on the other side, each token once."""

import numpy as np
import pytest

from ruvmlx.engine import LLMInferenceEngine, Sampling
from ruvmlx.engine.batch import generate_many
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.sona.trace import Trace
from tests.backends.hybrid import Failing, join, open_side
from tests.sona.test_trace import random_adapter

from .test_engine import request

LONG = "the quick brown fox jumps over the lazy dog. " * 6
N = 24
POLICY = TierPolicy("tiered", (320, 2048))  # the next reply can go back to the end of the prompt


@pytest.fixture(scope="module")
def native(tiny):
    return open_side("native", tiny)


@pytest.fixture(scope="module")
def mlx(tiny):
    return open_side("mlx", tiny)


@pytest.fixture(scope="module")
def streaming(tiny):
    backend = open_side("mlx", tiny)
    backend.streams = True  # by itself only where a GPU works beside the host
    return backend


def ask(engine, adapter=None, recorder=None, **fields):
    fields = {"prompt": LONG, "max_new_tokens": N} | fields
    return engine.generate(request(**fields), adapter, recorder)


@pytest.fixture(params=["native", "mlx", "streaming"])
def main(request, native, mlx, streaming):
    return {"native": native, "mlx": mlx, "streaming": streaming}[request.param]


@pytest.fixture
def other(main, native, mlx):
    return mlx if main is native else native


def engine_on(tiny, backend, **options):
    return LLMInferenceEngine(tiny, backend, POLICY, **options)


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 9, -1])
def test_a_reply_ends_on_the_other_side(tiny, main, other, calls):
    """A failure in the first and the second piece of the prompt, at the first token, later, at the last: the
    reply has the tokens of a side alone. The next reply does not ask the failed side. No tokens are guessed:
    measured times decide how many tokens are guessed, so two replies can need different numbers of calls."""
    whole = Failing(main)
    wanted = ask(engine_on(tiny, whole, speculate="off"))
    broken = Failing(main, calls % len(whole.seen))
    hybrid = join(broken, other)
    engine = engine_on(tiny, hybrid, speculate="off")
    got = ask(engine, session_id="a")
    assert (got.token_ids, got.text, got.finish_reason) == (wanted.token_ids, wanted.text, "length")
    assert [failure.side for failure in hybrid.take_failures()] == [main.name]
    seen = len(broken.seen)
    again = ask(engine, session_id="a")
    assert again.cached_tokens > len(LONG) - 64 and len(broken.seen) == seen


def test_the_text_arrives_once(tiny, main, other):
    """Each chunk has the next token; no chunk comes twice."""
    chunks = list(engine_on(tiny, join(Failing(main, 8), other)).stream(request(prompt=LONG)))
    response = chunks[-1].response
    assert "".join(chunk.text for chunk in chunks) == response.text
    generated = [chunk.generated for chunk in chunks if chunk.text and chunk.response is None]
    assert generated == sorted(set(generated))


@pytest.mark.parametrize("calls", [1, 4, 9])
def test_the_trace_has_every_token_once(tiny, main, other, calls):
    """The gradient and the hidden states are those of an unbroken reply, up to the rounding of the sides."""
    adapter = random_adapter(tiny.config)
    whole, broken = Trace(adapter, 1), Trace(adapter, 1)
    wanted = ask(engine_on(tiny, main), adapter, whole)
    hybrid = join(Failing(main, calls), other)
    got = ask(engine_on(tiny, hybrid), adapter, broken)
    assert hybrid.take_failures() and got.token_ids == wanted.token_ids == broken.tokens == whole.tokens
    for name in ("grad_b", "grad_a", "hidden_states"):
        one, two = getattr(broken, name), getattr(whole, name)
        np.testing.assert_allclose(one, two, atol=3e-3 * np.abs(two).max())
    assert broken.logprob == pytest.approx(whole.logprob, rel=1e-3)


def test_logprobs_and_seeds_go_on(tiny, native, mlx):
    """The sampler keeps its state, so a seed gives the same reply; each token has its log-probability."""
    fields = {"sampling": Sampling(0.8, seed=7), "logprobs": 2}
    wanted = ask(engine_on(tiny, native), **fields)
    got = ask(engine_on(tiny, join(Failing(native, 9), mlx)), **fields)
    assert got.token_ids == wanted.token_ids
    assert [row.token_id for row in got.logprobs] == got.token_ids
    np.testing.assert_allclose(
        [row.logprob for row in got.logprobs], [row.logprob for row in wanted.logprobs], atol=1e-3
    )


@pytest.mark.parametrize("calls", [0, 5])
def test_guessed_tokens_end_with_the_side_that_checks_them(tiny, native, mlx, calls):
    """MLX checks no guesses. The reply is the same without them."""
    engine = engine_on(tiny, native)
    fields = {"prompt": "ab ab ab ab ab ab ab ab ab ab", "max_new_tokens": 60}
    predicted = engine.generate(request(**fields)).token_ids
    wanted = ask(engine, predicted=predicted, **fields)
    assert wanted.drafted > 5
    broken = Failing(native, calls, of=("decode_drafted",))
    got = ask(engine_on(tiny, join(broken, mlx)), predicted=predicted, **fields)
    assert got.token_ids == wanted.token_ids and "decode_drafted" in broken.seen and broken.left < 0


@pytest.mark.parametrize("calls", [0, 3])
def test_replies_in_a_batch_all_go_on(tiny, native, mlx, calls):
    """A failed step of a batch moves every reply in it."""
    some = [request(prompt=LONG[i:], max_new_tokens=N - i) for i in range(3)]
    wanted = [engine_on(tiny, native).generate(one).token_ids for one in some]
    broken = Failing(native, calls, of=("decode_batch",))
    got = list(generate_many(engine_on(tiny, join(broken, mlx)), some))
    assert sorted(len(one.token_ids) for one in got) == [N - 2, N - 1, N]
    assert {tuple(one.token_ids) for one in got} == set(map(tuple, wanted))
    assert broken.seen.count("decode_batch") == calls + 1


def test_a_cancelled_request_is_not_read_again(tiny, native, mlx):
    """The cancel comes while the other side reads the tokens so far: the reply ends with its text."""
    one = request(prompt=LONG, max_new_tokens=N)
    other = Failing(mlx)
    other.hooks["prefill"] = one.cancel.set
    hybrid = join(Failing(native, 9), other)
    response = engine_on(tiny, hybrid).generate(one)
    assert response.finish_reason == "cancelled" and 0 < response.generation_tokens < N
    assert other.seen == ["prefill"] and hybrid.take_failures()


def test_a_reply_that_both_sides_refuse_fails_once(tiny, native, mlx):
    hybrid = join(Failing(native, 5), Failing(mlx, 0))
    with pytest.raises(RuntimeError, match="the device is gone"):
        ask(engine_on(tiny, hybrid))
    assert [failure.side for failure in hybrid.take_failures()] == ["native"]


def test_other_sequences_and_limits_follow(tiny, native, mlx):
    """Kept sequences of the failed side are dropped. The budget of KV pages goes to the other side's pool."""
    broken = Failing(native)
    hybrid = join(broken, mlx)
    hybrid.pool.budget = 123 << 20
    engine = engine_on(tiny, hybrid)
    for name in ("a", "b"):
        ask(engine, session_id=name)
    vars(broken)["left"] = 4
    ask(engine, session_id="c")
    kept = [engine.sessions.get(name) for name in ("a", "b", "c")]
    assert kept[:2] == [None, None] and not hybrid.is_lost(kept[2].cache)
    assert hybrid.pool is mlx.pool and mlx.pool.budget == 123 << 20
    assert mlx.pool.reclaim == engine.sessions._reclaim
    mlx.pool.budget = native.pool.budget = 0
