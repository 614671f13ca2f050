"""Attention over the pages of a tiered cache, in mlx-lm's graph and in our CPU layers.

Every layer's attention is wrapped: with a plain cache it runs as it was; with a `LayerPages` its projections
are used, and the kernels do the rest. Keys are turned in float32 and stored as f16, whatever the graph
computes in.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import NamedTuple, cast

from ..kernels.metal import append, decode, prefill
from ..kernels.metal.pages import Table, View
from ..kv.cache import PagedCache
from ..kv.mlx import MLXStorage
from ..kv.policy import PAGE
from ..models.base import ModelConfig
from . import tiered_cpu
from .cpu_layers import CPUAttention, Positions
from .mx import mx, nn


class Step:
    """n new tokens of a sequence: where they go and what they see, the same in all layers."""

    def __init__(self, cache: PagedCache, n: int, config: ModelConfig):
        self.storage, self.offset, self.n = _storage(cache), cache.offset, n
        self._cache, self._heads = cache, (config.n_heads, config.n_kv_heads, config.head_dim)
        end = self.offset + n
        self._places = []  # (page, first row there, first token, token behind the last)
        for at in range(self.offset // PAGE * PAGE, end, PAGE):
            start, stop = max(at, self.offset), min(at + PAGE, end)
            page = cache.table.hot_page(at)
            self._places.append((page, start - at, start - self.offset, stop - self.offset))
        self._turn: mx.array | None = None
        self._on_cpu: tiered_cpu.Token | tiered_cpu.Chunk | None = None

    @property
    def view(self) -> View:
        """A single token's, itself included; a chunk's, of what is before it."""
        if self.n > 1:
            return self._cache.table.view(self.offset)
        window, end = self._cache.window, self.offset + 1
        return self._cache.table.view(end, max(0, end - window) if window else 0)

    @cached_property
    def table(self) -> Table:
        return Table([self.view], *self._heads)

    @cached_property
    def chunk(self) -> prefill.Chunk:
        return prefill.Chunk(self.table, self.n, self._cache.window)

    def on_cpu(self, positions: Positions) -> tiered_cpu.Token | tiered_cpu.Chunk:
        if self._on_cpu is None:
            dim = self._heads[2]
            if self.n == 1:
                self._on_cpu = tiered_cpu.Token(self.view, dim)
            else:
                self._on_cpu = tiered_cpu.Chunk(self.view, self.n, self._cache.window, dim, positions)
        return self._on_cpu

    def turn(self, positions: Positions) -> mx.array:
        """float32 [n, head_dim]: cosines of the head_dim / 2 angles of each position, then their sines."""
        if self._turn is None:
            cos, sin = positions.angles(self.offset, self.n)
            self._turn = mx.concatenate([cos[:, 0, 0], sin[:, 0, 1]], axis=-1)
        return self._turn

    def write(self, layer: int, rows: mx.array) -> None:
        """rows: uint8 [n_kv_heads, 2, n, 2 * head_dim]"""
        for page, at, start, stop in self._places:
            self.storage.write(layer, page, at, rows[:, :, start:stop])

    def attend(self, layer: int, q: mx.array, rows: mx.array) -> mx.array:
        """q: [n, n_heads, head_dim], not scaled -> [n, n_heads, head_dim]"""
        pools = self.storage.pools(layer)
        if self.n == 1:
            return decode.attend(q, pools, self.table)
        return prefill.attend(q, pools, rows, self.chunk)


class LayerPages:
    """What a layer's attention is handed as its cache."""

    def __init__(self, step: Step, layer: int):
        self.step, self.layer, self.offset = step, layer, step.offset

    def make_mask(self, *args, **options) -> None:
        """mlx-lm asks for one; the kernels know who sees whom."""

    def attend(self, q: mx.array, rows: mx.array) -> mx.array:
        """The tokens' keys and values go into their pages; the tokens see these and the older ones."""
        self.step.write(self.layer, rows)
        return self.step.attend(self.layer, q, rows)


class Running(NamedTuple):
    """A cache in a step."""

    layers: Sequence[LayerPages]
    arrays: Callable[[], Sequence[mx.array]]  # what is to be evaluated with the step


@contextmanager
def running(cache: PagedCache, n: int, config: ModelConfig) -> Iterator[Running]:
    """Room for n more tokens, which count when the block has ended well."""
    storage = _storage(cache)
    try:
        cache.reserve(n)
        step = Step(cache, n, config)
        yield Running([LayerPages(step, layer) for layer in range(config.n_layers)], storage.arrays)
    except BaseException:
        cache.abandon()
        with suppress(Exception):
            mx.eval(*storage.arrays())  # another thread could not evaluate what is left over from this one
        raise
    cache.advance(n)
    storage.start()


def _storage(cache: PagedCache) -> MLXStorage:
    return cast(MLXStorage, cache.pool.storage)


def install(graph: nn.Module, config: ModelConfig) -> None:
    """Wrap the attention of every layer, in place."""
    attentions = [layer.self_attn for layer in graph.model.layers]
    if isinstance(attentions[0], CPUAttention):
        wrapped: list[nn.Module] = [CPUTiered(attention) for attention in attentions]
    else:
        positions = Positions(attentions[0].rope, config)
        wrapped = [GraphTiered(attention, positions) for attention in attentions]
    for layer, attention in zip(graph.model.layers, wrapped, strict=True):
        layer.self_attn = attention


class GraphTiered(nn.Module):
    """mlx-lm's attention; x [1, L, D] -> [1, L, D]."""

    def __init__(self, attention: nn.Module, positions: Positions):
        super().__init__()
        self.plain = attention
        self._positions = positions

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        own, n = self.plain, x.shape[1]
        if not isinstance(cache, LayerPages):
            return own(x, mask, cache)
        q = own.q_proj(x).reshape(1, n, own.n_heads, -1).swapaxes(1, 2)
        q = own.rope(q, offset=cache.offset)[0].swapaxes(0, 1)
        k, v = (linear(x).reshape(n, own.n_kv_heads, -1) for linear in (own.k_proj, own.v_proj))
        out = cache.attend(q, append.append(k, v, cache.step.turn(self._positions)))
        return own.o_proj(out.reshape(1, n, -1))


class CPUTiered(nn.Module):
    """cpu_layers' attention, whose queries come scaled and whose keys come turned; no kernels here."""

    def __init__(self, attention: CPUAttention):
        super().__init__()
        self.plain = attention

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        own, n = self.plain, x.shape[1]
        if not isinstance(cache, LayerPages):
            return own(x, mask, cache)
        q, k, v = own._project(x, cache.offset)
        rows = mx.stack([k[0], v[0]], axis=1).astype(mx.float16).view(mx.uint8)
        step, layer = cache.step, cache.layer
        step.write(layer, rows)
        out = step.on_cpu(own._positions).attend(q[0], step.storage.pools(layer), rows)
        return own.o_proj(out.transpose(2, 0, 1, 3).reshape(1, n, -1))
