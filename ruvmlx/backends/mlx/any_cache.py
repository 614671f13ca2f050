"""This module puts the caches that an mlx-lm model makes for its layers (KV, sliding-window, chunked, Mamba
states) into one base.KVCache.

For a sliding window, the module uses ruvmlx's SlidingKVCache. mlx-lm's own cache for a sliding window, when
it is full, cannot remove its newest tokens. With mlx-lm's cache, each turn of a chat longer than the window
would compute the whole chat again.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...kv.cache import Dump, KVStats
from ...kv.policy import F16
from ...platform import mlxlm
from ...platform.mx import mx, nn
from .plain_cache import SlidingKVCache

FAR = 1 << 30  # a number of tokens that is larger than any context


class AnyCache:
    """The caches of all layers for one sequence. layers: mlx-lm's cache objects, or SlidingKVCache objects in
    their place. make: a function that returns one empty cache for each layer."""

    def __init__(self, make: Callable[[], list[Any]]):
        self._make = make
        self.layers = make()
        self.offset = 0

    @classmethod
    def of(cls, model: nn.Module) -> "AnyCache":
        caches = mlxlm.load("models.cache")
        return cls(lambda: [_trimmable(layer, caches) for layer in caches.make_prompt_cache(model)])

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())

    @property
    def room(self) -> int:
        """Return the number of tokens that can be appended to all layers and then removed again; 0 if a layer
        cannot remove tokens (for example Mamba states)."""
        return min((_room(leaf) for leaf in self._leaves()), default=0)

    def arrays(self) -> list[mx.array]:
        leaves: Any = nn.utils.tree_flatten([layer.state for layer in self.layers])
        return [value for _, value in leaves if isinstance(value, mx.array)]

    def stats(self) -> KVStats:
        return KVStats.all_f16(F16.name, self.offset, self.nbytes, self.nbytes)

    def trim(self, n: int) -> bool:
        if n > self.offset or not all(_can_trim(leaf, n) for leaf in self._leaves()):
            return False
        self.retract(n)
        return True

    def retract(self, n: int) -> None:
        for layer in self.layers:
            layer.trim(n)
        self.offset -= n

    def fork(self) -> "AnyCache":
        """Return a second cache with the same tokens. The two caches share the arrays until MLX copies an
        array at the first write."""
        other = AnyCache(self._make)
        other.offset = self.offset
        other.layers = [_restore_layer(layer, _copy_state(layer.state)) for layer in self.layers]
        return other

    def dump(self) -> Dump:
        """Return the state of each layer in order: the arrays as bytes, and all other values as JSON in the
        dump's `facts`."""
        states = [_describe_state(layer.state) for layer in self.layers]
        parts = (np.array(mx.contiguous(a).reshape(-1).view(mx.uint8)) for a in self.arrays())
        return Dump({"offset": self.offset, "states": states}, self.nbytes, parts)

    def restore(self, facts: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
        states = [_read(state, read) for state in facts["states"]]
        self.layers = [_restore_layer(layer, state) for layer, state in zip(self.layers, states, strict=True)]
        self.offset = int(facts["offset"])

    @contextmanager
    def running(self, n: int) -> Iterator["AnyCache"]:
        """Return a context manager for a step that appends n tokens. If the step fails, the cache becomes
        empty, because the state of a layer can already include some of the tokens."""
        try:
            yield self
        except BaseException:
            self.layers, self.offset = self._make(), 0
            raise
        self.offset += n

    def _leaves(self) -> Iterator[Any]:
        for layer in self.layers:
            yield from getattr(layer, "caches", (layer,))


def _trimmable(layer: Any, caches: Any) -> Any:
    """Return the layer's cache, or a SlidingKVCache in its place if the cache is a RotatingKVCache that does
    not keep the first tokens."""
    if type(layer) is caches.RotatingKVCache and not layer.keep:
        return SlidingKVCache(layer.max_size)
    return layer


def _room(leaf: Any) -> int:
    """Return the number of tokens that can be appended to one layer's cache `leaf` and then removed again."""
    if isinstance(leaf, SlidingKVCache):
        return leaf.slack
    if not leaf.is_trimmable():
        return 0
    return max(0, leaf.max_size - leaf.offset - 1) if hasattr(leaf, "max_size") else FAR


def _can_trim(leaf: Any, n: int) -> bool:
    if isinstance(leaf, SlidingKVCache):
        return leaf.can_trim(n)
    return bool(leaf.is_trimmable()) and n <= leaf.offset - getattr(leaf, "start_position", 0)


def _restore_layer(layer: Any, state: Any) -> Any:
    """Return a copy of the cache object `layer` that has the state `state`."""
    made = copy.copy(layer)  # the copy also has the attributes of `layer` that are not in its `state`
    made.state = state
    return made


def _copy_state(state: Any) -> Any:
    return nn.utils.tree_map(lambda value: mx.array(value) if isinstance(value, mx.array) else value, state)


# The state of one of mlx-lm's caches is a tree of lists and tuples. `Dump.facts` has the state as JSON, with
# an object {"dtype", "shape"} in place of each array.


def _describe_state(state: Any) -> Any:
    if isinstance(state, mx.array):
        return {"dtype": str(state.dtype).rpartition(".")[2], "shape": list(state.shape)}
    return [_describe_state(value) for value in state] if isinstance(state, list | tuple) else state


def _read(described: Any, read: Callable[[int], bytes]) -> Any:
    if isinstance(described, list):
        return [_read(value, read) for value in described]
    return _read_array(described, read) if isinstance(described, dict) else described


def _read_array(described: Mapping[str, Any], read: Callable[[int], bytes]) -> mx.array:
    dtype, shape = getattr(mx, described["dtype"]), [int(n) for n in described["shape"]]
    if not isinstance(dtype, mx.Dtype) or any(n < 0 for n in shape):
        raise ValueError(f"no cache has {described}")
    data = read(int(np.prod(shape, dtype=np.int64)) * dtype.size)
    return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
