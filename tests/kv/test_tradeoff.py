"""The simulation rounds as the pages do and moves them when the policy does; needles are what they say."""

import numpy as np
import pytest

from ruvmlx.backends.mlx.kernels.demote import demote_ops, rotate
from ruvmlx.backends.mlx.kernels.pages import page_bytes, unpack
from ruvmlx.kv.policy import TIERED
from ruvmlx.platform.mx import mx
from ruvmlx.tiers import COLD, HOT, WARM

from .texts import needle
from .tradeoff import CHOSEN, TOKENS, eight_bits, half


@pytest.mark.parametrize("head_dim", [64, 80])
def test_rounds_as_pages_do(head_dim):
    """Warm numbers exactly; cold ones too, K up to the rotation back."""
    k, v = half(mx.random.normal((2, 3, 64, head_dim), key=mx.random.key(1)) * 3)
    hot = mx.stack([k, v], axis=1).astype(mx.float16).reshape(3, -1).view(mx.uint8)
    warm = demote_ops(hot, head_dim, WARM)
    warm_k, warm_v = unpack(warm, WARM, head_dim)
    np.testing.assert_array_equal(eight_bits(k), warm_k)
    np.testing.assert_array_equal(eight_bits(v), warm_v)
    cold_k, cold_v = unpack(demote_ops(warm, head_dim, COLD), COLD, head_dim)
    np.testing.assert_allclose(rotate(CHOSEN.k(warm_k)), cold_k, atol=1e-5)
    np.testing.assert_array_equal(CHOSEN.v(warm_v), cold_v)


def test_moves_pages_when_the_policy_does():
    for offset in range(0, 5000, 64):
        old, cold = CHOSEN.pages(offset)
        assert (cold, old) == TIERED.counts(offset)


def test_share_of_bytes_is_the_policys():
    bytes_of = tuple(page_bytes(tier, 64) for tier in (COLD, WARM, HOT))
    assert CHOSEN.bytes_share(64) == pytest.approx(TIERED.bytes(TOKENS, bytes_of) / (TOKENS * 4 * 64))


@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_needle_is_in_the_prompt_once(tiny, depth):
    ids, answer = needle(tiny.tokenizer, 3000, depth, "Porto")
    text = tiny.tokenizer.decode(ids)
    assert 2000 < len(ids) <= 3000
    assert text.count(answer) == 1 == text.count(f"The secret number of Porto is {answer}.")
    assert text.index(answer) / len(text) == pytest.approx(depth, abs=0.25)
