"""This module computes the attention over the KV pages of tiered caches (pages of 16, 8 and 4 bits) in the
MLX graph.

The module wraps the attention of every layer. With a plain cache (without pages) the layer runs unchanged. In
a step over tiered caches, the layer computes only its projections (q, k, v, output). ruvmlx's kernels compute
the attention, for a prompt together with MLX's fused attention. The kernels apply RoPE to keys in float32
(unless RoPE rotates only a part of each head), and store keys as f16, whatever the dtype of the graph is. For
the layers of cpu_layers.py, tiered_cpu.py computes the attention over tiered caches.

A `PromptStep` appends n tokens of one sequence. A `DecodeStep` appends one token to each of B sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from ...kv.cache import PagedCache, room_for
from ...models.config.alibi import alibi_slopes
from ...models.config.model import ModelConfig
from ...platform.mx import mx, nn
from ...tiers import PAGE
from .cpu_layers import Positions
from .kernels import append, decode, gather, rope_append
from .kernels.pages import GPUPageTable, SequencePages
from .plain_batch import LayerBatch
from .storage import MLXStorage, OpenPages


class PromptStep:
    """A step that appends n > 1 tokens to one sequence. The positions of the tokens, and the pages that the
    tokens see, are the same in all layers."""

    def __init__(self, cache: PagedCache, n: int, config: ModelConfig):
        self.storage, self.offset, self.n = _storage([cache]), cache.offset, n
        self._config = config
        self._window, self._table = cache.window, cache.table
        self._table.flush()
        first, end = self.offset // PAGE * PAGE, self.offset + n
        self._pages = [cache.table.hot_page(at) for at in range(first, end, PAGE)]
        self.view: SequencePages = cache.table.view(self.offset)

    @cached_property
    def chunk(self) -> gather.PromptChunk:
        return gather.PromptChunk(_page_table([self.view], self._config), self.n, self._window)

    @cached_property
    def _turns(self) -> "Turns":
        return Turns(range(self.offset, self.offset + self.n))

    def write(self, layer: int, rows: mx.array) -> None:
        """Write the keys and values of the n new tokens into hot pages. rows: uint8 [n_kv_heads, 2, n, 2 *
        head_dim]."""
        self.storage.write(layer, self._pages, self.offset % PAGE, rows)

    def attend(self, layer: int, own: nn.Module, positions: Positions, x: mx.array) -> mx.array:
        """Return the attention output [1, n, n_heads * head_dim] of x [1, n, D], with the layer's projections
        and MLX's fused attention."""
        q, k, v = own.heads(x)
        if not own.kernels_turn:
            k = own.turned_keys(k.swapaxes(1, 2), self.offset).swapaxes(1, 2)
        rows = append.append(k[0], v[0], self._turns.of(own, positions))
        self.write(layer, rows)
        queries = own.turned_queries(q.swapaxes(1, 2), self.offset)
        out = gather.attend(queries, self.storage.pools(layer), rows, self.chunk)
        return out.swapaxes(1, 2).reshape(1, self.n, -1)

    def arrays(self) -> Sequence[mx.array]:
        return self.storage.arrays()

    def finish(self) -> None:
        """Do nothing. The function `running` calls `finish` of each kind of step when the step has
        succeeded."""


class DecodeStep:
    """A step that appends one token to each of B sequences. One object serves all layers of the step."""

    def __init__(self, caches: Sequence[PagedCache], config: ModelConfig):
        self.storage, self.offsets = _storage(caches), [cache.offset for cache in caches]
        self._tables = [cache.table for cache in caches]
        self._opened = _join_open_pages([c.table.open_page_at(c.offset) for c in caches])
        self._made: list[mx.array] = []  # for each layer: the open pages with the new tokens' keys and values
        self.views = [_view_of_next(cache) for cache in caches]
        self._config = config

    @cached_property
    def table(self) -> GPUPageTable:
        return _page_table(self.views, self._config)

    @cached_property
    def _turns(self) -> "Turns":
        return Turns(self.offsets)

    def attend(self, layer: int, own: nn.Module, positions: Positions, x: mx.array) -> mx.array:
        """Return the attention output [B, 1, n_heads * head_dim] of x [B, 1, D], with the layer's projections
        and ruvmlx's kernels."""
        q, k, v = own.rows_for_kernels(x, self._turns.offsets)
        scales = self._turns.query_scales(positions)
        if scales is not None:
            q = (q * scales[:, None, None]).astype(q.dtype)
        opened, turn = self._opened.arrays[layer], self._turns.of(own, positions)
        new = rope_append.rope_append(q, k, v, turn, opened, self.table)
        self._made.append(new.open)
        out = decode.attend(new, self.storage.pools(layer), self.table, x.dtype)
        return out.reshape(len(self.views), 1, -1)

    def arrays(self) -> Sequence[mx.array]:
        return self._made

    def finish(self) -> None:
        pages = OpenPages(self._made)
        for i, (table, offset) in enumerate(zip(self._tables, self.offsets, strict=True)):
            table.fill(offset, pages, i)


def _page_table(views: Sequence[SequencePages], config: ModelConfig) -> GPUPageTable:
    slopes = _slopes(config.n_heads, config.alibi_bias_max)
    return GPUPageTable(views, config.n_heads, config.n_kv_heads, config.head_dim, slopes=slopes)


@cache
def _slopes(n_heads: int, bias_max: float) -> np.ndarray | None:
    """Return ALiBi's slopes, float32 [n_heads], or None for a model without ALiBi. Each step needs the
    slopes, so the function keeps its results."""
    return alibi_slopes(n_heads, bias_max) if bias_max else None


def _view_of_next(cache: PagedCache) -> SequencePages:
    """Return the pages that the next token of this sequence sees, including the page that will hold this
    token."""
    end = cache.offset + 1
    return cache.table.view(end, max(0, end - cache.window) if cache.window else 0)


def _join_open_pages(opened: Sequence[tuple[OpenPages, int]]) -> OpenPages:
    """Return one object with the open pages of all sequences. If one OpenPages object (from the last step)
    already has exactly these sequences' pages in this order, return that object."""
    pages = opened[0][0]
    together = all(held is pages and index == i for i, (held, index) in enumerate(opened))
    if together and len(pages.arrays[0]) == len(opened):
        return pages
    parts = [held.of(index) for held, index in opened]
    layers = zip(*parts, strict=True)
    return OpenPages([part[0] if len(part) == 1 else mx.concatenate(list(part)) for part in layers])


class Turns:
    """A Turns object computes RoPE's cosines and sines and the query scales for the positions of one step.
    Each of these values is computed once, at the first layer that needs it, and on the CPU, because a GPU
    launch for a few hundred numbers takes longer.
    """

    def __init__(self, at: Sequence[int]):
        self._at = at
        self._made: dict[bool, mx.array] = {}
        self._scales: list[mx.array | None] = []

    def of(self, own: nn.Module, positions: Positions) -> mx.array:
        """Return float32 [n, head_dim]: the cosines of the layer's head_dim / 2 angles at each position, then
        their sines. If the kernels must not rotate heads (for example, a layer without RoPE), all angles are
        0."""
        if own.kernels_turn not in self._made:
            make = positions.turns if own.kernels_turn else positions.still
            self._made[own.kernels_turn] = mx.array(make(self._at))
        return self._made[own.kernels_turn]

    @cached_property
    def offsets(self) -> mx.array:
        """Return the positions of the n tokens: int32 [n]."""
        return mx.array(list(self._at), mx.int32)

    def query_scales(self, positions: Positions) -> mx.array | None:
        """Return the scales of the queries of the n tokens: float32 [n]. Return None if queries are not
        scaled."""
        if not self._scales:
            scales = positions.query_scales(self._at)
            self._scales.append(None if scales is None else mx.array(scales))
        return self._scales[0]


class LayerPages:
    """A LayerPages object holds a step (PromptStep or DecodeStep) and the number of a layer. The layer's
    attention module receives this object in place of a cache."""

    def __init__(self, step: Any, layer: int):
        """step: a PromptStep or a DecodeStep"""
        self.step, self.layer = step, layer

    def make_mask(self, *args, **options) -> None:
        """Return None. The graph asks for a mask, but the step applies the mask itself."""


class RunningStep(NamedTuple):
    """A RunningStep is the object that a backend receives from `running` for one step. layers: the objects
    that the graph's layers receive in place of caches."""

    layers: Sequence[LayerPages]
    # a function that returns the arrays to evaluate together with the step
    arrays: Callable[[], Sequence[mx.array]]


@contextmanager
def running(caches: Sequence[PagedCache], n: int, config: ModelConfig) -> Iterator[RunningStep]:
    """Reserve room for n more tokens in each cache (if n > 1, `caches` has only one cache). If the `with`
    block raises no error, add n to the number of tokens of each cache."""
    storage = _storage(caches)
    try:
        with room_for(caches, n):
            step = PromptStep(caches[0], n, config) if n > 1 else DecodeStep(caches, config)
            yield RunningStep([LayerPages(step, layer) for layer in range(config.n_layers)], step.arrays)
            step.finish()
    except BaseException:
        with suppress(Exception):
            # Finish the unfinished changes of the pools on this thread's MLX stream, because no other thread
            # could evaluate them later.
            mx.eval(*storage.arrays())
        raise


def _storage(caches: Sequence[PagedCache]) -> MLXStorage:
    return cast(MLXStorage, caches[0].pool.storage)


def install(graph: nn.Module, config: ModelConfig) -> None:
    """Replace the attention of every layer of `graph` by a GraphTiered that wraps it."""
    positions = Positions(config)
    for layer in graph.model.layers:
        layer.self_attn = GraphTiered(layer.self_attn, positions)


class GraphTiered(nn.Module):
    """The attention of a layer of the graph, for plain and tiered caches. A call returns the attention's
    output [B, L, D] of x [B, L, D]."""

    def __init__(self, attention: nn.Module, positions: Positions):
        super().__init__()
        self.plain = attention
        self._positions = positions

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        own = self.plain
        if isinstance(cache, LayerPages):
            return own.o_proj(cache.step.attend(cache.layer, own, self._positions, x))
        if isinstance(cache, LayerBatch):
            return own.o_proj(cache.attend(own, x))
        return own(x, mask, cache)
