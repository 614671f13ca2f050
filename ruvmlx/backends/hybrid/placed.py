"""This module lets one kind of work use the side of the hybrid backend on which it is placed."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ...errors import SideFailed
from ...kv.policy import TierPolicy
from ...kv.pool import PagePool
from ...lora.base_lora import BaseLoRA
from ..base import Adapters, HeadAdapter, KVCache, Step
from ..coarse import decode_coarse
from .placement import Placement
from .side import DECODE, HEAD, NO_FUNCTION, READ, CallerFunction, Side, SideCall

T = TypeVar("T")


class PlacedBackend:
    """A backend (base.Backend) for one kind of work. A call without a cache runs on the side where the work
    is placed; if this side fails, the call runs again on the other side. A call with a cache runs on the side
    that made the cache; if this side fails, the call raises SideFailed, and the caller reads the tokens again
    into a new cache.

    The base LoRA belongs to the kind of work: each call installs it on its side before it runs."""

    name, caveat, kernels = "hybrid", "", ""
    pool: PagePool | None = None

    def __init__(self, placement: Placement, kind: str):
        self.placement, self.kind = placement, kind
        self.lora: BaseLoRA | None = None
        sides = placement.main.backend, placement.other.backend
        self.chunk = sides[0].chunk
        self.nbytes = sum(side.nbytes for side in sides)  # each side has its own copy of the weights

    def set_lora(self, base: BaseLoRA | None) -> None:
        before, self.lora = self.lora, base
        try:
            self.run(lambda backend: None)
        except BaseException:
            self.lora = before
            raise

    def new_cache(self, policy: TierPolicy | None = None) -> KVCache:
        return self.placement.side_of(self.kind).backend.new_cache(policy)

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        adapter: HeadAdapter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Step:
        told = CallerFunction(progress)
        return self.run(
            lambda b: b.prefill(tokens, cache, adapter, told.call), READ, len(tokens), cache, told=told
        )

    def decode(self, token: int, cache: KVCache, adapter: HeadAdapter | None = None) -> Step:
        return self.run(lambda b: b.decode(token, cache, adapter), DECODE, 1, cache)

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        return self.run(lambda b: b.decode_batch(tokens, caches, adapter), DECODE, 1, *caches)

    def decode_coarse(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        return self.run(lambda b: decode_coarse(b, tokens, caches, adapter), DECODE, 1, *caches)

    def verify(self, tokens: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None) -> np.ndarray:
        return self.run(lambda b: b.verify(tokens, cache, adapter), READ, len(tokens), cache)

    def hidden_states(
        self,
        tokens: Sequence[int],
        pause: Callable[[], None] | None = None,
        cache: KVCache | None = None,
    ) -> np.ndarray:
        told, caches = CallerFunction(pause), [] if cache is None else [cache]
        return self.run(
            lambda b: b.hidden_states(tokens, told.call, cache), READ, len(tokens), *caches, told=told
        )

    def head(self, hidden: np.ndarray) -> np.ndarray:
        rows = hidden.size // hidden.shape[-1]
        return self.run(lambda b: b.head(hidden), HEAD, rows)

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        return self.hidden_states(tokens).mean(axis=0)

    def is_lost(self, cache: KVCache) -> bool:
        """Return True if no side that works made this cache."""
        sides = self.placement.main, self.placement.other
        return all(side.failure is not None or not side.owns(cache) for side in sides)

    def run(
        self,
        work: Callable[[Any], T],
        operation: str = "",
        tokens: int = 0,
        *caches: KVCache,
        told: CallerFunction = NO_FUNCTION,
    ) -> T:
        """Return work(backend of a side), and measure its cost. operation: "" to measure nothing."""
        job = SideCall(self.kind, self.lora, operation, tokens, told)
        side = self._side_of_caches(caches) if caches else self.placement.side_of(self.kind)
        try:
            return side.run(job, work)
        except SideFailed:
            living = self.placement.living()
            if caches:
                raise
        return living.run(job, work)

    def _side_of_caches(self, caches: Sequence[KVCache]) -> Side:
        for side in (self.placement.living(), self.placement.other):
            if all(map(side.owns, caches)):
                return side
        raise SideFailed("the caches of these sequences are on two sides; read their tokens again.")
