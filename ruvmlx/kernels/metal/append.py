"""New keys, turned by RoPE, and new values as rows of the current hot page.

MLX kernels write to fresh arrays, so this makes the rows and the cache places them: with the hot pool held
as uint8 [pages, n_kv_heads, 2, 64, 2 * D] (the same bytes), `pool[page, :, :, at : at + T] = rows` is one
slice update.
"""

from ruvmlx.backends.mx import mx

from .pages import PARAMS
from .source import Kernel, on_gpu

APPEND = Kernel(
    "append",
    (("k", "float"), ("v", "float"), ("turn", "float"), ("params", "int")),
    (("out", "uchar"),),
    ("D", "TRADITIONAL"),
    threads=64,
)


def append(k: mx.array, v: mx.array, turn: mx.array, traditional: bool = False) -> mx.array:
    """k, v: [T, n_kv_heads, D], not yet turned; turn: float32 [T, D] -> rows uint8 [n_kv_heads, 2, T, 2 * D].

    turn: the cosines of a position's D/2 angles, then their sines.
    """
    run = append_gpu if on_gpu() else append_ops
    return run(k.astype(mx.float32), v.astype(mx.float32), turn, traditional)


def append_gpu(k: mx.array, v: mx.array, turn: mx.array, traditional: bool, run=Kernel.__call__) -> mx.array:
    tokens, n_kv, dim = k.shape
    params = [0] * PARAMS
    params[7], params[10] = n_kv, tokens
    inputs = [k, v, turn, mx.array(params, mx.int32)]
    return run(APPEND, inputs, [(n_kv, 2, tokens, 2 * dim)], (tokens, n_kv, 1), (dim, int(traditional)))[0]


def append_ops(k: mx.array, v: mx.array, turn: mx.array, traditional: bool = False) -> mx.array:
    """The twin."""
    rows = mx.stack([rope(k, turn, traditional), v.astype(mx.float32)]).astype(mx.float16)  # [2, T, n_kv, D]
    return mx.contiguous(rows.transpose(2, 0, 1, 3)).view(mx.uint8)


def rope(x: mx.array, turn: mx.array, traditional: bool = False) -> mx.array:
    """Pairs (x_i, x_{i + D/2}), or (x_2i, x_2i+1) if traditional, turned.  x: [T, heads, D]; turn: [T, D]"""
    dim = x.shape[-1]
    cosine, sine = turn[:, None, : dim // 2], turn[:, None, dim // 2 :]
    x = x.astype(mx.float32)
    a, b = (x[..., 0::2], x[..., 1::2]) if traditional else (x[..., : dim // 2], x[..., dim // 2 :])
    turned = [a * cosine - b * sine, b * cosine + a * sine]
    return mx.stack(turned, axis=-1).reshape(x.shape) if traditional else mx.concatenate(turned, axis=-1)
