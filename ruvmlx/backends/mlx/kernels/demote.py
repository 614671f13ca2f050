"""This kernel demotes whole KV pages: it converts them to the next lower tier, which has fewer bits.

Every implementation of a demotion (NumPy in the tests, C, MLX, GPU) gives the same codes, scales and biases
(the C library stores them in another order), because all use float32, divisions (not products with a
reciprocal), and rounding of ties to even (metal_kernels/quantise.h). The outputs are new pages uint8 [n,
n_kv_heads, page_bytes]. The KV cache copies the new pages into its pool.
"""

from functools import lru_cache
from itertools import product

from ruvmlx.platform.mx import mx
from ruvmlx.tiers import HOT, TIERS

from .pages import page_bytes, params_of, unpack
from .source import HEAD_DIMS, Kernel, on_gpu

DEMOTE = Kernel(
    "demote",
    (("pool", "uchar"), ("ids", "int"), ("params", "int")),
    (("out", "uchar"),),
    ("D", "TO"),
    threads=128,
    headers=("pages.h", "quantise.h"),
    values=tuple(product(HEAD_DIMS, range(HOT))),
)


def demote(pool: mx.array, ids: list[int], head_dim: int, to: int) -> mx.array:
    """Return pages of tier `to`, converted from the pages `ids` in the pool of tier `to` + 1."""
    if on_gpu(head_dim):
        return demote_gpu(pool, ids, head_dim, to)
    return demote_ops(pool[mx.array(ids)], head_dim, to)


def demote_gpu(pool: mx.array, ids: list[int], head_dim: int, to: int, run=Kernel.__call__) -> mx.array:
    n_kv = pool.shape[1]
    shape = (len(ids), n_kv, page_bytes(to, head_dim))
    inputs = [pool, *_arguments(tuple(ids), n_kv)]
    return run(DEMOTE, inputs, [shape], (len(ids), n_kv, 1), (head_dim, to))[0]


@lru_cache(4)
def _arguments(ids: tuple[int, ...], n_kv: int) -> tuple[mx.array, mx.array]:
    """Return the kernel's page ids and parameters. The arguments are cached, because all layers use the same
    page ids and parameters."""
    return mx.array([*ids, *[0] * 8], mx.int32), mx.array(params_of(KV_HEADS=n_kv), mx.int32)


def demote_ops(pages: mx.array, head_dim: int, to: int) -> mx.array:
    """Return the result of `demote_gpu` in plain MLX (the twin). pages: uint8 [..., bytes of tier `to` + 1]
    -> uint8 [..., bytes of tier `to`]."""
    k, v = unpack(pages, to + 1, head_dim)
    if TIERS[to].rotated != TIERS[to + 1].rotated:
        k = rotate(k)
    if TIERS[to].bits == 8:
        (kq, *k_scales), (vq, *v_scales) = _eight_bits(k), _eight_bits(v)
        codes = [kq, vq]
    else:
        (kq, *k_scales), (vq, *v_scales) = _four_bits(k), _four_bits(v)
        codes = [q[..., 0::2] | q[..., 1::2] << 4 for q in (kq, vq)]
    return _join(pages, [*codes, *k_scales, *v_scales])


def _eight_bits(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return the codes q and the scales s of x [..., 64, D]: s = f16(absmax / 127);  q = clamp(rint(x / s),
    -127, 127), 0 where s is 0."""
    scale = (mx.abs(x).max(axis=-1, keepdims=True) / 127).astype(mx.float16)
    s = scale.astype(mx.float32)
    q = mx.clip(mx.round(x / mx.where(s == 0, 1, s)), -127, 127)
    return mx.where(s == 0, 0, q).astype(mx.int8), scale


def _four_bits(x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return the codes q, the scales s and the biases b of x [..., 64, D]: s = f16((max - min) / 15), b =
    f16(min);  q = clamp(rint((x - b) / s), 0, 15), 0 where s is 0."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scale, bias = _to_f16((high - low) / 15), _to_f16(low)
    s, b = scale.astype(mx.float32), bias.astype(mx.float32)
    q = mx.clip(mx.round((x - b) / mx.where(s == 0, 1, s)), 0, 15)
    return mx.where(s == 0, 0, q).astype(mx.uint8), scale, bias


def _to_f16(x: mx.array) -> mx.array:
    """Return x as float16, with +0 in place of -0. If x had both zeros, the order of the elements would
    decide which zero is the minimum."""
    half = x.astype(mx.float16)
    return mx.where(half == 0, mx.array(0, mx.float16), half)


def _join(like: mx.array, parts: list[mx.array]) -> mx.array:
    flat = like.shape[:-1]
    return mx.concatenate([mx.contiguous(p).reshape(*flat, -1).view(mx.uint8) for p in parts], axis=-1)


def hadamard_block(head_dim: int) -> int:
    """Return the largest power of two that divides head_dim, at most 128."""
    return min(head_dim & -head_dim, 128)


def rotate(x: mx.array) -> mx.array:
    """Return x [..., D] times a block-diagonal orthonormal Hadamard matrix, for rotated keys and their
    queries.

    For each h = 1, 2, 4, ..., B/2 (B: the block size) the pair (x_i, x_{i+h}) becomes (sum, difference). At
    the end all numbers are multiplied by 1 / sqrt(B).
    """
    shape, block, h = x.shape, hadamard_block(x.shape[-1]), 1
    x = x.astype(mx.float32)
    while h < block:
        x = x.reshape(-1, 2, h)
        x = mx.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], axis=1)
        h *= 2
    return (x * block**-0.5).reshape(shape)
