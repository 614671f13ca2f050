"""This kernel works on one new token of each of B sequences: it rotates the token's queries and keys by RoPE,
and makes the open page again with the token's keys and values.

The open page is the hot page that is being filled. The open page is separate from the pool, because a kernel
cannot write into an existing array. The kernel makes a new page of 64 rows, 32 KB a head for D = 128. The
rows after the new row are zeros, because pages are written to files, and old contents of the memory must not
get into files.
"""

from itertools import product
from typing import NamedTuple

from ruvmlx.platform.mx import mx
from ruvmlx.tiers import PAGE

from .append import rope
from .demote import rotate
from .pages import GPUPageTable
from .source import FLOATS, HEAD_DIMS, Kernel

ROPE_APPEND = Kernel(
    "rope_append",
    (
        ("q", "T"),
        ("k", "T"),
        ("v", "T"),
        ("turn", "float"),
        ("open", "uchar"),
        ("params", "int"),
    ),
    (("q_out", "float"), ("q_rotated", "float"), ("open_out", "uchar")),
    ("D", "TRADITIONAL", "T"),
    threads=256,
    headers=("pages.h", "quantise.h", "rope.h"),
    values=tuple(product(HEAD_DIMS, (0, 1), FLOATS)),
)


class Turned(NamedTuple):
    """The values of the new tokens that the decode kernel needs (decode.py)."""

    q: mx.array  # float32 [B, n_heads, D]
    q_rotated: mx.array  # the same queries after `rotate`, for the tiers whose keys are rotated
    open: mx.array  # uint8 [B, n_kv_heads, 2, 64, 2 * D]: the open pages with the new rows


def rope_append(
    q: mx.array, k: mx.array, v: mx.array, turn: mx.array, opened: mx.array, table: GPUPageTable
) -> Turned:
    """Return the rotated queries and the new open pages of B sequences. q: [B, n_heads * D]; k, v: [B,
    n_kv_heads * D], not yet rotated; turn: float32 [B, D], as for `append`.

    opened: the open pages, uint8 [B, n_kv_heads, 2, 64, 2 * D]; the new token of a sequence is the last token
        of its view in `table`
    """
    run = rope_append_gpu if table.on_gpu else rope_append_ops
    return run(q, k, v, turn, opened, table)


def rope_append_gpu(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    turn: mx.array,
    opened: mx.array,
    table: GPUPageTable,
    traditional: bool = False,
    run=Kernel.__call__,
) -> Turned:
    b, heads, dim = opened.shape[0], table.n_heads, table.head_dim
    shapes = [(b, heads, dim), (b, heads, dim), opened.shape]
    # the number of blocks of 128 numbers in each head
    simdgroups, blocks = ROPE_APPEND.threads // 32, -(-dim // 128)
    groups = (-(-heads * blocks // simdgroups) + table.n_kv_heads, b, 1)
    inputs = [q, k, v, turn, opened, table.params]
    return Turned(*run(ROPE_APPEND, inputs, shapes, groups, (dim, int(traditional), q.dtype)))


def rope_append_ops(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    turn: mx.array,
    opened: mx.array,
    table: GPUPageTable,
    traditional: bool = False,
) -> Turned:
    """Return the result of `rope_append_gpu`, computed in plain MLX (the twin)."""
    b, dim = opened.shape[0], table.head_dim
    q, k = (rope(x.reshape(b, -1, dim), turn, traditional) for x in (q, k))
    rows = mx.stack([k, v.reshape(b, -1, dim).astype(mx.float32)], axis=2).astype(mx.float16)
    rows = mx.contiguous(rows).view(mx.uint8)[:, :, :, None]  # [B, n_kv_heads, 2, 1, 2 * D]
    at = mx.array([(view.n_tokens - 1) % PAGE for view in table.views]).reshape(-1, 1, 1, 1, 1)
    here = mx.arange(PAGE).reshape(1, 1, 1, PAGE, 1) == at
    before = mx.arange(PAGE).reshape(1, 1, 1, PAGE, 1) < at
    return Turned(q, rotate(q), mx.where(here, rows, mx.where(before, opened, mx.array(0, mx.uint8))))
