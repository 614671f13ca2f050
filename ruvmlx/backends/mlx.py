"""The MLX backend: mlx-lm's Llama and Mistral graphs on Metal, CUDA or the CPU.

MLX's default streams belong to threads, so every call runs on the calling thread's own: a backend and its
caches may move from one thread to another, but only one call may run at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, cast

import numpy as np

from ..errors import RuvmlxError, UsageError
from ..kv.cache import PagedCache
from ..kv.mlx import MLXStorage
from ..kv.policy import F16, TierPolicy
from ..kv.pool import PagePool
from ..lora.base import BaseLoRA
from ..models.base import Model, Weights
from . import changes, cpu, cpu_layers, graph, tiered
from .base import PAUSED, HeadAdapter, KVCache, Step
from .kvcache import MLXCache
from .mx import BLAS, mx, nn

CHUNK = {"cpu": 256, "metal": 512, "cuda": 512}  # prompt tokens per prefill step


class MLXBackend:
    """Runs one model; `plan` says how its weights are held."""

    name = "mlx"

    def __init__(self, model: Model, device: str | None = None, threads: int | None = None, chunk: int = 0):
        self.config = model.config
        kind = device or default_device()
        self.chunk = chunk or CHUNK[kind]
        self._device = mx.Device(mx.cpu if kind == "cpu" else mx.gpu)
        self._load = cpu.OtherLoad()  # its first reading covers the loading below
        if threads:
            BLAS.set_threads(threads)
        with mx.stream(self._device):
            weights = model.load_weights()
            how = plan(weights, kind)
            self._graph = graph.build(model.config, weights, how.dtype, how.unpack)
            if how.own_layers:
                cpu_layers.install(self._graph, model.config)
            tiered.install(self._graph, model.config)
            mx.clear_cache()  # what unpacking and joining left behind
        self.nbytes = sum(a.nbytes for a in graph.parameters(self._graph).values())
        self._forward = cpu_layers.forward if how.own_layers else _forward
        self.pool = PagePool(MLXStorage(model.config))
        self.kernels = f"cpu+{BLAS.name}" if kind == "cpu" else kind
        self.lora: BaseLoRA | None = None
        self._head_change: changes.Change | None = None

    def set_lora(self, base: BaseLoRA | None) -> None:
        if base is not None:
            base.check(self.config)
        with mx.stream(self._device):
            self._head_change = changes.install(self._graph, base, self._compute_dtype())
        self.lora = base

    def lent_graph(self) -> nn.Module | None:
        """mlx-lm's modules and the frozen weights, to train on; None where our own modules replace them."""
        return None if self._forward is cpu_layers.forward else self._graph

    def new_cache(self, policy: TierPolicy | None = None) -> MLXCache | PagedCache:
        """Without a policy, or with F16: in the precision that the backend computes in."""
        window = self.config.sliding_window
        if policy is None or policy == F16:
            return MLXCache(self.config.n_layers, window)
        return PagedCache(self.pool, policy, window or 0)

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        adapter: HeadAdapter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Step:
        """tokens [T] -> the Step after the last; only that position goes through the output head."""
        self._validate(tokens)
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            last = start + len(part) == len(tokens)
            outputs = self._run(part, cache, self._last if last else self._none)
            if progress:
                progress(start + len(part))
        return _step(outputs, adapter)

    def decode(self, token: int, cache: KVCache, adapter: HeadAdapter | None = None) -> Step:
        self._validate([token])
        return _step(self._run([token], cache, self._last), adapter)

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: HeadAdapter | None = None
    ) -> list[Step]:
        """The slow twin: one after the other."""
        return [self.decode(token, cache, adapter) for token, cache in zip(tokens, caches, strict=True)]

    def verify(self, tokens: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None) -> np.ndarray:
        """tokens [T] -> logits [T, V]: what follows each of them."""
        self._validate(tokens)
        parts = [
            self._run(tokens[i : i + self.chunk], cache, self._all) for i in range(0, len(tokens), self.chunk)
        ]
        logits = np.concatenate([logits for logits, _ in parts])
        if adapter is not None:
            adapter.add_to_logits(logits, np.concatenate([hidden for _, hidden in parts]))
        return _finite(logits)

    def hidden_states(self, tokens: Sequence[int], pause: Callable[[], None] | None = None) -> np.ndarray:
        self._validate(tokens)
        cache, states, size = self.new_cache(), [], min(self.chunk, PAUSED) if pause else self.chunk
        for start in range(0, len(tokens), size):
            states.append(self._run(tokens[start : start + size], cache, self._hidden)[0])
            if pause:
                pause()
        return np.concatenate(states)

    def head(self, hidden: np.ndarray) -> np.ndarray:
        with mx.stream(self._device):
            x = mx.array(np.asarray(hidden, np.float32)).astype(self._compute_dtype())
            return _numpy(self._head(x))

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        return self.hidden_states(tokens).mean(axis=0)

    def _run(self, tokens: Sequence[int], cache: KVCache, read: Callable) -> list[np.ndarray]:
        """Append tokens to the cache and evaluate; on any failure the cache is as it was."""
        BLAS.adapt(self._load.cores())
        with mx.stream(self._device), self._running(cache, len(tokens)) as held:
            hidden = self._forward(self._graph, mx.array([list(tokens)], mx.uint32), held.layers)[0]
            outputs = read(hidden)
            mx.eval(*outputs, *held.arrays())
        return [np.array(a, copy=False) for a in outputs]

    def _running(self, cache: KVCache, n: int) -> AbstractContextManager[MLXCache | tiered.Running]:
        if isinstance(cache, PagedCache):
            return tiered.running(cache, n, self.config)
        return cast(MLXCache, cache).running()

    def _last(self, hidden: mx.array) -> list[mx.array]:
        """[T, D] -> logits [V], hidden [D] of the last token."""
        last = hidden[-1:]
        return [self._head(last)[0].astype(mx.float32), last[0].astype(mx.float32)]

    def _all(self, hidden: mx.array) -> list[mx.array]:
        return [self._head(hidden).astype(mx.float32), hidden.astype(mx.float32)]

    def _hidden(self, hidden: mx.array) -> list[mx.array]:
        return [hidden.astype(mx.float32)]

    def _none(self, hidden: mx.array) -> list[mx.array]:
        return []

    def _head(self, hidden: mx.array) -> mx.array:
        logits = graph.head(self._graph, hidden)
        return logits if self._head_change is None else logits + self._head_change(hidden)

    def _compute_dtype(self) -> mx.Dtype:
        return self._graph.model.norm.weight.dtype

    def _validate(self, tokens: Sequence[int]) -> None:
        if not len(tokens):
            raise UsageError("nothing to run: the prompt has no tokens")
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.config.vocab_size:
            bad, size = low if low < 0 else high, self.config.vocab_size
            raise UsageError(f"token {bad} is outside the vocabulary of {size} tokens")


def _forward(model: nn.Module, tokens: mx.array, caches: Sequence) -> mx.array:
    """tokens [1, L] -> hidden [1, L, D] after the final norm, by mlx-lm's own graph."""
    return model.model(tokens, caches)


def default_device() -> str:
    """ "metal", "cuda" or "cpu"."""
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else "cpu"


class Plan(NamedTuple):
    """How a model's weights are held."""

    dtype: mx.Dtype  # of everything that is not packed
    unpack: bool
    own_layers: bool  # cpu_layers instead of mlx-lm's; float32 only


def plan(weights: Weights, device: str) -> Plan:
    """A GPU keeps what is stored. A CPU unpacks to float32 when that fits a quarter of RAM.

    MLX's packed product on a CPU is slow (starter model: 11 against 60 tok/s), with 16-bit scales 40 times
    slower still: what stays packed gets float32 scales. Plain 16-bit weights become float32 up to half of
    RAM.
    """
    stored = _stored_dtype(weights)
    if device != "cpu":
        return Plan(stored, False, False)
    packed = any(w.dtype == np.uint32 for w in weights.values())
    share = 4 * sum(map(_numbers, weights.values())) / cpu.total_memory()
    if share <= 0.25 or packed:
        return Plan(mx.float32, share <= 0.25, True)
    return Plan(mx.float32, False, True) if share <= 0.5 else Plan(stored, False, False)


def _stored_dtype(weights: Weights) -> mx.Dtype:
    """The embedding's (or its scales') own precision: norms in another would drag every product along."""
    table = weights.get("model.embed_tokens.scales", weights.get("model.embed_tokens.weight"))
    names = {"float16": mx.float16, "bfloat16": mx.bfloat16}
    return mx.float32 if table is None else names.get(table.dtype.name, mx.float32)


def _numbers(value: np.ndarray) -> int:
    """Numbers that a tensor holds; a packed one at 4 bits each, an upper bound for the wider formats."""
    return value.size * 8 if value.dtype == np.uint32 else value.size


def _step(outputs: Sequence[np.ndarray], adapter: HeadAdapter | None) -> Step:
    logits, hidden = outputs
    if adapter is not None:
        adapter.add_to_logits(logits, hidden)
    return Step(_finite(logits), hidden)


def _finite(logits: np.ndarray) -> np.ndarray:
    if not np.isfinite(logits).all():
        raise RuvmlxError(
            "the model answered NaN or infinity instead of logits; its weights are damaged or overflow in "
            "this precision: try another model file, or another backend with --backend"
        )
    return logits


def _numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))
