"""This kernel makes rows of hot pages (KV pages in float16) from a prompt's new keys, which it rotates by
RoPE, and from the new values. For a single token, the kernel of rope_append.py does this work."""

from functools import lru_cache
from itertools import product

from ruvmlx.platform.mx import mx

from .pages import params_of
from .source import FLOATS, HEAD_DIMS, Kernel, on_gpu

APPEND = Kernel(
    "append",
    (("k", "T"), ("v", "T"), ("turn", "float"), ("params", "int")),
    (("out", "uchar"),),
    ("D", "TRADITIONAL", "T"),
    threads=64,
    headers=("pages.h", "rope.h"),
    values=tuple(product(HEAD_DIMS, (0, 1), FLOATS)),
)


def append(k: mx.array, v: mx.array, turn: mx.array, traditional: bool = False) -> mx.array:
    """Return the rows of T tokens as bytes: uint8 [n_kv_heads, 2, T, 2 * D]. k, v: [T, n_kv_heads, D], not
    yet rotated; turn: float32 [T, D].

    turn: for each token, the cosines of RoPE's D/2 angles at its position, then the sines
    """
    run = append_gpu if on_gpu(k.shape[-1]) else append_ops
    return run(k, v, turn, traditional)


def append_gpu(k: mx.array, v: mx.array, turn: mx.array, traditional: bool, run=Kernel.__call__) -> mx.array:
    tokens, n_kv, dim = k.shape
    inputs = [k, v, turn, _params(n_kv, tokens)]
    templates = (dim, int(traditional), k.dtype)
    return run(APPEND, inputs, [(n_kv, 2, tokens, 2 * dim)], (tokens, n_kv, 1), templates)[0]


@lru_cache(8)
def _params(n_kv: int, tokens: int) -> mx.array:
    """Return the kernel's parameters. The parameters are cached, because all layers of a step use the same
    parameters."""
    return mx.array(params_of(KV_HEADS=n_kv, N_NEW=tokens), mx.int32)


def append_ops(k: mx.array, v: mx.array, turn: mx.array, traditional: bool = False) -> mx.array:
    """Return the result of `append_gpu`, computed in plain MLX (the twin)."""
    rows = mx.stack([rope(k, turn, traditional), v.astype(mx.float32)]).astype(mx.float16)  # [2, T, n_kv, D]
    return mx.contiguous(rows.transpose(2, 0, 1, 3)).view(mx.uint8)


def rope(x: mx.array, turn: mx.array, traditional: bool = False) -> mx.array:
    """Rotate the pairs (x_i, x_{i + D/2}) by RoPE. If `traditional` is True, rotate the pairs (x_2i, x_2i+1).
    x: [T, heads, D]; turn: [T, D]."""
    dim = x.shape[-1]
    cosine, sine = turn[:, None, : dim // 2], turn[:, None, dim // 2 :]
    x = x.astype(mx.float32)
    a, b = (x[..., 0::2], x[..., 1::2]) if traditional else (x[..., : dim // 2], x[..., dim // 2 :])
    turned = [a * cosine - b * sine, b * cosine + a * sine]
    return mx.stack(turned, axis=-1).reshape(x.shape) if traditional else mx.concatenate(turned, axis=-1)
