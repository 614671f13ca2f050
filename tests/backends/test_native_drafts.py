"""Drafted steps of the native backend: the bits of single steps, and no trace of rejected tokens."""

import numpy as np
import pytest

from ruvmlx.backends.base import Drafting
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.kernels.matmul import implementations as matmul_implementations
from ruvmlx.kv.policy import F16, TierPolicy
from ruvmlx.models.load import load_model
from tests.models.make_models import make_safetensors_model

from .test_agreement import SHAPES, SIZES, STORED, TOKENS

POLICIES = {"f16": F16, "tiered": TierPolicy("tiered", (64, 128))}


def open_backend(tmp_path, impl=None, **options):
    model = load_model(str(make_safetensors_model(tmp_path / "m", **options)))
    return NativeBackend(model, threads=2, chunk=64, impl=impl)


def assert_steps_equal(backend, policy, start, length):
    """Check `length` drafted tokens after `start` tokens, beside single steps."""
    one, other, tokens = backend.new_cache(policy), backend.new_cache(policy), TOKENS * (1 + start // 100)
    for cache in (one, other):
        backend.prefill(tokens[:start], cache)
    token, *draft = tokens[start : start + 1 + length]
    steps = backend.decode_drafted(token, draft, other)
    assert other.offset == start + 1
    for i, step in enumerate(steps):
        want = backend.decode(tokens[start + i], one)
        np.testing.assert_array_equal(step.logits, want.logits)
        np.testing.assert_array_equal(step.hidden, want.hidden)
    return len(steps) - 1


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("shape", SHAPES)
def test_drafted_steps_have_the_bits_of_single_steps(tmp_path, shape, stored):
    backend = open_backend(tmp_path, **SHAPES[shape], **STORED[stored])
    assert isinstance(backend, Drafting)
    for length in (1, 2, 4, 7):
        assert assert_steps_equal(backend, F16, 71, length) == length


@pytest.mark.parametrize("impl", matmul_implementations())
def test_every_instruction_set_gives_the_bits_of_single_steps(tmp_path, impl):
    backend = open_backend(tmp_path, impl, **SIZES, **STORED["4-bit"])
    assert assert_steps_equal(backend, F16, 70, 7) == 7


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("start", [56, 60, 63, 64])
def test_no_draft_crosses_the_end_of_a_page(tmp_path, policy, start):
    """The first token may begin a page. The draft ends with the page."""
    backend = open_backend(tmp_path, **SIZES, **STORED["4-bit"])
    assert assert_steps_equal(backend, POLICIES[policy], start, 7) == min(7, 63 - start % 64)


def test_no_draft_crosses_the_edge_of_the_sliding_window(tmp_path):
    """The token at position 2174 is the first that no longer sees page 1. The draft ends before it."""
    backend = open_backend(tmp_path, **SIZES, **STORED["4-bit"], sliding_window=2047)
    assert assert_steps_equal(backend, F16, 2167, 7) == 6


def test_a_draft_before_the_sliding_window_is_full_ends_only_with_its_page(tmp_path):
    backend = open_backend(tmp_path, **SIZES, **STORED["4-bit"], sliding_window=2047)
    assert assert_steps_equal(backend, F16, 56, 7) == 7


@pytest.mark.parametrize("policy", POLICIES)
def test_rejected_tokens_leave_no_trace(tmp_path, policy):
    """Every draft is wrong, or right in part. The cache goes on with the same bits."""
    backend = open_backend(tmp_path, **SIZES, **STORED["4-bit"])
    one, other = (backend.new_cache(POLICIES[policy]) for _ in range(2))
    for cache in (one, other):
        backend.prefill(TOKENS[:9], cache)
    at = 9
    while at < 100:
        right, wrong = TOKENS[at + 1 : at + 1 + at % 4], [5, 6, 7]
        steps = backend.decode_drafted(TOKENS[at], [*right, *wrong], other)
        for i, step in enumerate(steps[: 1 + len(right)]):
            if i:
                backend.accept(other)
            np.testing.assert_array_equal(step.logits, backend.decode(TOKENS[at], one).logits)
            at += 1
        assert one.offset == other.offset == at
    assert one.stats() == other.stats()
    np.testing.assert_array_equal(backend.decode(1, other).logits, backend.decode(1, one).logits)
