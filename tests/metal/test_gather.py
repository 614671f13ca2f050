"""A prompt's attention over the tiers and itself: the gathering kernel, its twin, and float64."""

import numpy as np
import pytest

from ruvmlx.backends.mlx.kernels import demote, gather, pages
from ruvmlx.platform.mx import mx

from . import make
from .test_decode import slopes_of

# (cold pages, warm pages, hot tokens), new tokens, window
CASES = {
    "an empty cache": ((0, 0, 0), 33, 0),
    "one token on an empty cache": ((0, 0, 0), 1, 0),
    "one token": ((1, 1, 70), 1, 0),
    "all tiers": ((2, 1, 100), 37, 0),
    "whole hot pages": ((0, 1, 128), 65, 0),
    "no hot page": ((1, 2, 0), 5, 0),
    "window inside the chunk": ((1, 1, 70), 40, 9),
    "window over a tier's edge": ((3, 1, 20), 40, 90),
    "window of one": ((1, 0, 3), 35, 1),
    "window wider than all": ((1, 1, 3), 35, 4000),
}


def problem(case, d, group, n_kv=2, slopes=None):
    (cold, warm, hot), tokens, window = case
    rng = np.random.default_rng(d * group + tokens)
    made = make.cache(rng, d, n_kv, [(cold, warm, hot, 0)])
    q = rng.normal(size=(n_kv * group, tokens, d)).astype(np.float32)
    rows = rng.normal(size=(n_kv, 2, tokens, d)).astype(np.float16)
    return q, made, rows, gather.chunk(made.views[0], tokens, n_kv * group, n_kv, d, window, slopes)


def unrotated(made, i, d):
    """Keys (0) or values (1) as the model made them, float64 [n_kv, tokens, D]."""
    x = (made.keys, made.values)[i][0].copy()
    if not made.views[0].n_tokens:
        return np.zeros((len(x), 0, d))
    x = x[:, : made.views[0].n_tokens]
    cold = len(made.views[0].by_tier[0]) * 64
    if i == 0 and cold:
        x[:, :cold] = np.array(demote.rotate(mx.array(x[:, :cold].astype(np.float32))))
    return x


def wanted_attention(q, made, rows, window, slopes=None):
    old, group, d = made.views[0].n_tokens, q.shape[0] // rows.shape[0], q.shape[2]
    k, v = (np.concatenate([unrotated(made, i, d), rows[:, i].astype(float)], axis=1) for i in (0, 1))
    out = np.zeros(q.shape)
    for h in range(len(q)):
        for t in range(q.shape[1]):
            see = slice(max(old + t + 1 - window, 0) if window else 0, old + t + 1)
            x = k[h // group, see] @ q[h, t].astype(float) / np.sqrt(d)
            if slopes is not None:
                x = x + float(slopes[h]) * np.arange(1 - len(x), 1)
            p = np.exp(x - x.max())
            out[h, t] = p / p.sum() @ v[h // group, see]
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("d,group", [(64, 1), (80, 3), (128, 4), (256, 2)])
def test_kernel_and_twin(run, case, d, group, monkeypatch):
    """Whole, and a KV head at a time."""
    q, made, rows, new = problem(case, d, group)
    pools, fresh = [mx.array(p) for p in made.pools], mx.array(rows.view(np.uint8))
    want = wanted_attention(q, made, rows, new.window)
    monkeypatch.setattr(gather, "BLOCK", 1)
    assert problem(case, d, group)[3].heads == 1
    for some in (new, problem(case, d, group)[3]):
        if some.total > some.tokens:
            for head in range(0, 2, some.heads):
                kernel = gather.gather_gpu(made.pools, fresh, some, head, run)
                twin = gather.gather_ops(pools, fresh, some, head)
                np.testing.assert_allclose(kernel, twin, rtol=1e-3, atol=2e-3)
                assert np.isfinite(np.array(kernel)).all()
        out = gather.attend(mx.array(q)[None], pools, fresh, some)[0]
        assert np.linalg.norm(np.array(out) - want) < 2e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("d,group", [(64, 1), (80, 3), (128, 4)])
def test_slopes_in_the_mask(case, d, group, monkeypatch):
    """ALiBi's biases of a prompt, whole, and a KV head at a time."""
    slopes = slopes_of(2 * group)
    q, made, rows, whole = problem(case, d, group, slopes=slopes)
    pools, fresh = [mx.array(p) for p in made.pools], mx.array(rows.view(np.uint8))
    want = wanted_attention(q, made, rows, whole.window, slopes)
    assert whole.heads == 2
    monkeypatch.setattr(gather, "BLOCK", 1)
    one = problem(case, d, group, slopes=slopes)[3]
    assert one.heads == 1
    for some in (whole, one):
        out = gather.attend(mx.array(q)[None], pools, fresh, some)[0]
        assert np.linalg.norm(np.array(out) - want) < 2e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("slopes", [None, slopes_of(8)], ids=["plain", "slopes"])
def test_16_bit_queries(run, slopes):
    """As precise as halves are."""
    q, made, rows, new = problem(CASES["all tiers"], 128, 4, slopes=slopes)
    pools, fresh = [mx.array(p) for p in made.pools], mx.array(rows.view(np.uint8))
    want = wanted_attention(q, made, rows, 0, slopes)
    for kind in (mx.float16, mx.bfloat16):
        out = gather.attend(mx.array(q)[None].astype(kind), pools, fresh, new)
        assert out.dtype == kind
        error = np.array(out[0].astype(mx.float32)) - want
        assert np.linalg.norm(error) < (2e-3 if kind == mx.float16 else 6e-3) * np.linalg.norm(want)


def test_pages_before_the_window_are_not_read(run):
    """They may be gone: any number stands for them."""
    _, made, rows, new = problem(CASES["window over a tier's edge"], 64, 3)
    assert new.first == 64 * 2 and new.total == 4 * 64 + 20 + 40 - new.first
    for pool, ids in zip(made.pools, (made.views[0].by_tier[0][:2], [], []), strict=True):
        pool[ids] = 255
    fresh = mx.array(rows.view(np.uint8))
    kernel = gather.gather_gpu(made.pools, fresh, new, 0, run)
    assert np.isfinite(np.array(kernel)).all()


def test_bytes_in_flight_are_bounded():
    """131,072 tokens of an 8B model: two heads at a time, 134 MB; 2,048 tokens: all eight."""
    pages_of = lambda n: pages.SequencePages([range(n // 64), [], []], n)  # noqa: E731
    long, short = (gather.chunk(pages_of(n), 2048, 32, 8, 128) for n in (129_024, 2048))
    assert long.heads == 1 and short.heads == 8
    assert 4 * 128 * long.total * long.heads <= max(gather.BLOCK, 4 * 128 * long.total)


def test_masks_with_slopes_are_bounded():
    """2,048 tokens of an MPT 7B after 2,048 others: a head at a time, with a mask of 34 MB."""
    view = pages.SequencePages([range(32), [], []], 2048)
    new = gather.chunk(view, 2048, 32, 32, 128, slopes=slopes_of(32))
    assert new.heads == 1
    assert 4 * (2048 + 128) * new.total * new.heads < gather.BLOCK


def test_order_of_threads_does_not_matter(run):
    _, made, rows, new = problem(CASES["all tiers"], 80, 3, n_kv=1)
    results = set()
    for seed in range(20):
        seeded = lambda *a, seed=seed: run(*a, seed=seed)  # noqa: E731
        fresh = mx.array(rows.view(np.uint8))
        results.add(np.array(gather.gather_gpu(made.pools, fresh, new, 0, seeded)).tobytes())
    assert len(results) == 1
