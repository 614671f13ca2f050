"""Demotion of whole pages: hot -> warm (8 bits), warm or hot -> cold (4 bits, K rotated).

Every implementation gives the same bytes: float32, divisions, ties to even (metal_kernels/quantise.h).
Outputs are fresh pages uint8 [n, n_kv_heads, page_bytes]; the cache places them in its pool.
"""

from functools import lru_cache
from itertools import product

from ruvmlx.platform.mx import mx

from .pages import COLD, HOT, PARAMS, WARM, page_bytes, unpack
from .source import HEAD_DIMS, Kernel, on_gpu

_ARGUMENTS = (("ids", "int"), ("params", "int"))
DEMOTE_WARM = Kernel(
    "demote_warm",
    (("hot", "uchar"), *_ARGUMENTS),
    (("out", "uchar"),),
    ("D",),
    threads=128,
    headers=("pages.h", "quantise.h"),
    values=tuple(product(HEAD_DIMS)),
)
DEMOTE_COLD = Kernel(
    "demote_cold",
    (("pool", "uchar"), *_ARGUMENTS),
    (("out", "uchar"),),
    ("D", "SOURCE"),
    threads=128,
    headers=("pages.h", "quantise.h"),
    values=tuple(product(HEAD_DIMS, (WARM, HOT))),
)


def demote_warm(hot: mx.array, ids: list[int], head_dim: int) -> mx.array:
    """Pages `ids` of the hot pool as warm pages."""
    if on_gpu(head_dim):
        return demote_warm_gpu(hot, ids, head_dim)
    return demote_warm_ops(hot[mx.array(ids)], head_dim)


def demote_cold(pool: mx.array, ids: list[int], head_dim: int, source: int = WARM) -> mx.array:
    """Pages `ids` of the warm (or hot) pool as cold pages."""
    if on_gpu(head_dim):
        return demote_cold_gpu(pool, ids, head_dim, source)
    return demote_cold_ops(pool[mx.array(ids)], head_dim, source)


def demote_warm_gpu(hot: mx.array, ids: list[int], head_dim: int, run=Kernel.__call__) -> mx.array:
    n_kv = hot.shape[1]
    shape = (len(ids), n_kv, page_bytes(WARM, head_dim))
    return run(DEMOTE_WARM, [hot, *_arguments(ids, n_kv)], [shape], (len(ids), n_kv, 1), (head_dim,))[0]


def demote_cold_gpu(
    pool: mx.array, ids: list[int], head_dim: int, source: int, run=Kernel.__call__
) -> mx.array:
    n_kv = pool.shape[1]
    shape = (len(ids), n_kv, page_bytes(COLD, head_dim))
    inputs = [pool, *_arguments(ids, n_kv)]
    return run(DEMOTE_COLD, inputs, [shape], (len(ids), n_kv, 1), (head_dim, source))[0]


def _arguments(ids: list[int], n_kv: int) -> tuple[mx.array, mx.array]:
    return _made(tuple(ids), n_kv)


@lru_cache(4)
def _made(ids: tuple[int, ...], n_kv: int) -> tuple[mx.array, mx.array]:
    """Once for all layers: ids and params."""
    params = [0] * PARAMS
    params[7] = n_kv
    return mx.array([*ids, *[0] * 8], mx.int32), mx.array(params, mx.int32)


def demote_warm_ops(pages: mx.array, head_dim: int) -> mx.array:
    """The twin. pages: uint8 [..., hot bytes] -> uint8 [..., warm bytes]"""
    q, scales = zip(*(_eight_bits(x) for x in unpack(pages, HOT, head_dim)), strict=True)
    return _join(pages, [*q, *scales])


def demote_cold_ops(pages: mx.array, head_dim: int, source: int = WARM) -> mx.array:
    """The twin. pages: uint8 [..., source bytes] -> uint8 [..., cold bytes]"""
    k, v = unpack(pages, source, head_dim)
    (kq, *k_affine), (vq, *v_affine) = _four_bits(rotate(k)), _four_bits(v)
    packed = (q[..., 0::2] | q[..., 1::2] << 4 for q in (kq, vq))
    return _join(pages, [*packed, *k_affine, *v_affine])


def _eight_bits(x: mx.array) -> tuple[mx.array, mx.array]:
    """s = f16(absmax / 127);  q = clamp(rint(x / s), -127, 127), 0 where s is 0.   x: [..., 64, D]"""
    scale = (mx.abs(x).max(axis=-1, keepdims=True) / 127).astype(mx.float16)
    s = scale.astype(mx.float32)
    q = mx.clip(mx.round(x / mx.where(s == 0, 1, s)), -127, 127)
    return mx.where(s == 0, 0, q).astype(mx.int8), scale


def _four_bits(x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """s = f16((max - min) / 15), b = f16(min);  q = clamp(rint((x - b) / s), 0, 15), 0 where s is 0."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scale, bias = _stored((high - low) / 15), _stored(low)
    s, b = scale.astype(mx.float32), bias.astype(mx.float32)
    q = mx.clip(mx.round((x - b) / mx.where(s == 0, 1, s)), 0, 15)
    return mx.where(s == 0, 0, q).astype(mx.uint8), scale, bias


def _stored(x: mx.array) -> mx.array:
    """f16, and +0 for -0: which zero is the least would depend on the order."""
    half = x.astype(mx.float16)
    return mx.where(half == 0, mx.array(0, mx.float16), half)


def _join(like: mx.array, parts: list[mx.array]) -> mx.array:
    flat = like.shape[:-1]
    return mx.concatenate([mx.contiguous(p).reshape(*flat, -1).view(mx.uint8) for p in parts], axis=-1)


def hadamard_block(head_dim: int) -> int:
    """The largest power of two that divides head_dim, 128 at most."""
    return min(head_dim & -head_dim, 128)


def rotate(x: mx.array) -> mx.array:
    """x: [..., D] times a block-diagonal orthonormal Hadamard matrix, as cold keys and queries for them are.

    For h = 1, 2, 4 .. B/2 the pair (x_i, x_{i+h}) becomes (sum, difference); then all times 1 / sqrt(B).
    """
    shape, block, h = x.shape, hadamard_block(x.shape[-1]), 1
    x = x.astype(mx.float32)
    while h < block:
        x = x.reshape(-1, 2, h)
        x = mx.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], axis=1)
        h *= 2
    return (x * block**-0.5).reshape(shape)
