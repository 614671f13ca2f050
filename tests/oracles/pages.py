"""Head-pages of the C library, 64 tokens' keys and values of one layer and head, beside their NumPy twins.

    page = from_canonical(HOT, bytes, head_dim)       # the library's own order, in aligned memory
    warm = demote(HOT, page[None], WARM, head_dim)    # [n, bytes]
    canonical(WARM, warm[0], head_dim)                # the order of metal_kernels/README.md

Tiers: COLD 0, WARM 1, HOT 2. head_dim: even, at most 512; anything else raises ValueError.
"""

import ctypes as C
import functools

import numpy as np
from numpy.typing import NDArray

from ruvmlx.kernels import layers, matmul
from ruvmlx.kernels.library import OK, _load
from ruvmlx.kernels.matmul import aligned_bytes
from ruvmlx.kernels.micro import _in
from ruvmlx.kernels.paged_attention import head_page_bytes
from ruvmlx.tiers import COLD, HOT, PAGE, WARM

Bytes = NDArray[np.uint8]
Array = NDArray[np.float32]
_P, _N, _I = C.c_void_p, C.c_size_t, C.c_int
F16, F32 = np.float16, np.float32


@functools.cache
def _lib() -> C.CDLL:
    lib = _load()
    lib.rvm_pages_demote.argtypes = [_I, _P, _I, _P, _N, _N]
    lib.rvm_page_codes_bytes.restype, lib.rvm_page_codes_bytes.argtypes = _N, [_I, _N, _N]
    for name in ("rvm_page_canonical", "rvm_page_from_canonical"):
        getattr(lib, name).argtypes = [_I, _P, _N, _P]
    return lib


def canonical_bytes(tier: int, head_dim: int) -> int:
    return (64 * head_dim + 512, 128 * head_dim + 256, 256 * head_dim)[tier]


def canonical(tier: int, page: Bytes, head_dim: int) -> Bytes:
    _size("page", page, head_page_bytes(tier, head_dim))
    out = np.empty(canonical_bytes(tier, head_dim), np.uint8)
    _check(_lib().rvm_page_canonical(tier, page.ctypes.data, head_dim, out.ctypes.data))
    return out


def from_canonical(tier: int, data: Bytes, head_dim: int) -> Bytes:
    page = aligned_bytes(head_page_bytes(tier, head_dim))
    _size("data", data, canonical_bytes(tier, head_dim))
    _check(_lib().rvm_page_from_canonical(tier, data.ctypes.data, head_dim, page.ctypes.data))
    return page


def demote(source: int, pages: Bytes, target: int, head_dim: int, impl: str | None = None) -> Bytes:
    """pages: [n, bytes] of one tier -> [n, bytes] of a lower one."""
    if target >= source:
        raise ValueError(f"tier {target} is not below tier {source}")
    n, size = len(pages), head_page_bytes(target, head_dim)
    _size("pages", pages, n * head_page_bytes(source, head_dim))
    out = aligned_bytes(n * size).reshape(n, size)
    run = layers.functions(impl).demote if impl else _lib().rvm_pages_demote
    _check(run(source, pages.ctypes.data, target, out.ctypes.data, n, head_dim))
    return out


def scores(tier: int, page: Bytes, q: Array, impl: str | None = None) -> Array:
    """q [rows, D] (rotated, if the page is cold) . keys -> [rows, 64], in integers: see rvm.h."""
    rows, head_dim = q.shape
    _size("page", page, head_page_bytes(tier, head_dim))
    f, out = matmul.functions(impl), np.empty((rows, PAGE), np.float32)
    codes = np.empty(_lib().rvm_page_codes_bytes(tier, rows, head_dim), np.uint8)
    _check(f.page_queries(tier, _in(q), rows, head_dim, codes.ctypes.data))
    _check(f.page_scores(tier, page.ctypes.data, codes.ctypes.data, rows, head_dim, None, out.ctypes.data))
    return out


def values(tier: int, page: Bytes, p: Array, head_dim: int, impl: str | None = None) -> Array:
    """p [rows, 64] . values -> [rows, D]; p >= 0."""
    rows, width = len(p), -(-head_dim // 16) * 16
    _size("page", page, head_page_bytes(tier, head_dim))
    out = np.zeros((rows, width + 16), np.float32)
    run = matmul.functions(impl).page_values
    _check(run(tier, page.ctypes.data, _in(p), rows, head_dim, None, out.ctypes.data, width + 16))
    return out[:, :head_dim] + out[:, width:].sum(1, keepdims=True)


def _size(name: str, a: Bytes, nbytes: int) -> None:
    if a.dtype != np.uint8 or a.nbytes != nbytes or not a.flags.c_contiguous:
        raise ValueError(f"{name} must be {nbytes} contiguous bytes, got {a.dtype} {list(a.shape)}")


def _check(rc: int) -> None:
    if rc != OK:
        raise ValueError(f"librvm refused the pages (error {rc})")


# The twins, over bytes in the shared order. Of scores: numbers_ref(...) K @ q; of values: p @ V.


def demote_ref(source: int, data: Bytes, target: int, head_dim: int) -> Bytes:
    """One page; a hot page becomes cold through warm's numbers."""
    k, v = numbers_ref(source, data, head_dim)
    if source == HOT and target == COLD:
        k, v = numbers_ref(WARM, pack_ref(WARM, k, v), head_dim)
    return pack_ref(target, rotate_ref(k) if target == COLD else k, v)


def pack_ref(tier: int, k: Array, v: Array) -> Bytes:
    """k, v: [64, D] float32 -> a page. k of a cold page: as it was rotated."""
    if tier == HOT:
        parts = [k.astype(F16), v.astype(F16)]
    elif tier == WARM:
        (kq, ks), (vq, vs) = _eight_bits(k), _eight_bits(v)
        parts = [kq, vq, ks, vs]
    else:
        (kq, *k_affine), (vq, *v_affine) = _four_bits(k), _four_bits(v)
        parts = [kq[:, 0::2] | kq[:, 1::2] << 4, vq[:, 0::2] | vq[:, 1::2] << 4, *k_affine, *v_affine]
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8).reshape(-1) for p in parts])


def numbers_ref(tier: int, data: Bytes, head_dim: int) -> tuple[Array, Array]:
    """K and V [64, D] float32, as a page holds them: K of a cold one rotated."""
    shape, n = (2, PAGE, head_dim), PAGE * head_dim
    if tier == HOT:
        k, v = data.view(F16).reshape(shape).astype(F32)
    elif tier == WARM:
        scales = data[2 * n :].view(F16).reshape(2, PAGE, 1).astype(F32)
        k, v = data[: 2 * n].view(np.int8).reshape(shape).astype(F32) * scales
    else:
        q = np.stack([data[:n] & 15, data[:n] >> 4], -1).reshape(shape).astype(F32)
        affine = data[n:].view(F16).reshape(2, 2, PAGE, 1).astype(F32)
        k, v = q * affine[:, 0] + affine[:, 1]
    return k, v


def rotate_ref(x: Array) -> Array:
    """[..., D] float32 times blocks of Hadamard matrices, as metal_kernels/README.md says."""
    shape, h = x.shape, 1
    block = min(shape[-1] & -shape[-1], 128)
    while h < block:
        x = x.reshape(-1, 2, h)
        x, h = np.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], axis=1), 2 * h
    return (x * F32(block**-0.5)).reshape(shape)


def _eight_bits(x: Array) -> tuple[np.ndarray, np.ndarray]:
    s = (np.abs(x).max(axis=1, keepdims=True) / F32(127)).astype(F16)
    q = np.rint(x / np.where(s == 0, np.inf, s).astype(F32))
    return np.clip(q, -127, 127).astype(np.int8), s


def _four_bits(x: Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    s, b = ((high - low) / F32(15)).astype(F16), low.astype(F16)
    s[s == 0], b[b == 0] = 0, 0  # never -0
    q = np.rint((x - b.astype(F32)) / np.where(s == 0, np.inf, s).astype(F32))
    return np.clip(q, 0, 15).astype(np.uint8), s, b
