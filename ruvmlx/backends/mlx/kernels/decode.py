"""This module computes the attention of one new token per sequence over the KV pages of all tiers. Two
kernels run one after the other: attend_decode (mostly attend_decode_matrix on CUDA), then attend_merge.

q, q_rotated: float32 [B, n_heads, D]. q_rotated = rotate(q), for the keys of tiers that are rotated. opened:
    uint8 [B, n_kv_heads, bytes of a hot page], the last hot page of each sequence. The kernels do not read
    the copies of these last pages in the pool.

For a model with ALiBi, the page table has slopes. Then a score is q . k / sqrt(D) + slope * (key's position -
query's position), and the first kernel is a variant whose name ends in _alibi.
"""

from dataclasses import replace
from itertools import product

from ruvmlx.platform.mx import mx
from ruvmlx.tiers import HOT, TIERS

from . import pages
from .pages import GPUPageTable, Pools
from .rope_append import Turned
from .source import FLOATS, HEAD_DIMS, Kernel

# The template values of the kernels, in pairs: head size, number of query heads in a threadgroup
# (pages.shared_heads).
SHARED = [(d, g) for d in HEAD_DIMS for g in range(1, pages.MAX_SHARED + 1) if g == pages.shared_heads(g, d)]

ATTEND = Kernel(
    "attend_decode",
    (
        ("q", "float"),
        ("q_rotated", "float"),
        ("params", "int"),
        ("pages", "int"),
        *pages.POOLS,
        ("open", "uchar"),
    ),
    (("o", "float"), ("ml", "float")),
    ("D", "G"),
    threads=128,
    headers=("pages.h", "attend.h"),
    values=tuple(SHARED),
)
MATRIX = replace(
    ATTEND,
    name="attend_decode_matrix",
    headers=("pages.h", "attend_matrix.h"),
    values=tuple((d, g) for d, g in SHARED if d in (64, 128)),
)


def _with_slopes(kernel: Kernel) -> Kernel:
    """Return the kernel for models with ALiBi: the same body, with slopes."""
    inputs = (*kernel.inputs, ("slopes", "float"))
    return replace(kernel, name=f"{kernel.name}_alibi", inputs=inputs, option="ALIBI")


WITH_SLOPES = {kernel: _with_slopes(kernel) for kernel in (ATTEND, MATRIX)}
MERGE = Kernel(
    "attend_merge",
    (("o", "float"), ("ml", "float"), ("params", "int")),
    (("out", "T"),),
    ("D", "T"),
    threads=256,
    headers=("pages.h", "attend.h"),
    values=tuple(product(HEAD_DIMS, FLOATS)),
)


def attend(new: Turned, pools: Pools, table: GPUPageTable, dtype: mx.Dtype) -> mx.array:
    """Return softmax(q . k / sqrt(D) + ALiBi's bias) v [B, n_heads, D] in `dtype`. The result is zeros if no
    token is visible."""
    run = attend_gpu if table.on_gpu else attend_ops
    return run(new.q, new.q_rotated, pools, new.open, table, dtype)


def attend_gpu(
    q: mx.array,
    q_rotated: mx.array,
    pools: Pools,
    opened: mx.array,
    table: GPUPageTable,
    dtype: mx.Dtype = mx.float32,
    run=Kernel.__call__,
    matrix: bool | None = None,
) -> mx.array:
    """Run the attention on the GPU.

    run: `run(kernel, inputs, shapes, groups, templates)` runs one kernel; the tests pass a simulator
    matrix: True: use the GPU's matrix units (only for CUDA, with D = 64 or 128); None: use the matrix units
        if possible
    """
    if matrix is None:
        matrix = mx.cuda.is_available() and q.shape[-1] in (64, 128)
    b, heads, dim = q.shape
    rows = b * heads * table.splits
    groups = (table.splits, heads // table.shared, b)
    inputs = [q, q_rotated, table.params, table.pages, *pools, opened]
    # MLX passes an array of fewer than 8 elements to a Metal kernel in another address space, so each array
    # has at least 8 elements.
    shapes = [(rows, dim), (max(2 * rows, 8),)]
    kernel = MATRIX if matrix else ATTEND
    if table.slopes is not None:
        kernel, inputs = WITH_SLOPES[kernel], [*inputs, table.slopes]
    parts = run(kernel, inputs, shapes, groups, (dim, table.shared))
    return run(MERGE, [*parts, table.params], [(b, heads, dim)], (b * heads, 1, 1), (dim, dtype))[0]


def attend_ops(
    q: mx.array,
    q_rotated: mx.array,
    pools: Pools,
    opened: mx.array,
    table: GPUPageTable,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """Return the result of `attend_gpu`, computed in plain float32 MLX, one sequence at a time (the twin)."""
    out = [_attend_one(q[i], q_rotated[i], pools, opened[i], table, i) for i in range(q.shape[0])]
    return mx.stack(out).astype(dtype)


def _attend_one(
    q: mx.array, q_rotated: mx.array, pools: Pools, opened: mx.array, table: GPUPageTable, i: int
) -> mx.array:
    """Return the attention output [n_heads, D] of one sequence's queries [n_heads, D]: compute the scores
    over the pages of all tiers, one softmax, then the sum of the values."""
    view, n_kv = table.views[i], table.n_kv_heads
    if view.first >= view.n_tokens:
        return mx.zeros_like(q)
    q, q_rotated = (x.reshape(n_kv, -1, x.shape[-1]) for x in (q, q_rotated))  # [n_kv, G, D]
    scores, values = [], []
    for tier, start, ids in view.visible():
        k, v = gather_pages(pools[tier], ids, tier, table.head_dim, opened if tier == HOT else None)
        token = mx.arange(start, start + k.shape[1])
        seen = (token >= view.first) & (token < view.n_tokens)
        x = (q_rotated if TIERS[tier].rotated else q) @ k.swapaxes(1, 2) * table.head_dim**-0.5
        if table.slopes is not None:
            x = x + table.slopes_of().reshape(n_kv, -1, 1) * (token - (view.n_tokens - 1))
        scores.append(mx.where(seen, x, -mx.inf))
        values.append(mx.where(seen[:, None], v, 0))
    p = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1)
    return (p @ mx.concatenate(values, axis=1)).reshape(-1, table.head_dim)


def gather_pages(
    pool: mx.array, ids: list[int], tier: int, head_dim: int, opened: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return K and V: float32 [n_kv_heads, 64 * len(ids), head_dim]. opened: a page that replaces the last
    page of `ids`; None: no page is replaced."""
    found = pool[mx.array(ids)]
    if opened is not None:
        found = mx.concatenate([found[:-1], opened.reshape(1, *found.shape[1:])])
    k, v = pages.unpack(found, tier, head_dim)  # [n, n_kv, 64, D]
    return tuple(x.swapaxes(0, 1).reshape(x.shape[1], -1, head_dim) for x in (k, v))  # type: ignore[return-value]
