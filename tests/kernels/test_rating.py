"""What a rating asks for, and how far that leads: each against its float64 twin, in every implementation."""

import contextlib
import ctypes as C

import numpy as np
import pytest

from ruvmlx.kernels import micro, rating
from ruvmlx.kernels.library import BAD_ARGUMENT, LibraryError, implementations
from ruvmlx.kernels.matmul import Matrix
from ruvmlx.kernels.rating import Push, Text, evidence_block, evidence_block_ref

from .test_micro import odd

TOKEN, FEATURE = Push(1.0, 12.0, 0.0), Push(1.5, 10.0, 0.02)
pytestmark = pytest.mark.parametrize("impl", implementations())


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def some_evidence(rng, rank, n):
    evidence = odd(rng, 3, rank, n)
    evidence[1:] = np.abs(evidence[1:])
    return evidence, np.abs(odd(rng, n)) + np.float32(0.1)


@pytest.mark.parametrize("rank,a,k", [(1, 1, 1), (2, 17, 5), (2, 2048, 256), (3, 70, 33)])
def test_evidence_block(impl, rank, a, k, rng):
    evidence, precision = some_evidence(rng, rank, a + k)
    features = rng.normal(size=(a, k)).astype(np.float16)
    got = evidence_block(evidence, precision, Matrix(features), TOKEN, FEATURE, impl)
    want = evidence_block_ref(evidence, precision, features, TOKEN, FEATURE)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("at", [0, 16, 17, 21])  # of tokens, then of features
def test_evidence_block_passes_nan_on(impl, at, rng):
    evidence, precision = some_evidence(rng, 2, 22)
    evidence[0, 1, at] = np.nan
    features = Matrix(rng.normal(size=(17, 5)).astype(np.float16))
    found = evidence_block(evidence, precision, features, TOKEN, FEATURE, impl)
    assert np.isnan(found[1]).any() and np.isfinite(found[0]).all()


def some_text(rng, rank, vocab, sizes, whole=True):
    """Of so many contexts a group; whole: with all that may be left out."""
    m = sum(sizes)
    p = rng.random((m, vocab)).astype(np.float32) ** 4 + np.float32(1e-4)
    p /= p.sum(axis=1, keepdims=True)
    shares = [0.0, 0.25, 0.75]
    more = [odd(rng, rank, vocab, spread=0.1) for _ in range(2)] if whole else []
    ratio = odd(rng, m, vocab, spread=0.3) if whole else None
    following = rng.integers(0, vocab, m, dtype=np.int32)
    return Text(p, ratio, odd(rng, m, rank), following, list(zip(sizes, shares, strict=True)), *more)


@pytest.mark.parametrize("sizes", [(3, 2, 5), (4, 0, 7), (1, 1, 33), (0, 2, 5), (3, 2, 0)])
@pytest.mark.parametrize("rank,vocab", [(1, 9), (2, 2049), (3, 1025), (2, 9001)])  # 9001: wide
@pytest.mark.parametrize("whole", [True, False])
def test_distance(impl, sizes, rank, vocab, whole, rng):
    text, b = some_text(rng, rank, vocab, sizes, whole), odd(rng, rank, vocab)
    for s in (0.0, 0.3, -1.0):
        want = text.distance_ref(b, s)
        np.testing.assert_allclose(text.distance(b, s, impl), want, rtol=2e-5, atol=2e-5)
        assert whole == (want[2] != 0)


def test_answers_alone_have_no_rise(impl, rng):
    p, u, b = np.full((4, 9), 1 / 9, np.float32), odd(rng, 4, 2), odd(rng, 2, 9)
    text = Text(p, None, u, np.zeros(4, np.int32), [(4, 0.0)])
    kl, rise, slope = text.distance(b, 0.5, impl)
    assert kl == pytest.approx(micro.kl_to_frozen_ref(p, u, b, 0.5)[0], abs=2e-6) and rise == slope == 0


def test_the_same_contexts_read_otherwise(impl, rng):
    text, b, u = some_text(rng, 2, 40, (3, 2, 5)), odd(rng, 2, 40), odd(rng, 10, 2)
    other = text.read_as(u)
    same = Text(text.p0, text.log_ratio, u, text.following, text.groups)
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
    for broken, expected in (
        (lambda: Text(p, None, odd(rng, 5, 2), at, [(4, 0.0)]), "u has shape"),
        (lambda: Text(p, p[:2], u, at, [(4, 0.0)]), "log_ratio has shape"),
        (lambda: Text(p, None, u, at[:2], [(4, 0.0)]), "following has shape"),
        (lambda: Text(p, None, u, at + 9, [(4, 0.0)]), "of 9 columns"),
        (lambda: Text(p, None, u, at, [(3, 0.0)]), "expected at most 3, 4 in all"),
        (lambda: Text(p, None, u, at, [(4, 0.0)], odd(rng, 2, 8)), "rest has shape"),
        (lambda: Text(p, None, u, at, [(4, 0.0)]).distance(odd(rng, 2, 8), 1.0, impl), "lora_b has shape"),
        (lambda: block_of(rng, 7, impl), "precision has shape"),
        (lambda: block_of(rng, 22, impl, 21), "evidence has shape"),
    ):
        with pytest.raises(ValueError, match=expected):
            broken()


def test_the_c_functions_check_their_own_arguments(impl, rng):
    lib, text, out = rating._lib(), some_text(rng, 2, 40, (3, 2, 5)), (C.c_double * 3)()
    kernels, matrices = rating._tables(impl)
    b, features = odd(rng, 2, 40), Matrix(rng.normal(size=(17, 5)).astype(np.float16))
    for name, broken in (
        ("p0", None), ("u", None), ("following", None), ("vocab", 0), ("rank", 0), ("rank", 65),
        ("ends", (C.c_uint64 * 3)(5, 3, 10)), ("vocab", int(text.following.max())),
    ):  # fmt: skip
        spec = type(text._spec).from_buffer_copy(text._spec)
        setattr(spec, name, broken)
        rc = lib.rvm_distance(kernels, C.byref(spec), b.ctypes.data, 0.5, out)
        assert rc == BAD_ARGUMENT, (name, broken)
    assert lib.rvm_evidence_scratch(None, 2) == lib.rvm_evidence_scratch(features.memory.ctypes.data, 65) == 0
    p = odd(rng, 400).ctypes.data
    args = kernels, matrices, p, p, features.memory.ctypes.data, p, 65, p, p
    assert lib.rvm_evidence_block(*args) == BAD_ARGUMENT


def test_an_unknown_implementation_is_named(impl, rng):
    with pytest.raises(LibraryError, match="no implementation 'sse9'"):
        some_text(rng, 2, 40, (3, 2, 5)).distance(odd(rng, 2, 40), 1.0, "sse9")


def block_of(rng, n, impl, evidence=22):
    features = Matrix(rng.normal(size=(17, 5)).astype(np.float16))
    return evidence_block(odd(rng, 3, 2, evidence), odd(rng, n), features, TOKEN, FEATURE, impl)
