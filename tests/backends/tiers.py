"""The judge of tiered caches: plain softmax attention over keys and values in float32.

Whole pages go through the twin quantisers, by the policy, when a call begins and when a chunk is in.
"""

import copy

import numpy as np

from ruvmlx.backends.mlx.kernels import demote
from ruvmlx.backends.mlx.kernels.pages import unpack
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.platform.mx import mx
from ruvmlx.tiers import COLD, HOT, PAGE, WARM


class JudgedLayer:
    """One layer's keys and values [1, n_kv_heads, T, head_dim], in place of a plain cache's layer."""

    def __init__(self, policy: TierPolicy, window: int):
        self.policy, self.window = policy, window
        self.keys = self.values = np.zeros((1, 1, 0, 1), np.float32)
        self.offset = 0
        self.tiers: list[int] = []
        self.warm: dict[int, mx.array] = {}  # bytes of the warm pages

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None):
        new = np.arange(self.offset, self.offset + n)[:, None]
        old = np.arange(self._first(self.offset), self.offset + n)
        return mx.array((old <= new) & (new - old < (self.window or self.offset + n)))

    def _first(self, offset: int) -> int:
        """The oldest token that a call at `offset` sees."""
        return max(0, offset + 1 - self.window) if self.window else 0

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        new = [np.array(x.astype(mx.float16)).astype(np.float32) for x in (keys, values)]
        if not self.offset:
            self.keys, self.values = new
        else:
            self.lower_what_is_due()
            old = self.keys, self.values
            self.keys, self.values = (np.concatenate(pair, axis=2) for pair in zip(old, new, strict=True))
        first, self.offset = self._first(self.offset), self.keys.shape[2]
        seen = tuple(mx.array(x[:, :, first:]).astype(keys.dtype) for x in (self.keys, self.values))
        if keys.shape[2] > 1:
            self.lower_what_is_due()
        return seen

    def lower_what_is_due(self) -> None:
        cold, low = self.policy.counts(self.offset)
        self.tiers += [HOT] * (self.offset // PAGE - len(self.tiers))
        for page in range(low):
            while self.tiers[page] > (COLD if page < cold else WARM):
                self._lower(page)

    def _lower(self, page: int) -> None:
        """One page, one tier down; a cold page's keys are turned back."""
        tier, d, here = self.tiers[page], self.keys.shape[3], np.s_[:, :, PAGE * page : PAGE * (page + 1)]
        if tier == HOT:
            both = mx.array(np.stack([self.keys[here][0], self.values[here][0]], axis=1))
            hot = both.astype(mx.float16).reshape(len(both), -1).view(mx.uint8)
            self.warm[page] = demote.demote_ops(hot, d, WARM)
            k, v = unpack(self.warm[page], WARM, d)
        else:
            k, v = unpack(demote.demote_ops(self.warm.pop(page), d, COLD), COLD, d)
            k = demote.rotate(k)
        self.keys[here], self.values[here] = np.array(k)[None], np.array(v)[None]
        self.tiers[page] = tier - 1


class Judge:
    """A backend's own graph over JudgedLayers: the same calls, the other attention."""

    def __init__(self, backend, policy: TierPolicy):
        self.backend = backend
        config = backend.config
        self.layers = [JudgedLayer(policy, config.sliding_window or 0) for _ in range(config.n_layers)]

    def logits(self, tokens) -> np.ndarray:
        """[T, V] of one call of T tokens."""
        backend = self.backend
        with mx.stream(backend.device):
            hidden = backend.forward(mx.array([list(tokens)], mx.uint32), self.layers)[0]
            return np.array(backend._all(hidden)[0])

    def begin(self) -> None:
        """What a call that breaks has done."""
        for layer in self.layers:
            if layer.offset:
                layer.lower_what_is_due()

    def fork(self) -> "Judge":
        other = copy.copy(self)
        other.layers = copy.deepcopy(self.layers)
        return other

    def trim(self, offset: int) -> None:
        for layer in self.layers:
            layer.offset = offset
            layer.keys, layer.values = layer.keys[:, :, :offset], layer.values[:, :, :offset]
            del layer.tiers[-(-offset // PAGE) :]
