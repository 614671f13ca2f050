"""What a rating asks for, and how far that leads: each against its float64 twin, in every implementation."""

import contextlib
import ctypes as C

import numpy as np
import pytest

from ruvmlx.kernels import micro, rating
from ruvmlx.kernels.library import BAD_ARGUMENT, LibraryError, implementations
from ruvmlx.kernels.matmul import Matrix
from ruvmlx.kernels.rating import EvidenceSolver, EvidenceSolverRef, KLContexts, Push, Rule

from .test_micro import odd

RULE = Rule(Push(1.0, 12.0, 0.0), Push(1.5, 10.0, 0.02), 0.05)
pytestmark = pytest.mark.parametrize("impl", implementations())


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def some_evidence(rng, rank, n):
    evidence = odd(rng, 3, rank, n)
    evidence[1:] = np.abs(evidence[1:])
    return evidence, np.abs(odd(rng, n)) + np.float32(0.1)


SIZES = [(1, 1, 1), (2, 17, 5), (2, 2048, 256), (3, 70, 33)]


def some_asking(rng, rank, a, k, n_ends=0):
    """Fast and slow, with the evidence."""
    evidence, precision = some_evidence(rng, rank, a + k)
    features = rng.normal(size=(a, k)).astype(np.float16)
    ends = rng.permutation(a)[:n_ends].astype(np.int32)
    return (
        EvidenceSolver(precision, Matrix(features), rank, ends),
        EvidenceSolverRef(precision, features, ends),
        evidence,
    )


def some_answers(rng, rank, a, n=7):
    p = rng.random((n, a + 1)).astype(np.float32) ** 4 + np.float32(1e-4)
    p /= p.sum(axis=1, keepdims=True)
    return KLContexts(p, None, odd(rng, n, rank), rng.integers(0, a + 1, n, dtype=np.int32), [(n, 0.0)])


@pytest.mark.parametrize("rank,a,k", SIZES)
def test_what_evidence_asks_for(impl, rank, a, k, rng):
    asking, twin, evidence = some_asking(rng, rank, a, k)
    want = twin.block(evidence, RULE)
    np.testing.assert_allclose(asking.block(evidence, RULE, impl=impl), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("rank,a,k", SIZES)
@pytest.mark.parametrize("n_ends", [0, 1, 3])
@pytest.mark.parametrize("scale", [0.001, 1.0, 30.0])  # far below the cap, above it, beyond a parabola
def test_what_is_asked_for_is_held_back_but_for_ends(impl, rank, a, k, n_ends, scale, rng):
    asking, twin, evidence = some_asking(rng, rank, a, k, min(n_ends, a))
    answers = some_answers(rng, rank, a)
    free, want = twin.block(evidence, RULE), twin.block(evidence, RULE, answers, scale)
    got = asking.block(evidence, RULE, answers, scale, impl)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(free).max())
    np.testing.assert_allclose(got[:, asking.ends], free[:, asking.ends], atol=1e-5 * np.abs(free).max())
    if scale == 1 and a > 1 + n_ends:
        said = want.copy()
        said[:, asking.ends] = 0
        assert answers.distance_ref(said.astype(np.float32), scale)[0] == pytest.approx(RULE.cap, rel=0.5)


@pytest.mark.parametrize("rank,a,k", SIZES)
@pytest.mark.parametrize("weight,kept", [(0.7, 0.995), (-0.4, 0.6)])
def test_one_rating_more(impl, rank, a, k, weight, kept, rng):
    asking, twin, held = some_asking(rng, rank, a, k, 1)
    answers, said = some_answers(rng, rank, a), [odd(rng, rank, a + k) for _ in range(2)]
    rest, before = odd(rng, rank, a + 1), held.copy()
    args = held, *said, rest, weight, kept, RULE, answers, 0.3
    evidence, block = asking.add_rating(*args, 1e8, impl)
    want = twin.add_rating(*args)
    np.testing.assert_allclose(evidence, want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(block, want[1], atol=1e-4 * np.abs(want[1]).max())
    np.testing.assert_array_equal(held, before)


@pytest.mark.parametrize("where", ["held", "gradient", "information", "rest"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_rating_with_what_is_no_number_is_refused(impl, where, bad, rng):
    """In the first place and in the last one."""
    asking, _, held = some_asking(rng, 2, 17, 5, 1)
    arrays = {name: odd(rng, 2, n) for name, n in (("gradient", 22), ("information", 22), ("rest", 18))}
    arrays = {"held": held} | arrays | {"information": np.abs(arrays["information"])}
    rest = 1.0, 1.0, RULE, some_answers(rng, 2, 17), 1.0, 1e8, impl
    asking.add_rating(*arrays.values(), *rest)
    for at in (0, -1):
        known = arrays[where].flat[at]
        arrays[where].flat[at] = bad
        with pytest.raises(micro.NotFinite):
            asking.add_rating(*arrays.values(), *rest)
        arrays[where].flat[at] = known


@pytest.mark.parametrize("at", [0, 16, 17, 21])  # of tokens, then of features
def test_what_is_asked_for_passes_nan_on(impl, at, rng):
    asking, _, evidence = some_asking(rng, 2, 17, 5)
    evidence[0, 1, at] = np.nan
    found = asking.block(evidence, RULE, impl=impl)
    assert np.isnan(found[1]).any() and np.isfinite(found[0]).all()
    with pytest.raises(micro.NotFinite):
        asking.block(evidence, RULE, some_answers(rng, 2, 17), impl=impl)


def some_text(rng, rank, vocab, sizes, whole=True):
    """Of so many contexts a group; whole: with all that may be left out."""
    m = sum(sizes)
    p = rng.random((m, vocab)).astype(np.float32) ** 4 + np.float32(1e-4)
    p /= p.sum(axis=1, keepdims=True)
    shares = [0.0, 0.25, 0.75]
    more = [odd(rng, rank, vocab, spread=0.1) for _ in range(2)] if whole else []
    ratio = odd(rng, m, vocab, spread=0.3) if whole else None
    following = rng.integers(0, vocab, m, dtype=np.int32)
    return KLContexts(p, ratio, odd(rng, m, rank), following, list(zip(sizes, shares, strict=True)), *more)


@pytest.mark.pairwise
@pytest.mark.parametrize("sizes", [(3, 2, 5), (4, 0, 7), (1, 1, 33), (0, 2, 5), (3, 2, 0)])
@pytest.mark.parametrize("rank,vocab", [(1, 9), (2, 2049), (3, 1025), (2, 9001)])  # 9001: wide
@pytest.mark.parametrize("whole", [True, False])
def test_distance_matches_its_twin(impl, sizes, rank, vocab, whole, rng):
    text, b = some_text(rng, rank, vocab, sizes, whole), odd(rng, rank, vocab)
    for s in (0.0, 0.3, -1.0):
        want = text.distance_ref(b, s)
        np.testing.assert_allclose(text.distance(b, s, impl), want, rtol=2e-5, atol=2e-5)
        assert whole == (want[2] != 0)


def test_answers_alone_have_no_rise(impl, rng):
    p, u, b = np.full((4, 9), 1 / 9, np.float32), odd(rng, 4, 2), odd(rng, 2, 9)
    text = KLContexts(p, None, u, np.zeros(4, np.int32), [(4, 0.0)])
    kl, rise, slope = text.distance(b, 0.5, impl)
    assert kl == pytest.approx(micro.kl_to_frozen_ref(p, u, b, 0.5)[0], abs=2e-6) and rise == slope == 0


def test_the_same_contexts_read_otherwise(impl, rng):
    text, b, u = some_text(rng, 2, 40, (3, 2, 5)), odd(rng, 2, 40), odd(rng, 10, 2)
    other = text.read_as(u)
    same = KLContexts(text.p0, text.log_ratio, u, text.following, text.groups)
    np.testing.assert_allclose(other.distance(b, 0.4, impl), same.distance_ref(b, 0.4), atol=2e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("at", [0, 39])
def test_a_distance_is_a_number_or_refused(impl, bad, at, rng):
    text, b = some_text(rng, 2, 40, (3, 2, 5)), odd(rng, 2, 40)
    b[1, at] = bad
    with contextlib.suppress(micro.NotFinite):
        assert np.isfinite(text.distance(b, 0.5, impl)).all() and bad == 1e30


def test_wrong_shapes_are_named(impl, rng):
    p, u, at = np.full((4, 9), 1 / 9, np.float32), odd(rng, 4, 2), np.zeros(4, np.int32)
    features = Matrix(rng.normal(size=(17, 5)).astype(np.float16))
    asking = EvidenceSolver(odd(rng, 22), features, 2)

    def add_rating(gradient=22, information=22, rest=18):
        said = [odd(rng, 2, n) for n in (gradient, information, rest)]
        asking.add_rating(odd(rng, 3, 2, 22), *said, 1.0, 1.0, RULE, some_answers(rng, 2, 17), 1.0, 1e8, impl)

    for broken, expected in (
        (lambda: KLContexts(p, None, odd(rng, 5, 2), at, [(4, 0.0)]), "u has shape"),
        (lambda: KLContexts(p, p[:2], u, at, [(4, 0.0)]), "log_ratio has shape"),
        (lambda: KLContexts(p, None, u, at[:2], [(4, 0.0)]), "following has shape"),
        (lambda: KLContexts(p, None, u, at + 9, [(4, 0.0)]), "of 9 columns"),
        (lambda: KLContexts(p, None, u, at, [(3, 0.0)]), "expected at most 3, 4 in all"),
        (lambda: KLContexts(p, None, u, at, [(4, 0.0)], odd(rng, 2, 8)), "rest has shape"),
        (
            lambda: KLContexts(p, None, u, at, [(4, 0.0)]).distance(odd(rng, 2, 8), 1.0, impl),
            "lora_b has shape",
        ),
        (lambda: EvidenceSolver(odd(rng, 7), features, 2), "precision has shape"),
        (lambda: EvidenceSolver(odd(rng, 22), features, 2, np.int32([0, 17])), "of 17 tokens"),
        (lambda: asking.block(odd(rng, 3, 2, 21), RULE, impl=impl), "evidence has shape"),
        (lambda: asking.block(odd(rng, 3, 3, 22), RULE, impl=impl), "evidence has shape"),
        (lambda: asking.block(odd(rng, 3, 2, 22), RULE, some_answers(rng, 2, 16), impl=impl), "bad argument"),
        (lambda: add_rating(gradient=21), "gradient has shape"),
        (lambda: add_rating(information=21), "information has shape"),
        (lambda: add_rating(rest=17), "rest has shape"),
    ):
        with pytest.raises(ValueError, match=expected):
            broken()


def test_the_c_functions_check_their_own_arguments(impl, rng):
    lib, text, out = rating._lib(), some_text(rng, 2, 40, (3, 2, 5)), (C.c_double * 3)()
    kernels, matrices = rating._tables(impl)
    b, (asking, _, held) = odd(rng, 2, 40), some_asking(rng, 2, 17, 5, 2)
    for name, broken in (
        ("p0", None), ("u", None), ("following", None), ("vocab", 0), ("rank", 0), ("rank", 65),
        ("ends", (C.c_uint64 * 3)(5, 3, 10)), ("vocab", int(text.following.max())),
    ):  # fmt: skip
        spec = type(text._spec).from_buffer_copy(text._spec)
        setattr(spec, name, broken)
        rc = lib.rvm_distance(kernels, C.byref(spec), b.ctypes.data, 0.5, out)
        assert rc == BAD_ARGUMENT, (name, broken)
    memory, beyond = odd(rng, 400), np.int32([0, 17])
    p, answers, good = memory.ctypes.data, some_answers(rng, 2, 17), asking._spec
    one, rule = rating._Rating(p, p, p, 1.0, 1.0), RULE.spec
    assert lib.rvm_asking_scratch(None, 2) == lib.rvm_asking_scratch(C.byref(good), 65) == 0
    for name, broken in (
        ("precision", None),
        ("features", None),
        ("ends", None),
        ("ends", beyond.ctypes.data),
    ):
        spec = type(good).from_buffer_copy(good)
        setattr(spec, name, broken)
        assert lib.rvm_asking_scratch(C.byref(spec), 2) == 0, (name, broken)

    def call_asked(spec=good, rule=rule, text=answers._spec, rank=2):
        args = kernels, matrices, C.byref(spec), rule and C.byref(rule), C.byref(text), 1.0
        return lib.rvm_asked(*args, held.ctypes.data, rank, p, p)

    def call_rated(one, rank=2):
        args = kernels, matrices, C.byref(good), C.byref(rule), C.byref(answers._spec), 1.0
        return lib.rvm_rated(*args, held.ctypes.data, one and C.byref(one), 1e8, rank, p, p, p)

    wide = type(answers._spec).from_buffer_copy(answers._spec)
    wide.vocab = 17
    no_rest = rating._Rating(p, p, None, 1.0, 1.0)
    for rc in (
        call_asked(spec), call_asked(rule=None), call_asked(text=text._spec), call_asked(text=wide),
        call_asked(rank=0), call_asked(rank=65), call_rated(None), call_rated(no_rest), call_rated(one, 0),
        call_rated(one, 65), call_rated(rating._Rating(None, p, p, 1.0, 1.0)),
    ):  # fmt: skip
        assert rc == BAD_ARGUMENT


def test_an_unknown_implementation_is_named(impl, rng):
    with pytest.raises(LibraryError, match="no implementation 'sse9'"):
        some_text(rng, 2, 40, (3, 2, 5)).distance(odd(rng, 2, 40), 1.0, "sse9")
