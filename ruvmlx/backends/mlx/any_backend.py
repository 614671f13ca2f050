"""Runs any architecture that mlx-lm runs, by mlx-lm's own model and caches.

Ratings work: MicroLoRA needs the final hidden states and the logits, nothing else. It is added to the logits
as the model returns them, after the scale or cap that some models have. KV tiers, a base LoRA, training in
the background and ratings of other matrices than the head need a decoder of our own; they are missing here.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np

from ...errors import AdapterMismatch
from ...kv.policy import TierPolicy
from ...lora.base_lora import BaseLoRA
from ...models.model import Model, without
from ...platform import cpu
from ...platform.mx import BLAS, mx
from ...sampling import Sampling
from ..base import PAUSED, Adapters, HeadAdapter, KVCache, Step, check_tokens, each, finite
from . import graph
from .any_cache import AnyCache
from .any_graph import SplitGraph
from .any_load import load_graph
from .backend import CHUNK, default_device
from .stream import HeldChange, MLXTokenStream


class AnyBackend:
    """Implements base.Backend and base.Streaming."""

    name = "mlx"
    pool = None

    def __init__(self, model: Model, device: str | None = None, threads: int | None = None):
        kind = device or default_device()
        self.shape = model.shape
        self.lora: BaseLoRA | None = None
        self.chunk = CHUNK[kind]
        self.device = mx.Device(mx.cpu) if kind == "cpu" else mx.Device(mx.gpu)
        self.streams = kind != "cpu"  # on a CPU a step ahead would compete with the current step for cores
        self.kernels = f"cpu+{BLAS.name}, mlx-lm" if kind == "cpu" else f"{kind}, mlx-lm"
        self.caveat = without(model.shape)
        self._load = cpu.OtherLoad()
        self._micro = HeldChange()
        if threads:
            BLAS.set_threads(threads)
        with mx.stream(self.device):
            loaded = load_graph(model, float32=kind == "cpu")
            self.nbytes = sum(a.nbytes for a in graph.parameters(loaded).values())
            self._graph = SplitGraph(loaded, model.shape)
            mx.clear_cache()

    def set_lora(self, base: BaseLoRA | None) -> None:
        if base is not None:
            raise AdapterMismatch(
                f"a base LoRA was trained for a Llama-like model; {self.shape.model_type} has none. "
                "Use another adapter: --adapter NAME."
            )

    def new_cache(self, policy: TierPolicy | None = None) -> AnyCache:
        """The model's own caches, whatever the policy."""
        return AnyCache.of(self._graph.model)

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        adapter: HeadAdapter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Step:
        self._check(tokens)
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            hidden = self._run(part, cache)
            mx.clear_cache()
            if progress:
                progress(start + len(part))
        return self._step(hidden[-1:], adapter)

    def stream(
        self, cache: KVCache, adapter: HeadAdapter | None, sampling: Sampling, limit: int
    ) -> MLXTokenStream:
        """base.Streaming"""
        with mx.stream(self.device):
            change = self._micro.of(adapter)
        return MLXTokenStream(self, cast(AnyCache, cache), change, sampling, limit)

    def decode(self, token: int, cache: KVCache, adapter: HeadAdapter | None = None) -> Step:
        self._check([token])
        return self._step(self._run([token], cache), adapter)

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        """One after the other: mlx-lm's caches of a kind can be joined, but not those of every model."""
        rows = zip(tokens, caches, each(adapter, tokens), strict=True)
        return [self.decode(token, cache, own) for token, cache, own in rows]

    def verify(self, tokens: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None) -> np.ndarray:
        self._check(tokens)
        starts = range(0, len(tokens), self.chunk)
        hidden = np.concatenate([self._run(tokens[i : i + self.chunk], cache) for i in starts])
        logits = self.head(hidden)
        if adapter is not None:
            adapter.add_to_logits(logits, hidden)
        return finite(logits)

    def hidden_states(self, tokens: Sequence[int], pause: Callable[[], None] | None = None) -> np.ndarray:
        self._check(tokens)
        cache, states, size = self.new_cache(), [], min(self.chunk, PAUSED) if pause else self.chunk
        for start in range(0, len(tokens), size):
            states.append(self._run(tokens[start : start + size], cache))
            if pause:
                pause()
        return np.concatenate(states)

    def head(self, hidden: np.ndarray) -> np.ndarray:
        with mx.stream(self.device):
            logits = self.output_head(mx.array(np.asarray(hidden, np.float32)))
            return np.array(logits.astype(mx.float32))

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        return self.hidden_states(tokens).mean(axis=0)

    # -- for MLXTokenStream --------------------------------------------------------------------------

    def forward(self, tokens: mx.array, layers: Sequence[Any]) -> mx.array:
        """tokens [B, L] -> hidden states [B, L, D]."""
        return self._graph.hidden(tokens, layers)

    def output_head(self, hidden: mx.array) -> mx.array:
        """hidden [T, D] -> logits [T, V]."""
        return self._graph.logits(hidden.astype(self._graph.dtype)[None])[0]

    def adapt_threads(self) -> None:
        """Leave the CPU cores that other processes use now to them."""
        if not self.streams:
            BLAS.adapt(self._load.cores())

    def running(self, caches: Sequence[KVCache], n: int) -> AbstractContextManager[AnyCache]:
        """Context for a step of n tokens in one cache."""
        return cast(AnyCache, caches[0]).running(n)

    # ------------------------------------------------------------------------------------------------

    def _check(self, tokens: Sequence[int]) -> None:
        check_tokens(tokens, self.shape.vocab_size)

    def _run(self, tokens: Sequence[int], cache: KVCache) -> np.ndarray:
        """Append tokens [T] to the cache -> hidden [T, D]."""
        self.adapt_threads()
        with mx.stream(self.device), self.running([cache], len(tokens)) as held:
            hidden = self.forward(mx.array([list(tokens)], mx.uint32), held.layers)[0].astype(mx.float32)
            mx.eval(hidden, *held.arrays())
        return np.array(hidden)

    def _step(self, hidden: np.ndarray, adapter: HeadAdapter | None) -> Step:
        """hidden [1, D] -> the Step after it."""
        logits, last = self.head(hidden)[0], hidden[0]
        if adapter is not None:
            adapter.add_to_logits(logits, last)
        return Step(finite(logits), last)
