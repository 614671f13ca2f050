"""This module runs one decode step for B sequences whose KV caches are plain (not paged).

A step reads the model's weights once for all B sequences. The attention is computed for one sequence after
the other, each over the cache of the sequence.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ...platform import mlxlm
from ...platform.mx import mx, nn
from . import cpu_layers
from .cpu_layers import CPUAttention
from .plain_cache import MLXCache

_base = mlxlm.load("models.base")


class LayerBatch:
    """The plain caches of B sequences in one layer. The layer's attention module gets this object in place of
    one cache."""

    def __init__(self, caches: Sequence[Any]):
        self._caches, self._offsets = caches, [cache.offset for cache in caches]

    def make_mask(self, *args, **options) -> None:
        """Return None (no mask), because in a decode step each new token sees all tokens that its cache
        returns."""

    def attend(self, own: nn.Module, x: mx.array) -> mx.array:
        """Return the attention output [B, 1, n_heads * head_dim] of x [B, 1, D] before the output projection.
        own: the layer's Attention module."""
        b = len(self._caches)
        q, k, v = (y.swapaxes(1, 2) for y in own.heads(x))
        offsets = mx.array(self._offsets)
        q, k = own.turned_queries(q, offsets), own.turned_keys(k, offsets)
        outs = []
        for i, cache in enumerate(self._caches):
            keys, values = cache.update_and_fetch(k[i : i + 1], v[i : i + 1])
            outs.append(
                _base.scaled_dot_product_attention(
                    q[i : i + 1],
                    keys,
                    values,
                    cache=cache,
                    scale=own.scale,
                    mask=own.scores_mask(None, q, keys),
                )
            )
        return mx.concatenate(outs).reshape(b, 1, -1)

    def attend_on_cpu(self, own: CPUAttention, x: mx.array) -> mx.array:
        """Return the same result as `attend`, up to rounding, for the attention of the CPU layers
        (cpu_layers.py)."""
        angles = own._positions.angles_at(self._offsets) if own.turns else None
        q, k, v = own._project_rotated(x.swapaxes(0, 1), angles, self._offsets)
        outs = []
        for i, cache in enumerate(self._caches):
            keys, values = cache.update_and_fetch(k[:, :, i : i + 1], v[:, :, i : i + 1])
            mask = own._positions.mask_of(1, keys.shape[2])
            outs.append(cpu_layers.attend(q[..., i : i + 1, :], keys[:, :, None], values[:, :, None], mask))
        return mx.stack([out.reshape(1, -1) for out in outs])


class Batch:
    """The plain caches of B sequences during one decode step: `layers` has one LayerBatch for each layer."""

    def __init__(self, caches: Sequence[MLXCache]):
        self._caches = caches
        self.layers = [LayerBatch(layers) for layers in zip(*(c.layers for c in caches), strict=True)]

    def arrays(self) -> Sequence[mx.array]:
        return [array for cache in self._caches for array in cache.arrays()]


@contextmanager
def running(caches: Sequence[MLXCache]) -> Iterator[Batch]:
    """Return a context manager for one decode step. If the step fails, all caches go back to their old
    numbers of tokens."""
    with ExitStack() as stack:
        for cache in caches:
            stack.enter_context(cache.running())
        yield Batch(caches)
