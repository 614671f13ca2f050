"""This module has the MLX backend's KV caches without tiers and pages. In a cache without pages, the keys and
the values of a layer are two float arrays [1, n_kv_heads, capacity, head_dim], with room for `capacity`
tokens."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...kv.cache import Dump, KVStats
from ...kv.policy import F16
from ...kv.storage import Bytes
from ...platform import mlxlm
from ...platform.mx import mx

_cache = mlxlm.load("models.cache")
_base = mlxlm.load("models.base")


class SlidingKVCache:
    """A cache for a layer with a sliding window. The cache holds at least the tokens that the next token
    sees, in order, in a buffer. When the buffer is full, the newest window + slack tokens are copied to the
    front of a new buffer.

    When mlx-lm's RotatingKVCache is full, each new token overwrites its oldest token, so the cache cannot go
    back by removing its newest tokens. SlidingKVCache mostly also keeps `slack` tokens that are older than
    the window, so that its newest `slack` tokens can be removed, for example the last message if the user
    edits it. A token sees itself and the window - 1 tokens before it.
    """

    def __init__(self, window: int, slack: int = 256):
        self.window, self.slack = window, slack
        self.keys: mx.array | None = None  # [1, n_kv_heads, capacity, head_dim]
        self.values: mx.array | None = None
        # the number of tokens of the sequence, including those that the buffer no longer holds
        self.offset = 0
        self.end = 0  # the number of tokens that the buffer holds now

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int, int]:
        """Return (buffer of keys, buffer of values, number of tokens of the sequence, number of tokens in the
        buffer). mlx-lm's caches also have a property `state`."""
        return self.keys, self.values, self.offset, self.end

    @state.setter
    def state(self, value: tuple[mx.array | None, mx.array | None, int, int]) -> None:
        self.keys, self.values, self.offset, self.end = value

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None):
        """Return the mask that mlx-lm's graph applies to n new tokens. The result is None (no mask), "causal"
        (MLX itself applies the mask) or an array.

        window_size: the layer's own window in tokens; the mask uses the narrower of this window and the
            cache's window
        """
        past = min(self.end, self.window - 1)
        window = min(window_size or self.window, self.window)
        if past + n <= window and not (return_array and n > 1):
            return None if n == 1 else "causal"
        return _base.create_causal_mask(n, past, window_size=window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append T tokens. Return the keys and values that the new tokens see: at most window - 1 + T
        tokens."""
        n = keys.shape[2]
        past = min(self.end, self.window - 1)
        all_keys, all_values = self._make_room(keys, values)
        stop = self.end + n
        all_keys[..., self.end : stop, :] = keys
        all_values[..., self.end : stop, :] = values
        self.offset, self.end = self.offset + n, stop
        return all_keys[..., stop - n - past : stop, :], all_values[..., stop - n - past : stop, :]

    def _make_room(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the buffers of keys and values, which have room for the new tokens after their first `end`
        tokens. If a buffer is full, a new buffer replaces it and begins with the newest window + slack tokens
        of the old buffer."""
        n = keys.shape[2]
        if self.keys is None or self.values is None or self.end + n > self.keys.shape[2]:
            keep, room = min(self.end, self.window + self.slack), max(n, self.slack)
            self.keys = _shift_tokens(self.keys, self.end - keep, self.end, room, keys)
            self.values = _shift_tokens(self.values, self.end - keep, self.end, room, values)
            self.end = keep
        return self.keys, self.values

    def can_trim(self, n: int) -> bool:
        """Return True if, after the newest n tokens are removed, the buffer still has all tokens that the
        next token sees."""
        left = self.end - n
        return n <= self.offset and left >= min(self.offset - n, self.window - 1)

    def trim(self, n: int) -> int:
        self.offset -= n
        self.end -= n
        return n

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.keys, self.values) if a is not None)


def _shift_tokens(old: mx.array | None, start: int, stop: int, room: int, like: mx.array) -> mx.array:
    """Return old[start:stop] followed by `room` empty tokens."""
    b, h, _, d = like.shape
    empty = mx.zeros((b, h, room, d), like.dtype)
    return empty if old is None else mx.concatenate([old[..., start:stop, :], empty], axis=2)


class MLXCache:
    """A cache of the keys and values of one sequence, for all layers. Only one thread at a time can use the
    cache."""

    def __init__(self, n_layers: int, sliding_window: int | None):
        make = (lambda: SlidingKVCache(sliding_window)) if sliding_window else _cache.KVCache
        self.layers = [make() for _ in range(n_layers)]

    @property
    def offset(self) -> int:
        return self.layers[-1].offset

    def fork(self) -> "MLXCache":
        """Return a second cache with the same tokens. Both caches share the arrays until MLX copies an array
        at the first write."""
        other = copy.copy(self)
        other.layers = [_fork_layer(layer) for layer in self.layers]
        return other

    def dump(self) -> Dump:
        """Return the bytes of the keys, then of the values, of one layer after the other, without the unused
        ends of the buffers."""
        some, held = self.layers[0].keys, self._stored_tokens
        shape = [some.shape[1], held, some.shape[3]] if some is not None else [0, 0, 0]
        dtype = str(some.dtype) if some is not None else ""
        parts = (_bytes(a[0, :, :held]) for a in self.arrays())
        nbytes = int(np.prod(shape)) * some.dtype.size * len(self.arrays()) if some is not None else 0
        return Dump({"offset": self.offset, "shape": shape, "dtype": dtype}, nbytes, parts)

    def restore(self, facts: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
        offset, shape, dtype = facts["offset"], facts["shape"], _DTYPES[facts["dtype"]]
        if len(shape) != 3 or min(shape) < 1 or shape[1] > offset:
            raise ValueError(f"no cache has {facts}")
        nbytes = int(np.prod(shape)) * dtype.size
        for layer in self.layers:
            layer.keys, layer.values = (_array(read(nbytes), dtype, shape) for _ in ("keys", "values"))
            layer.offset = offset
            if isinstance(layer, SlidingKVCache):
                layer.end = shape[1]

    @property
    def _stored_tokens(self) -> int:
        last = self.layers[-1]
        return last.end if isinstance(last, SlidingKVCache) else last.offset

    @property
    def room(self) -> int:
        """Return the number of tokens that can be appended before new buffers are needed."""
        keys = self.layers[-1].keys
        return 0 if keys is None else keys.shape[2] - self._stored_tokens

    def retract(self, n: int) -> None:
        """Remove the newest n tokens. The caller appended these n tokens one by one within `room`, as for
        PagedCache.retract."""
        for layer in self.layers:
            layer.trim(n)

    def stats(self) -> KVStats:
        plain = 2 * sum(a.size for a in self.arrays())
        return KVStats.all_f16(F16.name, self._stored_tokens, self.nbytes, plain)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def trim(self, n: int) -> bool:
        if not all(self._can_trim(layer, n) for layer in self.layers):
            return False
        for layer in self.layers:
            layer.trim(n)
        return True

    @contextmanager
    def running(self) -> Iterator["MLXCache"]:
        """Return a context manager for one step of the graph that appends tokens. If the step fails, all
        layers go back to the number of tokens before the step."""
        start = self.offset
        try:
            yield self
        except BaseException:
            for layer in self.layers:
                layer.trim(layer.offset - start)
            raise

    def arrays(self) -> Sequence[mx.array]:
        return [a for layer in self.layers for a in (layer.keys, layer.values) if a is not None]

    @staticmethod
    def _can_trim(layer, n: int) -> bool:
        return layer.can_trim(n) if isinstance(layer, SlidingKVCache) else 0 <= n <= layer.offset


_DTYPES = {str(dtype): dtype for dtype in (mx.float16, mx.bfloat16, mx.float32)}


def _bytes(a: mx.array) -> Bytes:
    return np.array(mx.contiguous(a).reshape(-1).view(mx.uint8))


def _array(data: bytes, dtype: mx.Dtype, shape: Sequence[int]) -> mx.array:
    """Return an array [1, n_kv_heads, T, head_dim] from its bytes."""
    return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(1, *shape)


def _fork_layer(layer):
    other = copy.copy(layer)
    if layer.keys is not None:
        other.keys, other.values = mx.array(layer.keys), mx.array(layer.values)
    return other
