"""This module wraps the C library's KV pages and attention, for a backend that computes a model's matrix
products in another library.

The parameter `turn` gives the rotations of RoPE for the tokens' positions: float32 [n, head_dim], the cosines
of each token's head_dim / 2 angles, then their sines (layers.turns). The simple version for tests is
layers.attend_ref.
"""

import ctypes as C
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from ..platform.cpu import physical_cores
from ..tiers import HOT, PAGE, TIERS
from . import matmul
from .layers import Array, _Attention, functions
from .library import OK, _load
from .page_table import NativePageTable

# if the number of queries times the number of tokens is at least SHARED, several threads share the heads
SHARED = 1 << 15
F32 = np.dtype(np.float32)


def head_page_bytes(tier: int, head_dim: int) -> int:
    """Return the bytes of the page of one layer and one head with the precision of this tier, in the order of
    the C library; a multiple of 64."""
    size = _load().rvm_head_page_bytes
    size.restype, size.argtypes = C.c_size_t, [C.c_int, C.c_size_t]
    if n := int(size(tier, head_dim)):
        return n
    raise ValueError(f"no pages of tier {tier} for head_dim {head_dim}: it must be even, from 2 to 512")


class PagedAttention:
    """The attention of all layers of one shape: H query heads, K key/value heads, D numbers per head.

    A page holds 64 tokens of all layers and key/value heads, in the layout that neon/include/rvm_pages.h
    describes. Raises ValueError for a head_dim that the library does not support: odd numbers, and numbers
    over 512.

    threads: the number of threads that share the heads in a large call (SHARED); None: the number of physical
        cores that this process can use
    """

    def __init__(
        self, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, threads: int | None = None
    ):
        self._threads = ThreadPoolExecutor(threads or physical_cores(), "ruvmlx-attend")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self._head_pages = n_layers * n_kv_heads
        self._head_bytes = [head_page_bytes(tier, head_dim) for tier in range(len(TIERS))]
        self._functions = functions()
        matmul.functions()  # this call declares the return type of rvm_matmul_impl
        self._matmul = C.cast(_load().rvm_matmul_impl(None), C.c_void_p)

    def page_bytes(self, tier: int) -> int:
        return self._head_pages * self._head_bytes[tier]

    def demote(self, source: int, tier: int, target: int, lower: int) -> None:
        """Convert the full page at address `source` (tier `tier`) to the tier `lower`, at the address
        `target`."""
        _done(self._functions.demote(tier, source, lower, target, self._head_pages, self.head_dim))

    def run(
        self,
        layer: int,
        table: NativePageTable,
        offset: int,
        qkv: Array,
        turn: Array,
        window: int = 0,
        slopes: Array | None = None,
    ) -> Array:
        """Append n tokens after `offset` earlier tokens. Each new token attends to itself and to the tokens
        before it within the window. Returns [n, H D].

        qkv: float32 [n, (H + 2 K) D], contiguous, not rotated; the pages of the new tokens are hot
        window: the number of tokens that a token sees, itself included; 0: all tokens
        slopes: float32 [H], ALiBi's slopes; None: no ALiBi, so all slopes are 0
        """
        n, total = len(qkv), offset + len(qkv)
        pages = table.pointer(total)
        self._append(layer, table, offset, qkv, turn)
        out = np.empty((n, self.n_heads * self.head_dim), F32)
        call = partial(self._attend, layer, pages, offset, qkv, turn, window, slopes, out)
        each = self._threads.map if n * total >= SHARED else map
        for _ in each(call, range(self.n_kv_heads)):
            pass
        return out

    def _append(self, layer: int, table: NativePageTable, offset: int, qkv: Array, turn: Array) -> None:
        (n, width), d, first = qkv.shape, self.head_dim, self.n_heads
        done = 0
        while done < n:
            at = (offset + done) % PAGE
            some = min(PAGE - at, n - done)
            address, tier, _ = table.rows[(offset + done) // PAGE]
            if tier != HOT or not address:
                raise ValueError(f"position {offset + done} has no hot page to be written to")
            row, angles = qkv[done:].ctypes.data, turn[done:].ctypes.data
            for head in range(self.n_kv_heads):
                k, v = (row + 4 * d * (first + i * self.n_kv_heads + head) for i in (0, 1))
                keys = int(address) + (layer * self.n_kv_heads + head) * self._head_bytes[HOT]
                values = keys + 2 * PAGE * d
                _done(self._functions.append(k, v, width, angles, some, d, at, keys, values))
            done += some

    def _attend(
        self,
        layer: int,
        pages: int,
        offset: int,
        qkv: Array,
        turn: Array,
        window: int,
        slopes: Array | None,
        out: Array,
        head: int,
    ) -> None:
        """Compute the attention of one key/value head for the query heads of its group."""
        n, d, group = len(qkv), self.head_dim, self.n_heads // self.n_kv_heads
        scratch = np.empty(self._functions.scratch(n * group, d), F32)
        place = 4 * head * group * d
        call = _Attention(pages, None, layer * self.n_kv_heads + head, self._matmul, d, group)
        call.q, call.q_stride, call.turn = qkv.ctypes.data + place, qkv.shape[1], turn.ctypes.data
        call.queries, call.position, call.window = n, offset, window
        call.slopes = None if slopes is None else slopes.ctypes.data + 4 * head * group
        call.first_page = max(0, offset + 1 - window) // PAGE if window else 0
        call.end_page = -(-(offset + n) // PAGE)
        call.out, call.out_stride = out.ctypes.data + place, out.shape[1]
        call.scratch = scratch.ctypes.data
        _done(self._functions.attend(C.addressof(call)))


def _done(rc: int) -> None:
    if rc != OK:
        raise ValueError(f"librvm refused the pages (error {rc})")
