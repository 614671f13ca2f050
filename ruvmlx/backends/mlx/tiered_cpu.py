"""This module lets the CPU layers use tiered caches. MLX computes the matrix products. Between the matrix
products, the C library computes the paged attention (kernels/paged_attention.py).

MLX on a CPU needs several operations to unpack pages, which took 0.7 ms for 512 tokens of a layer. The C
library takes 0.1 ms for the attention over 512 tokens of a layer, including the copy of q, k and v from MLX
to NumPy. The copy of q, k and v makes Python wait for MLX, but this wait delays nothing, because MLX has no
other work at that time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np

from ...kernels.library import LibraryError
from ...kernels.page_table import NativePageTable
from ...kernels.paged_attention import PagedAttention
from ...kv.cache import PagedCache, room_for
from ...kv.pool import PagePool
from ...models.config.model import ModelConfig
from ...platform.mx import mx, nn
from ..native.storage import NativeStorage
from .cpu_layers import CPUAttention
from .plain_batch import LayerBatch

NO_TIERS = "The KV cache has no tiers: {}"


def pool(config: ModelConfig, threads: int | None = None) -> PagePool:
    """Return an empty pool of KV pages. Raises LibraryError if the C library is missing, and ValueError if it
    has no page format for this head_dim."""
    shape = config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim
    return PagePool(NativeStorage(PagedAttention(*shape, threads)))


def why_no_pages(config: ModelConfig) -> str:
    """Return a line that tells the user why the CPU layers have no KV pages for this model. If the CPU layers
    have KV pages, return ""."""
    try:
        pool(config)
    except (LibraryError, ValueError) as error:
        return NO_TIERS.format(error)
    return ""


class CPUStep:
    """A step that appends n tokens to one sequence, or one token to each of B sequences. One object serves
    all layers of the step."""

    def __init__(self, caches: Sequence[PagedCache], n: int):
        storage = cast(NativeStorage, caches[0].pool.storage)
        self._kernels = cast(PagedAttention, storage.pages)
        self._window = caches[0].window
        self._sequences: list[tuple[NativePageTable, int]] = [(cache.table, cache.offset) for cache in caches]
        self._at = [offset + i for _, offset in self._sequences for i in range(n)]
        self._turn: np.ndarray | None = None
        self._n = n

    def attend(self, layer: int, own: CPUAttention, x: mx.array) -> mx.array:
        """Return the attention output, before the output projection, of x [1, n, D] or [B, 1, D]: [...,
        n_heads * head_dim]."""
        turn = self._turns(own)
        heads = np.array(own.project_normed(x.reshape(1, -1, x.shape[-1]))).reshape(
            len(self._at), -1, own.head_dim
        )
        # divide the queries by the attention scale, because the C library multiplies queries by the attention
        # scale
        heads[:, : own.n_heads] /= own.scale
        if own.turns and not own.kernels_turn:
            own._positions.turn_part(heads[:, : own.n_heads + own.n_kv_heads], self._at)
        scales = own._positions.query_scales(self._at)
        if scales is not None:
            heads[:, : own.n_heads] *= scales[:, None, None]
        qkv = heads.reshape(len(heads), -1)
        slopes = own._positions.slopes
        outs = [
            self._kernels.run(layer, table, offset, qkv[part], turn[part], self._window, slopes)
            for part, (table, offset) in zip(self._parts(), self._sequences, strict=True)
        ]
        out = outs[0] if len(outs) == 1 else np.concatenate(outs)
        return mx.array(out.reshape(*x.shape[:2], -1))

    def _turns(self, own: CPUAttention) -> np.ndarray:
        """Return the cosines and sines of RoPE's angles, by which the C library rotates heads: [n, head_dim].
        All layers of a step whose heads the C library rotates use the same array."""
        if not own.kernels_turn:
            return own._positions.still(self._at)
        if self._turn is None:
            self._turn = own._positions.turns(self._at)
        return self._turn

    def _parts(self) -> Iterator[slice]:
        """Yield, for each sequence, the slice of its tokens in the step's arrays."""
        return (slice(i * self._n, (i + 1) * self._n) for i in range(len(self._sequences)))


class CPULayerPages:
    """A CPULayerPages object holds a step and the number of a layer. The layer's attention module receives
    this object in place of a cache."""

    def __init__(self, step: CPUStep, layer: int):
        self.step, self.layer = step, layer


class CPURunningStep:
    """A CPURunningStep is the object that a backend receives from `running` for one step. layers: the objects
    that the graph's layers receive in place of caches."""

    def __init__(self, step: CPUStep, n_layers: int):
        self.layers = [CPULayerPages(step, layer) for layer in range(n_layers)]

    def arrays(self) -> Sequence[mx.array]:
        """Return no arrays to evaluate with the step, because pages are not MLX arrays."""
        return ()


@contextmanager
def running(caches: Sequence[PagedCache], n: int, config: ModelConfig) -> Iterator[CPURunningStep]:
    """Reserve room for n more tokens in each cache (if n > 1, `caches` has only one cache). If the `with`
    block raises no error, add n to the number of tokens of each cache."""
    with room_for(caches, n):
        yield CPURunningStep(CPUStep(caches, n), config.n_layers)


def install(graph: nn.Module) -> None:
    """Replace the attention of every layer of `graph` by a CPUTiered that wraps it."""
    for layer in graph.model.layers:
        layer.self_attn = CPUTiered(layer.self_attn)


class CPUTiered(nn.Module):
    """The attention of a CPU layer, for plain and tiered caches. A call returns the attention's output [B, L,
    D] of x [B, L, D]."""

    def __init__(self, attention: CPUAttention):
        super().__init__()
        self.plain = attention

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        own = self.plain
        if isinstance(cache, CPULayerPages):
            return own.o_proj(cache.step.attend(cache.layer, own, x))
        if isinstance(cache, LayerBatch):
            return own.o_proj(cache.attend_on_cpu(own, x))
        return own(x, mask, cache)
