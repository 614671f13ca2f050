"""Every kernel, in every implementation this machine runs, against its float64 twin."""

import numpy as np
import pytest

from ruvmlx.kernels import micro
from ruvmlx.kernels.library import available
from tests.oracles.c_kernels import dot

SIZES = [(1, 1), (3, 1), (5, 7), (31, 1023), (17, 1025), (64, 3001)]  # (D, V): blocks hold 1024
RANKS = [1, 2, 3, 4, 8]


def odd(rng, *shape, spread=1.0):
    """Random float32 array that starts 4 bytes past any 8-byte boundary."""
    n = int(np.prod(shape))
    raw = np.empty(n + 4, np.float32)
    start = 1 + (raw.ctypes.data // 4) % 2
    view = raw[start : start + n].reshape(shape)
    view[...] = rng.normal(0, spread, shape)
    assert view.ctypes.data % 8 == 4
    return view


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("impl", available("trace_accumulate"))
def test_exponentials_of_a_trace_are_within_3_ulp(impl):
    """e_b becomes -e^(logit - largest) / sum: its parts by the largest; every 2,048th float from -80 to 0."""
    down = np.arange(0, np.float32(80).view(np.int32), 2048, np.int32).view(np.float32)
    one = np.ones((1, 1), np.float32)
    for part in np.array_split(-down, down.size // 500):
        logits = np.pad(part, 1)  # the largest first, the token last
        e_a, e_b = np.zeros((1, 1), np.float32), np.zeros((1, logits.size), np.float32)
        micro.trace_accumulate(one[0], logits, logits.size - 1, one, 0 * e_b, 1.0, e_a, e_b, impl)
        exact = np.exp(part.astype(np.float64))
        got = e_b[0, 1:-1].astype(np.float64) / e_b[0, 0]
        assert (np.abs(got - exact) / np.spacing(exact.astype(np.float32))).max() < 3


@pytest.mark.parametrize("impl", available("dot"))
@pytest.mark.parametrize("n", [1, 2, 1023, 1025, 70_001])
def test_dot_matches_its_twin(impl, n, rng):
    x, y = odd(rng, n), odd(rng, n)
    assert dot(x, y, impl) == pytest.approx(np.dot(x.astype(float), y), abs=2e-6 * n**0.5 + 1e-6)


@pytest.mark.parametrize("impl", available("all_within"))
@pytest.mark.parametrize("n", [1, 15, 16, 17, 1000])
def test_all_finite_sees_every_position(impl, n, rng):
    x = odd(rng, n, spread=1e38)
    x[~np.isfinite(x)] = 0
    assert micro.all_finite(x, impl)
    for position in {0, n // 2, n - 1}:
        for bad in (np.nan, np.inf, -np.inf):
            y = x.copy()
            y[position] = bad
            assert not micro.all_finite(y, impl)
        y = np.full(n, -2, np.float32)
        assert micro.all_within(y, 2, impl)
        y[position] = -2.001
        assert not micro.all_within(y, 2, impl) and micro.all_within(y, 3, impl)


def steps(rng, sizes, momentum):
    return [(odd(rng, n), odd(rng, n) if momentum else None, odd(rng, n)) for n in sizes]


def copies_of(some):
    return [tuple(None if x is None else x.copy() for x in step) for step in some]


@pytest.mark.parametrize("impl", available("micro_update"))
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 33), (1536, 1537)])
def test_micro_step_matches_its_twin(impl, sizes, momentum, rng):
    got = steps(rng, sizes, momentum)
    want = copies_of(got)
    micro.micro_step(got, 0.37, 0.9, impl)
    micro.micro_step_ref(want, 0.37, 0.9)
    for (w, v, g), (w_ref, v_ref, g_ref) in zip(got, want, strict=True):
        np.testing.assert_allclose(w, w_ref, atol=1e-6)
        np.testing.assert_array_equal(g, g_ref)
        if momentum:
            np.testing.assert_allclose(v, v_ref, atol=1e-6)


@pytest.mark.parametrize("impl", available("micro_update"))
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3.4e38])
def test_micro_step_changes_nothing_when_one_weight_would_break(impl, which, bad, rng):
    """The bad number sits in the last weight, velocity or gradient of the second array."""
    some = steps(rng, (40, 19), momentum=True)
    some[1][which][-1] = bad
    some[1][0][-1] = bad  # 3.4e38 overflows only as a sum
    some[1][2][-1] = bad
    before = copies_of(some)
    with pytest.raises(micro.NotFinite):
        micro.micro_step(some, 1.0, 0.9, impl)
    for step, old in zip(some, before, strict=True):
        for x, x_old in zip(step, old, strict=True):
            np.testing.assert_array_equal(x, x_old)


@pytest.mark.parametrize("impl", available("head_add"))
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dim,vocab", SIZES)
def test_head_add_matches_its_twin(impl, dim, vocab, rank, rng):
    for tokens in (1, 35):
        h, a, b = odd(rng, tokens, dim), odd(rng, dim, rank), odd(rng, rank, vocab)
        got = odd(rng, tokens, vocab)
        want = got.copy()
        micro.head_add(got, h, a, b, 0.7, impl)
        micro.head_add_ref(want, h, a, b, 0.7)
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)


def token(rng, dim, vocab, rank):
    """h, logits, y, lora_a, lora_b, s, e_a, e_b of one token, none of them zero."""
    h, z, a, b = odd(rng, dim), odd(rng, vocab, spread=4), odd(rng, dim, rank), odd(rng, rank, vocab)
    a /= dim**0.5
    return h, z, vocab // 3, a, b, 0.8, odd(rng, dim, rank), odd(rng, rank, vocab)


@pytest.mark.parametrize("impl", available("trace_accumulate"))
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dim,vocab", SIZES)
def test_trace_accumulate_matches_its_twin(impl, dim, vocab, rank, rng):
    args = token(rng, dim, vocab, rank)
    *inputs, e_a, e_b = args
    want_a, want_b = e_a.copy(), e_b.copy()
    got = micro.trace_accumulate(*args, impl=impl)
    want = micro.trace_accumulate_ref(*inputs, want_a, want_b)
    assert got == pytest.approx(want, abs=1e-5)
    np.testing.assert_allclose(e_a, want_a, atol=2e-5)
    np.testing.assert_allclose(e_b, want_b, atol=2e-5)


@pytest.mark.parametrize("impl", available("trace_accumulate"))
def test_trace_keeps_a_steep_softmax_exact(impl, rng):
    """Logits of +-300 with the maximum in the last block, and whole blocks masked to -inf."""
    args = token(rng, 9, 5000, 2)
    h, z, y, a, b, s, e_a, e_b = args
    z *= 75
    z[:1100], z[3000:4200], z[-1] = -np.inf, -np.inf, z[y] + 3
    want_a, want_b = e_a.copy(), e_b.copy()
    got = micro.trace_accumulate(*args, impl=impl)
    assert got == pytest.approx(micro.trace_accumulate_ref(h, z, y, a, b, s, want_a, want_b), rel=1e-5)
    np.testing.assert_allclose(e_a, want_a, atol=2e-5)
    np.testing.assert_allclose(e_b, want_b, atol=2e-5)


@pytest.mark.parametrize("impl", available("trace_accumulate"))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 1, 3, 4])
def test_trace_reports_bad_input_and_leaves_the_accumulators(impl, bad, where, rng):
    """NaN or Inf as the last element of h, logits, lora_a or lora_b."""
    args = token(rng, 5, 1031, 2)
    args[where].reshape(-1)[-1] = bad
    before = args[6].copy(), args[7].copy()
    with pytest.raises(micro.NotFinite):
        micro.trace_accumulate(*args, impl=impl)
    np.testing.assert_array_equal(args[6], before[0])
    np.testing.assert_array_equal(args[7], before[1])


@pytest.mark.parametrize("impl", available("trace_accumulate"))
def test_trace_refuses_a_token_that_cannot_have_been_drawn(impl, rng):
    """-inf everywhere, or at the token itself: no probability, no gradient."""
    for masked in (slice(None), slice(10, 11)):
        h, z, _, *rest = token(rng, 5, 31, 1)
        z[masked] = -np.inf
        with pytest.raises(micro.NotFinite):
            micro.trace_accumulate(h, z, 10, *rest, impl=impl)


@pytest.mark.parametrize("impl", available("kl_to_frozen"))
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("vocab", [1, 7, 1023, 3001])
def test_kl_to_frozen(impl, vocab, rank, rng):
    for contexts in (1, 33):
        z = odd(rng, contexts, vocab, spread=3).astype(np.float64)
        p0 = (np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)).astype(np.float32)
        u, b = odd(rng, contexts, rank), odd(rng, rank, vocab)
        for s in (0.0, 0.02, 1.3):
            want = micro.kl_to_frozen_ref(p0, u, b, s)
            assert micro.kl_to_frozen(p0, u, b, s, impl=impl) == pytest.approx(want, rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("impl", available("kl_to_frozen"))
def test_what_is_near_is_as_exact(impl):
    """One token, whose log-probability loses just what it gains: the exp inside, over the whole range."""
    one = np.ones((1, 1), np.float32)
    for shift in np.linspace(-8.5, 8.5, 613, dtype=np.float32):
        lost = micro.kl_to_frozen(one, one, one * shift, 1.0, impl=impl)[1]
        assert lost == pytest.approx(shift, abs=5e-7)


@pytest.mark.parametrize("impl", available("kl_to_frozen"))
@pytest.mark.parametrize("vocab", [1, 7, 1023, 3001])
def test_kl_to_frozen_from_a_base(impl, vocab, rng):
    """p0 is not the frozen model's: its log-ratio to that is given. Without a push it is KL(p0 || frozen)."""
    z, far = odd(rng, 33, vocab, spread=3).astype(np.float64), odd(rng, 33, vocab, spread=0.3)
    p0 = (np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)).astype(np.float32)
    log_frozen = np.log(p0.astype(np.float64)) - far
    log_frozen -= np.log(np.exp(log_frozen).sum(axis=1, keepdims=True))
    ratio = (np.log(p0.astype(np.float64)) - log_frozen).astype(np.float32)
    u, b = odd(rng, 33, 2), odd(rng, 2, vocab)
    assert micro.kl_to_frozen_ref(p0, u, b, 0.0, ratio)[0] == pytest.approx(
        (p0 * ratio).sum(axis=1).mean(), abs=1e-5
    )
    for s in (0.0, 0.02, 1.3):
        want = micro.kl_to_frozen_ref(p0, u, b, s, ratio)
        assert micro.kl_to_frozen(p0, u, b, s, ratio, impl) == pytest.approx(want, rel=1e-4, abs=4e-6)


@pytest.mark.parametrize("impl", available("kl_to_frozen"))
def test_kl_does_not_overflow_where_the_adapter_is_far_off(impl, rng):
    """Logit shifts of +-300: e^300 has no float32."""
    p0 = np.full((2, 2050), 1 / 2050, np.float32)
    u, b = np.float32([[1], [-1]]), odd(rng, 1, 2050, spread=100)
    want = micro.kl_to_frozen_ref(p0, u, b, 1.0)
    assert micro.kl_to_frozen(p0, u, b, 1.0, impl=impl) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("impl", available("kl_to_frozen"))
@pytest.mark.parametrize("near", [1.0, 1.01])
def test_kl_on_both_sides_of_where_a_bound_serves(impl, near, rng):
    """Contexts of which every shift is near, and some of which the largest is looked for."""
    p0 = np.abs(odd(rng, 3, 2050))
    p0 /= p0.sum(axis=1, keepdims=True)
    u, b = np.full((3, 2), 4, np.float32), np.full((2, 2050), -0.01, np.float32)
    b[:, 5], b[:, 1500] = 0.02, near  # 8 is the bound there
    for down in (False, True):  # ... also downwards, what is said next to never
        if down:
            p0[:, 1500], b[:, 1500] = 1e-9, -near
        want = micro.kl_to_frozen_ref(p0, u, b, 1.0)
        assert micro.kl_to_frozen(p0, u, b, 1.0, impl=impl) == pytest.approx(want, rel=1e-4, abs=5e-6)
    b[1] = -b[0]  # what two readings say cancels
    assert micro.kl_to_frozen(p0, u, b, 1.0, impl=impl) == pytest.approx((0, 0), abs=5e-6)


@pytest.mark.parametrize("impl", available("evidence_add"))
@pytest.mark.parametrize("rank,n", [(1, 1), (2, 7), (3, 1025)])
def test_evidence_add_matches_its_twin(impl, rank, n, rng):
    held, gradient, information = odd(rng, 3, rank, n), odd(rng, rank, n), odd(rng, rank, n)
    for w, kept in ((0.7, 0.995), (-1.0, 1.0), (0.3, 0.0)):
        got = micro.evidence_add(held, gradient, information, w, kept, impl)
        want = micro.evidence_add_ref(held, gradient, information, w, kept)
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("impl", available("evidence_push"))
@pytest.mark.parametrize("noise", [0.0, 0.4, 50.0])
@pytest.mark.parametrize(
    "rank,n,part", [(1, 1, (0, 1)), (2, 33, (0, 17)), (2, 33, (17, 33)), (3, 1500, (1, 1499))]
)
def test_evidence_push_matches_its_twin(impl, noise, rank, n, part, rng):
    """No other coordinate is written; where chance explains all, nothing is left, nor where nobody spoke."""
    evidence, precision = odd(rng, 3, rank, n), np.abs(odd(rng, n)) + np.float32(0.1)
    evidence[1:] = np.abs(evidence[1:])
    evidence[:, 0, part[0]] = 0
    got, want = np.full((2, rank, n), 7, np.float32)
    how = 1.5, 12.0, noise, slice(*part)
    micro.evidence_push(evidence, precision, *how, got, impl)
    micro.evidence_push_ref(evidence, precision, *how, want)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    assert noise < 50 or not got[:, slice(*part)].any()


@pytest.mark.parametrize("impl", available("evidence_push"))
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_evidence_passes_nan_on(impl, noise, bad, where, rng):
    """One bad number: what comes of it is not finite, or what its twin says."""
    held, precision = np.abs(odd(rng, 3, 1, 40)), np.ones(40, np.float32)
    held[where, 0, 7] = bad
    added = micro.evidence_add(held, held[0], held[1], 0.5, 1.0, impl)
    np.testing.assert_array_equal(np.isfinite(added[where]), np.isfinite(held[where]))
    got, want = np.zeros((2, 1, 40), np.float32)
    micro.evidence_push(held, precision, 1.0, 12.0, noise, slice(0, 40), got, impl)
    with np.errstate(invalid="ignore"):
        micro.evidence_push_ref(held, precision, 1.0, 12.0, noise, slice(0, 40), want)
    assert not np.isfinite(got).all() or np.allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("impl", available("micro_place"))
@pytest.mark.parametrize("rank,vocab,n", [(1, 1, 1), (2, 33, 5), (3, 1500, 700)])
def test_micro_place_matches_its_twin(impl, rank, vocab, n, rng):
    b, block = odd(rng, rank, vocab), odd(rng, rank, n + 2)
    at = np.sort(rng.choice(vocab, n, replace=False)).astype(np.int32)
    for c, s in ((0.7, 1.2), (0.0, 0.5)):
        got = micro.micro_place(b, c, block, at, s, 1e8, impl)
        np.testing.assert_allclose(got, micro.micro_place_ref(b, c, block, at, s, 1e8), rtol=1e-6)


@pytest.mark.parametrize("impl", available("micro_place"))
def test_micro_place_names_what_does_not_fit(impl, rng):
    b, block = odd(rng, 2, 9), odd(rng, 2, 2)
    for at, expected in ([1, 2, 3], "has 2 columns, expected at least 3"), ([1, 9], "outside the vocabulary"):
        with pytest.raises(ValueError, match=expected):
            micro.micro_place(b, 1.0, block, np.int32(at), 1.0, 1e8, impl)


@pytest.mark.parametrize("impl", available("micro_place"))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e30])
@pytest.mark.parametrize("where", ["kept", "replaced", "placed"])
def test_micro_place_refuses_what_is_beyond_measure(impl, bad, where, rng):
    """Also in a weight that would have been replaced: an adapter with one is broken."""
    b, block, at = odd(rng, 2, 40), odd(rng, 2, 3), np.int32([4, 20, 39])
    x, i = {"kept": (b, (1, 38)), "replaced": (b, (1, 39)), "placed": (block, (1, 2))}[where]
    x[i] = bad
    for place in (micro.micro_place_ref, lambda *args: micro.micro_place(*args, impl)):
        with pytest.raises(micro.NotFinite):
            place(b, 0.9, block, at, 0.9, 1e8)


@pytest.mark.parametrize("impl", available("logprobs"))
@pytest.mark.parametrize("tokens,vocab", [(1, 1), (3, 7), (5, 1025), (2, 4099)])
def test_logprobs_match_their_twin(impl, tokens, vocab, rng):
    z, y = odd(rng, tokens, vocab, spread=6), rng.integers(0, vocab, tokens, dtype=np.int32)
    np.testing.assert_allclose(micro.logprobs(z, y, impl), micro.logprobs_ref(z, y), atol=1e-5)
    z[:, : vocab // 2] = -np.inf
    y[:] = vocab // 2
    np.testing.assert_allclose(micro.logprobs(z, y, impl), micro.logprobs_ref(z, y), atol=1e-5)


SCALARS = {
    "logprobs": lambda big, small, b, impl: micro.logprobs(big, np.int32([0, 1]), impl),
    "kl_to_frozen": lambda big, small, b, impl: micro.kl_to_frozen(big, small, b, 1.0, impl=impl),
    "dot": lambda big, small, b, impl: dot(big, big, impl),
}


@pytest.mark.parametrize("impl", available("logprobs"))
@pytest.mark.parametrize("kernel", SCALARS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("broken", [np.s_[-1, -1], np.s_[-1]])
def test_scalars_are_never_nan(impl, kernel, bad, broken, rng):
    """The last element alone is bad, or a whole row is."""
    big, small, b = np.abs(odd(rng, 2, 1025)), odd(rng, 2, 1), odd(rng, 1, 1025)
    SCALARS[kernel](big, small, b, impl)  # fine so far
    big[broken] = bad
    with pytest.raises(micro.NotFinite):
        SCALARS[kernel](big, small, b, impl)
