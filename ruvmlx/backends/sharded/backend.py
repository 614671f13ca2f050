"""This module computes one shard of a model with MLX. The outputs of o and down are summed over all ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from ...kv.cache import PagedCache
from ...kv.policy import TierPolicy
from ...lora.base_lora import BaseLoRA
from ...models.config.model import Model
from ...platform.mx import mx, nn
from ...sampling import Sampling
from ..base import HeadAdapter, KVCache
from ..mlx.backend import MLXBackend, dtype_name
from ..mlx.plain_cache import MLXCache
from ..mlx.stream import HeadChange, MLXTokenStream
from .caches import SharedCache
from .messages import digest
from .peers import Peers
from .shard import Part


class Summed(nn.Module):
    """A linear layer whose outputs are summed over all ranks. wire: the dtype of the sum, which all ranks
    must share."""

    def __init__(self, linear: nn.Module, group: mx.distributed.Group, wire: mx.Dtype):
        super().__init__()
        self.linear, self._group, self._wire = linear, group, wire

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        return mx.distributed.all_sum(y.astype(self._wire), group=self._group).astype(y.dtype)


class Shard(MLXBackend):
    """The MLX backend of one rank. `forward` must run at the same time on all ranks."""

    def __init__(self, model: Model, part: Part, group: mx.distributed.Group, **options: Any):
        """options: as for MLXBackend."""
        super().__init__(part.shard(model), **options)
        self.part, self.group = part, group
        self.wire = self.compute_dtype()
        self._wrap_sums()

    def use_wire(self, name: str) -> None:
        """Send sums in the dtype of rank 0, because all ranks must share it."""
        self.wire = getattr(mx, name)
        for owner, place in self._sums():
            setattr(owner, place, getattr(owner, place).linear)
        self._wrap_sums()

    def _sums(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield (owner, attribute) of each linear layer whose outputs are summed."""
        for layer in self._graph.model.layers:
            yield getattr(layer.self_attn, "plain", layer.self_attn), "o_proj"
            yield layer.mlp, "down_proj"

    def _wrap_sums(self) -> None:
        for owner, name in self._sums():
            setattr(owner, name, Summed(getattr(owner, name), self.group, self.wire))

    def set_lora(self, base: BaseLoRA | None) -> None:
        """Install this rank's part of a base LoRA of the whole model."""
        if base is not None:
            base.check(self.part.config)
        for owner, name in self._sums():
            setattr(owner, name, getattr(owner, name).linear)
        try:
            super().set_lora(self.part.lora(base))
        finally:
            self._wrap_sums()
        self.lora = base

    def lent_graph(self) -> nn.Module | None:
        """Return None, because training needs the whole model."""
        return None

    def forward(self, tokens: mx.array, layers: Sequence[Any]) -> mx.array:
        """Rank 0 embeds the tokens and sends the result to the other ranks: as a sum, to which the other
        ranks add zeros."""
        dtype = self.compute_dtype()
        if self.part.rank:
            given = mx.zeros((*tokens.shape, self.part.config.hidden_size), self.wire)
        else:
            given = self._graph.model.embed_tokens(tokens).astype(self.wire)
        given = mx.distributed.all_sum(given, group=self.group).astype(dtype)
        return self._forward(self._graph, tokens, layers, given)


class LeaderBackend(Shard):
    """The backend of rank 0, which the runtime uses like that of a whole model. It tells the other ranks of
    each step. handle: the number by which the other ranks know this model."""

    def __init__(self, model: Model, part: Part, peers: Peers, handle: int, **options: Any):
        assert peers.group is not None
        super().__init__(model, part, peers.group, **options)
        self.shape, self.peers, self.handle = model.config, peers, handle
        self.kernels = f"{self.kernels}, over {part.ranks} machines"

    def __del__(self) -> None:
        if "peers" in vars(self):
            self.peers.dropped.append(("model", self.handle))

    def go_without_pages(self, why: str) -> None:
        self._do_without_kernels(why)

    @property
    def wire_name(self) -> str:
        return dtype_name(self.wire)

    def set_lora(self, base: BaseLoRA | None) -> None:
        data = base.to_bytes() if base is not None else b""
        if base is not None:
            base.check(self.part.config)
        answers = self.peers.ask({"do": "lora", "model": self.handle}, data)
        assert all(facts["hash"] == digest(data) for facts, _ in answers)
        super().set_lora(base)

    def new_cache(self, policy: TierPolicy | None = None) -> SharedCache:  # type: ignore[override]
        cache = SharedCache(super().new_cache(policy), self.peers, self.handle)
        lengths = policy.lengths if policy and isinstance(cache.local, PagedCache) else None
        cache.tell("cache", policy=policy and policy.name, lengths=lengths)
        return cache

    @contextmanager
    def running(self, caches: Sequence[KVCache], n: int) -> Iterator[Any]:
        """Return a context manager for a step of all ranks. First make room here, because rank 0 alone
        decides the tiers of pages."""
        shared = cast(Sequence[SharedCache], caches)
        self.peers.check()
        levels = _reserve([cache.local for cache in shared], n)
        facts = {"ids": [cache.id for cache in shared], "n": n, "levels": levels}
        shared[0].tell("step", **facts)
        with self.peers.step(), super().running([cache.local for cache in shared], n) as held:
            yield held

    def _has_pages(self, cache: KVCache) -> bool:
        return isinstance(cast(SharedCache, cache).local, PagedCache)

    def stream(
        self, cache: KVCache, adapter: HeadAdapter | None, sampling: Sampling, limit: int
    ) -> MLXTokenStream:
        with mx.stream(self.device):
            change = self._micro.of(adapter)
        return SharedStream(self, cast(SharedCache, cache), change, sampling, limit)

    def _none(self, hidden: mx.array) -> list[mx.array]:
        """Return a part of the hidden states, so that MLX computes the sums of all layers on all ranks."""
        return [hidden[:1, :1]]


def _reserve(caches: Sequence[MLXCache | PagedCache], n: int) -> list[tuple[int, int]]:
    """Reserve room for n more tokens in each cache with pages. Return the level of the pool (kv/pool.py)
    before and after each reservation; the other ranks follow these levels."""
    paged = [cache for cache in caches if isinstance(cache, PagedCache)]
    levels = []
    try:
        for cache in paged:
            before = cache.pool.level
            cache.reserve(n)
            levels.append((before, cache.pool.level))
    except BaseException:
        for cache in paged:
            cache.abandon()
        raise
    return levels


class SharedStream(MLXTokenStream):
    """A stream of tokens of a model over several ranks. It waits for tokens outside of `running`, so it
    reports lost ranks itself."""

    def __init__(
        self,
        backend: LeaderBackend,
        cache: SharedCache,
        change: HeadChange | None,
        sampling: Sampling,
        limit: int,
    ):
        super().__init__(backend, cache, change, sampling, limit)
        self._peers = backend.peers

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        with self._peers.waiting():
            super().prefill(tokens, progress)

    def read(self) -> int:
        with self._peers.waiting():
            return super().read()

    def take_hidden(self) -> np.ndarray:
        with self._peers.waiting():
            return super().take_hidden()
