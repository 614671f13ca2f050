"""Attention of a chunk over the tiers and itself: kernel, twin, float64."""

import numpy as np
import pytest

from ruvmlx.backends.mx import mx
from ruvmlx.kernels.metal import demote, pages, prefill

from . import make

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
}


def problem(case, d, group, n_kv=2):
    (cold, warm, hot), tokens, window = case
    rng = np.random.default_rng(d * group + tokens)
    made = make.cache(rng, d, n_kv, [(cold, warm, hot, 0)])
    q, q_cold = rng.normal(size=(2, tokens, n_kv * group, d)).astype(np.float32)
    rows = rng.normal(size=(n_kv, 2, tokens, d)).astype(np.float16)
    new = prefill.chunk(made.views[0], tokens, n_kv * group, n_kv, d, window)
    return q, q_cold, made, rows, new


def expected(q, q_cold, made, rows, window):
    view, group = made.views[0], q.shape[1] // rows.shape[0]
    out, old = np.zeros(q.shape), view.n_tokens
    for h in range(q.shape[1]):
        k, v = (
            np.concatenate(
                [x[0][h // group][:old].reshape(-1, q.shape[2]), rows[h // group, i].astype(float)]
            )
            for i, x in enumerate((made.keys, made.values))
        )
        for t in range(len(q)):
            see = slice(max(old + t + 1 - window, 0) if window else 0, old + t + 1)
            cold = np.arange(len(k)) < len(view.cold) * 64
            x = np.where(cold, k @ q_cold[t, h].astype(float), k @ q[t, h].astype(float))[see] / np.sqrt(
                q.shape[2]
            )
            p = np.exp(x - x.max())
            out[t, h] = p / p.sum() @ v[see]
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("d,group", [(64, 1), (80, 3), (128, 4)])
def test_kernel_and_twin(run, case, d, group):
    q, q_cold, made, rows, new = problem(case, d, group)
    want, fresh = expected(q, q_cold, made, rows, new.window), rows.view(np.uint8)
    got = prefill.attend_prefill_gpu(q, q_cold, made.pools, fresh, new, run)
    np.testing.assert_allclose(got, want, atol=3e-5)
    pools = [mx.array(p) for p in made.pools]
    twin = prefill.attend_prefill_ops(mx.array(q), mx.array(q_cold), pools, mx.array(fresh), new)
    np.testing.assert_allclose(twin, want, atol=1e-4)


@pytest.mark.parametrize("d", [64, 80, 128])
def test_demoted_pages_still_answer(d):
    """Through the function that the backend calls: it rotates the queries of cold pages itself."""
    q, _, made, rows, _ = problem(((0, 0, 150), 7, 0), d, 3)
    q *= 0.3
    hot, ids = mx.array(made.pools[pages.HOT]), made.views[0].hot
    cold = demote.demote_cold(demote.demote_warm(hot, ids[:2], d), [0, 1], d)
    new = prefill.chunk(pages.View([0, 1], [], ids[2:], 150), 7, 6, 2, d)
    got = prefill.attend(mx.array(q), [cold, cold, hot], mx.array(rows.view(np.uint8)), new)
    want = expected(q, q, made, rows, 0)
    assert np.linalg.norm(got - want) < 0.08 * np.linalg.norm(want)  # 0.48 and more if nothing rotates them


def test_eight_heads_to_a_kv_head(run):
    q, q_cold, made, rows, new = problem(((1, 1, 10), 6, 0), 128, 8)
    got = prefill.attend_prefill_gpu(q, q_cold, made.pools, rows.view(np.uint8), new, run)
    np.testing.assert_allclose(got, expected(q, q_cold, made, rows, 0), atol=3e-5)


def test_order_of_threads_does_not_matter(run):
    q, q_cold, made, rows, new = problem(((1, 1, 70), 5, 40), 80, 3, n_kv=1)
    results = set()
    for seed in range(20):
        seeded = lambda *a, seed=seed: run(*a, seed=seed)  # noqa: E731
        out = prefill.attend_prefill_gpu(q, q_cold, made.pools, rows.view(np.uint8), new, seeded)
        results.add(out.tobytes())
    assert len(results) == 1
