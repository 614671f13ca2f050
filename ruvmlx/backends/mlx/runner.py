"""This module is the shared part of the two MLX backends, MLXBackend and AnyBackend. The module runs prompts
in chunks, evaluates MLX's arrays, and adds the output head adapter's change to the logits."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np

from ...kv.cache import PagedCache
from ...models.config.model import ModelShape
from ...platform import cpu
from ...platform.gpu import gpu
from ...platform.mx import BLAS, mx
from ...sampling import Sampling
from ..base import PAUSED, Adapters, HeadAdapter, KVCache, Step, check_tokens, each, finite
from .stream import HeldChange, MLXTokenStream, StreamCache

# by device: the maximum number of prompt tokens in one prefill step
CHUNK = {"cpu": 256, "metal": 2048, "cuda": 2048}


def default_device() -> str:
    """Return the device on which MLX computes in this process: "metal", "cuda" or "cpu"."""
    return gpu.kind or "cpu"


class MLXRunner(ABC):
    """This class implements most methods of base.Backend that compute something. A subclass provides the
    model's graph, the caches, `decode_batch` and `set_lora`."""

    def __init__(self, shape: ModelShape, kind: str, threads: int | None, chunk: int = 0):
        """kind: the device, as `default_device` names it. chunk: the maximum number of prompt tokens in one
        step; 0: CHUNK[kind]."""
        self.shape, self.chunk = shape, chunk or CHUNK[kind]
        self.device = mx.Device(mx.cpu) if kind == "cpu" else gpu.device
        self._on_cpu = kind == "cpu"
        # measures the CPU load of other processes, here from before the weights are loaded
        self._load = cpu.OtherLoad()
        self._micro = HeldChange()
        if threads:
            BLAS.set_threads(threads)

    # -- abstract methods ----------------------------------------------------------------------------

    @abstractmethod
    def new_cache(self) -> Any:
        """Return an empty cache, as in base.Backend."""

    @abstractmethod
    def forward(self, tokens: mx.array, layers: Sequence[Any]) -> mx.array:
        """Return hidden states [B, L, D] after the final norm of tokens [B, L]. layers: one cache for each
        layer."""

    @abstractmethod
    def output_head(self, hidden: mx.array) -> mx.array:
        """Return logits [T, V] of hidden states [T, D]."""

    @abstractmethod
    def running(self, caches: Sequence[KVCache], n: int) -> AbstractContextManager[Any]:
        """Return a context manager for a step that appends n tokens to each cache."""

    @abstractmethod
    def compute_dtype(self) -> mx.Dtype:
        """Return the dtype of the hidden states."""

    # -- base.Backend --------------------------------------------------------------------------------

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        adapter: HeadAdapter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Step:
        """Append tokens [T] to the cache and return the Step after the last token. Only the last token goes
        through the output head, because the logits of the other tokens are not needed."""
        check_tokens(tokens, self.shape.vocab_size)
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            last = start + len(part) == len(tokens)
            outputs = self._run(part, cache, self._last if last else self._none)
            mx.clear_cache()
            if progress:
                progress(start + len(part))
        return _step(outputs, adapter)

    def stream(
        self, cache: KVCache, adapter: HeadAdapter | None, sampling: Sampling, limit: int, draws: int = 0
    ) -> MLXTokenStream:
        """Return a stream of a reply's tokens, as base.Streaming describes."""
        with mx.stream(self.device):
            change = self._micro.of(adapter)
        return MLXTokenStream(self, cast(StreamCache, cache), change, sampling, limit, draws)

    def decode(self, token: int, cache: KVCache, adapter: HeadAdapter | None = None) -> Step:
        check_tokens([token], self.shape.vocab_size)
        return _step(self._run([token], cache, self._last), adapter)

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        """Append one token to each cache and return the steps. All caches with KV pages run in one step of
        the graph, and all plain caches (without pages) in another step."""
        check_tokens(tokens, self.shape.vocab_size)
        steps: dict[int, Step] = {}
        for paged in (True, False):
            rows = [i for i, cache in enumerate(caches) if _has_pages(cache) == paged]
            if rows:
                outputs = self._run_batch([tokens[i] for i in rows], [caches[i] for i in rows])
                steps |= dict(zip(rows, map(Step, *outputs), strict=True))
        logits = [steps[i].logits for i in range(len(tokens))]
        for row, step, own in zip(
            logits, map(steps.get, range(len(tokens))), each(adapter, tokens), strict=True
        ):
            if own is not None and step is not None:
                own.add_to_logits(row, step.hidden)
            finite(row)
        return [steps[i] for i in range(len(tokens))]

    def _run_batch(self, tokens: Sequence[int], caches: Sequence[KVCache]) -> list[np.ndarray]:
        """Run one decode step. Return logits [B, V] and hidden [B, D]. If the step fails, the caches keep
        their numbers of tokens."""
        self.adapt_threads()
        with mx.stream(self.device), self.running(caches, 1) as held:
            rows = mx.array(list(tokens), mx.uint32)[:, None]
            outputs = self._all(self.forward(rows, held.layers)[:, 0])
            mx.eval(*outputs, *held.arrays())
        return [np.array(a, copy=False) for a in outputs]

    def verify(self, tokens: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None) -> np.ndarray:
        """Return the logits [T, V] after each of the tokens [T]."""
        check_tokens(tokens, self.shape.vocab_size)
        parts = [
            self._run(tokens[i : i + self.chunk], cache, self._all) for i in range(0, len(tokens), self.chunk)
        ]
        logits = np.concatenate([logits for logits, _ in parts])
        if adapter is not None:
            adapter.add_to_logits(logits, np.concatenate([hidden for _, hidden in parts]))
        return finite(logits)

    def hidden_states(
        self,
        tokens: Sequence[int],
        pause: Callable[[], None] | None = None,
        cache: KVCache | None = None,
    ) -> np.ndarray:
        check_tokens(tokens, self.shape.vocab_size)
        cache, states = cache or self.new_cache(), []
        size = min(self.chunk, PAUSED) if pause else self.chunk
        for start in range(0, len(tokens), size):
            states.append(self._run(tokens[start : start + size], cache, self._hidden_alone)[0])
            if pause:
                pause()
        return np.concatenate(states)

    def head(self, hidden: np.ndarray) -> np.ndarray:
        with mx.stream(self.device):
            x = mx.array(np.asarray(hidden, np.float32)).astype(self.compute_dtype())
            return _numpy(self.output_head(x))

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        return self.hidden_states(tokens).mean(axis=0)

    def _run(self, tokens: Sequence[int], cache: KVCache, read: Callable) -> list[np.ndarray]:
        """Append tokens to the cache, call `read` with their hidden states [T, D], and return the arrays of
        `read` as evaluated NumPy arrays. After a failure the cache does not hold the new tokens (an AnyCache
        is then empty)."""
        self.adapt_threads()
        with mx.stream(self.device), self.running([cache], len(tokens)) as held:
            hidden = self.forward(mx.array([list(tokens)], mx.uint32), held.layers)[0]
            outputs = read(hidden)
            mx.eval(*outputs, *held.arrays())
        return [np.array(a, copy=False) for a in outputs]

    # -- inside ------------------------------------------------------------------------------------

    def adapt_threads(self) -> None:
        """On a CPU, limit the threads of matrix products to the cores that other processes leave free (known
        only on Linux)."""
        if self._on_cpu:
            BLAS.adapt(self._load.cores())

    def _last(self, hidden: mx.array) -> list[mx.array]:
        """Return the logits [V] and the hidden state [D] of the last token of `hidden` [T, D]."""
        last = hidden[-1:]
        return [self.output_head(last)[0].astype(mx.float32), last[0].astype(mx.float32)]

    def _all(self, hidden: mx.array) -> list[mx.array]:
        return [self.output_head(hidden).astype(mx.float32), hidden.astype(mx.float32)]

    def _hidden_alone(self, hidden: mx.array) -> list[mx.array]:
        return [hidden.astype(mx.float32)]

    def _none(self, hidden: mx.array) -> list[mx.array]:
        return []


def _has_pages(cache: KVCache) -> bool:
    """Return True if a cache has pages. A cache of several processes has this process's part as `local`."""
    return isinstance(getattr(cache, "local", cache), PagedCache)


def _step(outputs: Sequence[np.ndarray], adapter: HeadAdapter | None) -> Step:
    logits, hidden = outputs
    if adapter is not None:
        adapter.add_to_logits(logits, hidden)
    return Step(finite(logits), hidden)


def _numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))
