"""This module computes one shard of a model with MLX. The outputs of o and down are summed over all ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
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
from ..mlx.runner import MLXRunner
from ..mlx.stream import HeadChange, MLXTokenStream
from .caches import SharedCache
from .peers import PeerLinks
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


class Shard:
    """One rank's part of a model. `forward` must run at the same time on all ranks. local: the backend of
    this rank's part."""

    def __init__(self, model: Model, part: Part, group: mx.distributed.Group, **options: Any):
        """options: as for MLXBackend."""
        self.local = MLXBackend(part.shard(model), **options)
        self.part, self._group = part, group
        self._wire = self.local.compute_dtype()
        self._wrap_sums()

    @property
    def wire(self) -> str:
        """Return the name of the dtype of the sums."""
        return dtype_name(self._wire)

    def use_wire(self, name: str) -> None:
        """Send sums in the dtype of rank 0, because all ranks must share it."""
        self._unwrap_sums()
        self._wire = getattr(mx, name)
        self._wrap_sums()

    def _sums(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield (owner, attribute) of each linear layer whose outputs are summed."""
        layers = self.local.graph.model.layers
        for layer in {id(layer): layer for layer in layers}.values():  # a pretend model has layers repeatedly
            yield getattr(layer.self_attn, "plain", layer.self_attn), "o_proj"
            yield layer.mlp, "down_proj"

    def _wrap_sums(self) -> None:
        for owner, name in self._sums():
            setattr(owner, name, Summed(getattr(owner, name), self._group, self._wire))

    def _unwrap_sums(self) -> None:
        for owner, name in self._sums():
            setattr(owner, name, getattr(owner, name).linear)

    def set_lora(self, base: BaseLoRA | None) -> None:
        """Install this rank's part of a base LoRA of the whole model."""
        if base is not None:
            base.check(self.part.config)
        self._unwrap_sums()
        try:
            self.local.set_lora(self.part.lora(base))
        finally:
            self._wrap_sums()

    def forward(self, tokens: mx.array, layers: Sequence[Any]) -> mx.array:
        """Return hidden states as MLXBackend.forward. Rank 0 embeds the tokens and sends the result to the
        other ranks: as a sum, to which the other ranks add zeros."""
        dtype = self.local.compute_dtype()
        if self.part.rank:
            given = mx.zeros((*tokens.shape, self.part.config.hidden_size), self._wire)
        else:
            given = self.local.graph.model.embed_tokens(tokens).astype(self._wire)
        given = mx.distributed.all_sum(given, group=self._group).astype(dtype)
        return self.local.forward(tokens, layers, given)


class LeaderBackend(MLXRunner):
    """The backend of rank 0, which the runtime uses like that of a whole model. It tells the other ranks of
    each step. handle: the number by which the other ranks know this model."""

    name = "mlx"

    def __init__(self, model: Model, part: Part, peers: PeerLinks, handle: int, **options: Any):
        assert peers.group is not None
        self._peers, self._handle = peers, handle
        super().__init__(model.config, options["device"], options.get("threads"))
        self.shard = Shard(model, part, peers.group, **options)
        local = self.shard.local
        self.config, self.nbytes = model.config, local.nbytes
        self.lora: BaseLoRA | None = None
        self.pool, self.caveat, self.gpu_memory = local.pool, local.caveat, local.gpu_memory
        self.streams, self.kernels = local.streams, f"{local.kernels}, over {part.ranks} machines"

    def __del__(self) -> None:
        self._peers.dropped.append(("model", self._handle))

    def go_without_pages(self, why: str) -> None:
        """Use KV caches without pages from now on, because another rank has no pages."""
        self.pool, self.caveat = None, " ".join(filter(None, (self.caveat, why)))

    def set_lora(self, base: BaseLoRA | None) -> None:
        data = base.to_bytes() if base is not None else b""
        if base is not None:
            base.check(self.config)
        self._peers.ask({"do": "lora", "model": self._handle}, data)
        self.shard.set_lora(base)
        self.lora = base

    def new_cache(self, policy: TierPolicy | None = None) -> SharedCache:
        local = self.shard.local.new_cache(policy if self.pool is not None else None)
        cache = SharedCache(local, self._peers, self._handle)
        tiers = asdict(policy) if policy and isinstance(local, PagedCache) else None
        cache.tell("cache", policy=tiers)
        return cache

    def forward(self, tokens: mx.array, layers: Sequence[Any]) -> mx.array:
        return self.shard.forward(tokens, layers)

    def output_head(self, hidden: mx.array) -> mx.array:
        return self.shard.local.output_head(hidden)

    def compute_dtype(self) -> mx.Dtype:
        return self.shard.local.compute_dtype()

    @contextmanager
    def running(self, caches: Sequence[KVCache], n: int) -> Iterator[Any]:
        """Return a context manager for a step of all ranks. First make room here, because rank 0 alone
        decides the tiers of pages."""
        shared = cast(Sequence[SharedCache], caches)
        self._peers.check()
        levels = _reserve([cache.local for cache in shared], n)
        facts = {"ids": [cache.id for cache in shared], "n": n, "levels": levels}
        shared[0].tell("step", **facts)
        local = self.shard.local
        with self._peers.step(), local.running([cache.local for cache in shared], n) as held:
            yield held

    def stream(
        self, cache: KVCache, adapter: HeadAdapter | None, sampling: Sampling, limit: int, draws: int = 0
    ) -> MLXTokenStream:
        with mx.stream(self.device):
            change = self._micro.of(adapter)
        return SharedStream(self, self._peers, cast(SharedCache, cache), change, sampling, limit, draws)

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
        peers: PeerLinks,
        cache: SharedCache,
        change: HeadChange | None,
        sampling: Sampling,
        limit: int,
        draws: int = 0,
    ):
        super().__init__(backend, cache, change, sampling, limit, draws)
        self._peers = peers

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        with self._peers.waiting():
            super().prefill(tokens, progress)

    def read(self) -> int:
        with self._peers.waiting():
            return super().read()

    def take_hidden(self) -> np.ndarray:
        with self._peers.waiting():
            return super().take_hidden()
