"""Random caches in all three tiers, and what attention over them must give, in float64 NumPy.

Pages are packed here by NumPy code of its own, from the layouts in metal_kernels/README.md.
"""

from dataclasses import dataclass

import numpy as np

from ruvmlx.backends.mlx.kernels.pages import SequencePages, page_bytes
from ruvmlx.tiers import COLD, HOT, PAGE, TIERS, WARM

F16, F32 = np.float16, np.float32


def pack(tier: int, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """k, v: float32 [64, D] -> the page's bytes. k of a cold page: as it was rotated."""
    if tier == HOT:
        parts = [k.astype(F16), v.astype(F16)]
    elif tier == WARM:
        (kq, ks), (vq, vs) = eight_bit(k), eight_bit(v)
        parts = [kq, vq, ks, vs]
    else:
        (kq, ks, kb), (vq, vs, vb) = four_bit(k), four_bit(v)
        parts = [packed(kq), packed(vq), ks, kb, vs, vb]
    out = np.concatenate([np.ascontiguousarray(p).view(np.uint8).reshape(-1) for p in parts])
    assert out.size == page_bytes(tier, k.shape[1])
    return out


def eight_bit(x: np.ndarray):
    """[64, D] -> q int8 [64, D], scale f16 [64]"""
    s = (np.abs(x).max(axis=1).astype(F32) / F32(127)).astype(F16)
    wide = np.where(s == 0, 1, s).astype(F32)[:, None]
    q = np.where(s[:, None] == 0, 0, np.clip(np.rint(x.astype(F32) / wide), -127, 127))
    return q.astype(np.int8), s


def four_bit(x: np.ndarray):
    """[64, D] -> q of 0..15 [64, D], scale and bias f16 [64]"""
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    s, b = ((high - low) / F32(15)).astype(F16), low.astype(F16)
    s[s == 0], b[b == 0] = 0, 0  # never -0
    wide = np.where(s == 0, 1, s).astype(F32)
    q = np.where(s == 0, 0, np.clip(np.rint((x - b.astype(F32)) / wide), 0, 15))
    return q.astype(np.uint8), s.reshape(-1), b.reshape(-1)


def packed(q: np.ndarray) -> np.ndarray:
    return q[:, 0::2] | q[:, 1::2] << 4


def unpack(tier: int, page: np.ndarray, d: int):
    """The page's bytes -> k, v float64 [64, D]"""
    n = PAGE * d
    if tier == HOT:
        k, v = page.view(F16).reshape(2, PAGE, d).astype(np.float64)
        return k, v
    if tier == WARM:
        k, v = page[: 2 * n].view(np.int8).reshape(2, PAGE, d).astype(np.float64)
        ks, vs = page[2 * n :].view(F16).reshape(2, PAGE, 1).astype(np.float64)
        return k * ks, v * vs
    kq, vq = (page[i * n // 2 : (i + 1) * n // 2].reshape(PAGE, d // 2) for i in (0, 1))
    k, v = (np.stack([q & 15, q >> 4], axis=-1).reshape(PAGE, d).astype(np.float64) for q in (kq, vq))
    tail = page[n:].view(F16).astype(np.float64)
    ks, kb, vs, vb = tail.reshape(4, PAGE, 1)
    return k * ks + kb, v * vs + vb


@dataclass
class Cache:
    """Sequences in one set of pools. keys, values: per sequence float64 [n_kv, pages * 64, D], as stored."""

    pools: list[np.ndarray]
    views: list[SequencePages]
    keys: list[np.ndarray]
    values: list[np.ndarray]


def numbers(rng, tokens: int, d: int) -> np.ndarray:
    """Like keys of a real model: some channels are far off centre, one token is large, one is zero."""
    x = rng.normal(size=(tokens, d)) * rng.uniform(0.2, 2, d) + rng.normal(size=d) * (rng.random(d) < 0.2) * 4
    x[rng.integers(tokens)] *= 3
    x[rng.integers(tokens)] = 0
    return x.astype(F32)


def cache(rng, d: int, n_kv: int, sequences) -> Cache:
    """sequences: (cold pages, warm pages, hot tokens, first visible token) of each."""
    counts = [
        [c for c, *_ in sequences],
        [w for _, w, *_ in sequences],
        [-(-h // PAGE) for _, _, h, _ in sequences],
    ]
    # Ids are shuffled and one page more than needed lies about, full of NaN where the format has it.
    pools = [np.full((sum(n) + 1, n_kv, page_bytes(tier, d)), 255, np.uint8) for tier, n in enumerate(counts)]
    free = [list(rng.permutation(sum(n) + 1)) for n in counts]
    views, keys, values = [], [], []
    for i, (n_cold, n_warm, hot, first) in enumerate(sequences):
        ids = [[int(free[tier].pop()) for _ in range(counts[tier][i])] for tier in range(3)]
        k, v = [[] for _ in range(n_kv)], [[] for _ in range(n_kv)]
        for tier in range(len(TIERS)):
            for page_id in ids[tier]:
                for head in range(n_kv):
                    page = pack(tier, numbers(rng, PAGE, d), numbers(rng, PAGE, d))
                    pools[tier][page_id, head] = page
                    for out, x in zip((k, v), unpack(tier, page, d), strict=True):
                        out[head].append(x)
        if hot % PAGE:  # rows that hold no token are NaN
            last = pools[HOT][ids[HOT][-1]].view(F16).reshape(n_kv, 2, PAGE, d)
            last[:, :, hot % PAGE :] = np.nan
        views.append(SequencePages(ids, (n_cold + n_warm) * PAGE + hot, first))
        keys.append(np.array([np.concatenate(x) if x else np.zeros((0, d)) for x in k]))
        values.append(np.array([np.concatenate(x) if x else np.zeros((0, d)) for x in v]))
    return Cache(pools, views, keys, values)


def opened(made: Cache) -> np.ndarray:
    """The last hot page of each sequence, uint8 [sequences, n_kv, bytes]; NaN for one without."""
    pool = made.pools[HOT]
    none = np.full(pool.shape[1:], 255, np.uint8)
    return np.array([pool[view.by_tier[HOT][-1]] if view.by_tier[HOT] else none for view in made.views])


def attention(q, q_rotated, made: Cache, i: int, slopes: np.ndarray | None = None) -> np.ndarray:
    """q, q_rotated: [n_heads, D]; slopes: ALiBi's, [n_heads] -> float64 [n_heads, D] for sequence i."""
    view, k, v = made.views[i], made.keys[i], made.values[i]
    out = np.zeros(q.shape)
    for h in range(q.shape[0]):
        kv = h * k.shape[0] // q.shape[0]
        x = np.where(
            np.arange(k.shape[1]) < len(view.by_tier[COLD]) * PAGE,
            k[kv] @ q_rotated[h].astype(float),
            k[kv] @ q[h].astype(float),
        )
        x = x[view.first : view.n_tokens] / np.sqrt(q.shape[1])
        if slopes is not None:  # the query is the last token, so the distances end with 0
            x = x + float(slopes[h]) * np.arange(1 - len(x), 1)
        if x.size:
            p = np.exp(x - x.max())
            out[h] = p / p.sum() @ v[kv][view.first : view.n_tokens]
    return out
