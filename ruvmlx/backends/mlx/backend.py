"""This module is the MLX backend: it runs a Llama-like graph (graph.py) on Metal, CUDA or the CPU.

Each thread has its own default stream (queue of operations) in MLX, so every call uses the calling thread's
stream. A backend and its caches can move from one thread to another, but only one call can run at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import numpy as np

from ...errors import GPUFailed
from ...kv.cache import PagedCache
from ...kv.policy import F16, TierPolicy
from ...kv.pool import PagePool
from ...lora.base_lora import BaseLoRA
from ...models.config.model import Model, Weights
from ...models.weights.halves import halves, repeat_layers
from ...models.weights.stored import stored_tensor
from ...platform import cpu
from ...platform.mx import BLAS, mx, nn
from ..base import KVCache
from . import cpu_layers, graph, lora_layers, plain_batch, tiered, tiered_cpu
from .check_results import CheckResult, KernelVerdict, Shapes
from .gpu_memory import GPUMemory
from .plain_cache import MLXCache
from .runner import MLXRunner, default_device
from .storage import MLXStorage


class MLXBackend(MLXRunner):
    """An MLX backend runs one model. The function `plan` decides in which dtype and form (packed or unpacked)
    the weights are in memory."""

    name = "mlx"
    caveat = ""

    def __init__(
        self,
        model: Model,
        device: str | None = None,
        threads: int | None = None,
        chunk: int = 0,
        own_layers: bool = True,
        check: Callable[[Shapes], KernelVerdict] | None = None,
        layers: int = 0,
    ):
        """own_layers: False: on a CPU, use the layers that a GPU uses, in place of the faster layers of
        cpu_layers.py

        check: a function that is called before any computation and returns which of ruvmlx's kernels work on
            the device. The constructor raises GPUFailed if not even mlx-lm's own graph works. None: the
            constructor assumes that all kernels work.
        layers: over 0: load only so many layers, and compute them again and again, until a token has passed
            as many layers as the model has. A step then takes as long as a step of the whole model.
        """
        kind = device or default_device()
        super().__init__(model.config, kind, threads, chunk)
        self.config = model.config
        with mx.stream(self.device):
            weights = model.load_weights()
            how = plan(weights, kind)
            how = how._replace(own_layers=how.own_layers and own_layers)
            self._shapes = Shapes.of(model.config, dtype_name(how.dtype))
            found = _require_graph(check(self._shapes)) if check else None
            part = halves(model, layers)[0] if layers else model
            self._graph = graph.build(part.config, part.load_weights(), how.dtype, how.unpack)
            if how.own_layers:
                cpu_layers.install(self._graph, part.config)
                tiered_cpu.install(self._graph)
            else:
                tiered.install(self._graph, part.config)
            self._graph.model.layers = repeat_layers(self._graph.model.layers, model.config.n_layers)
            # free MLX's buffers of the temporary arrays from the unpacking and joining of weights
            mx.clear_cache()
        self.nbytes = sum(a.nbytes for a in graph.parameters(self._graph).values())
        self._own_layers = how.own_layers
        self._forward = cpu_layers.forward if how.own_layers else _forward
        # With the CPU layers, no step runs ahead, because the next step and the current step would need the
        # same cores.
        self.streams = not how.own_layers
        self.kernels = f"cpu+{BLAS.name}" if kind == "cpu" else kind
        self.gpu_memory = GPUMemory(self, self.nbytes) if kind == "metal" else None
        self.caveat = self.gpu_memory.why_not if self.gpu_memory else ""
        self.pool: PagePool | None = None
        if not how.own_layers:
            self.pool = PagePool(MLXStorage(model.config))
        elif lack := tiered_cpu.why_no_pages(model.config):
            self.caveat = lack
        else:
            self.pool = tiered_cpu.pool(model.config, threads)
        if found and not found.kernels_work:
            self._do_without_kernels(found.caveat)
        self.lora: BaseLoRA | None = None
        self._head_change: lora_layers.Change | None = None

    def _do_without_kernels(self, caveat: str) -> None:
        """Use KV caches without pages from now on, whatever the tier policy is. (Tiered caches with plain MLX
        operations in place of the kernels would be slow on a GPU.) caveat: the reason, one line for the user,
        which follows the backend's earlier caveat."""
        self.caveat = " ".join(filter(None, (self.caveat, caveat)))
        self.pool, self.kernels = None, f"{self.kernels}, plain KV cache"

    def warm_up(self) -> None:
        """Compile the GPU code that a reply needs: run a first token through the graph, then run the kernels.
        If the graph fails, the method raises the graph's error. If a kernel fails, the backend uses none of
        ruvmlx's kernels."""
        self._run([0], self.new_cache(), self._last)
        if self.pool is not None:
            from .kernels import selfcheck

            try:
                selfcheck.warm_up(self._shapes)
            except (RuntimeError, ValueError, MemoryError) as error:
                failed = CheckResult.of_error("warming up", str(error))
                self._do_without_kernels(KernelVerdict((failed,)).caveat)

    def set_lora(self, base: BaseLoRA | None) -> None:
        if base is not None:
            base.check(self.config)
        with mx.stream(self.device):
            self._head_change = lora_layers.install(self._graph, base, self.compute_dtype())
        self.lora = base

    def lent_graph(self) -> nn.Module | None:
        """Return the graph with the model's weights, so that training can run it. Return None if the CPU
        layers (cpu_layers.py), which training cannot use, are installed."""
        return None if self._forward is cpu_layers.forward else self._graph

    def new_cache(self, policy: TierPolicy | None = None) -> MLXCache | PagedCache:
        """Return an empty cache. Without a policy, with the policy F16, or if the backend has no KV pages
        (`pool` is None), return a cache without KV pages, in the dtype of the computation."""
        window = self.config.sliding_window
        if policy is None or policy == F16 or self.pool is None:
            return MLXCache(self.config.n_layers, window)
        return PagedCache(self.pool, policy, window or 0)

    @property
    def graph(self) -> nn.Module:
        return self._graph

    def forward(self, tokens: mx.array, layers: Sequence[Any], given: mx.array | None = None) -> mx.array:
        """Return hidden states [B, L, D] after the final norm of tokens [B, L]. layers: for each layer, its
        cache or an object in place of the cache. given: the input of the first layer; None: the tokens are
        embedded."""
        return self._forward(self._graph, tokens, layers, given)

    def last_layers(
        self, given: np.ndarray, cache: KVCache, outputs: int, head: bool = True
    ) -> list[np.ndarray]:
        """Append T tokens, given as the input of the first layer [T, D], to the cache, for a backend that has
        only the last layers of a model. Return [logits, hidden states] of the last `outputs` tokens; without
        `head`, [hidden states]."""
        self.adapt_threads()
        with mx.stream(self.device), self.running([cache], len(given)) as held:
            x = mx.array(given).astype(self.compute_dtype())[None]
            last = self._forward(self._graph, x, held.layers, x)[0, len(given) - outputs :]
            found = [] if not outputs else self._all(last) if head else self._hidden_alone(last)
            mx.eval(*found, *held.arrays(), *([] if found else [last]))
        return [np.array(a, copy=False) for a in found]

    def running(self, caches: Sequence[KVCache], n: int) -> AbstractContextManager[Any]:
        """Return a context manager for a step that appends n tokens to each cache. If there are several
        caches, all must be paged or all must be plain, and n must be 1."""
        if isinstance(caches[0], PagedCache):
            paged = tiered_cpu if self._own_layers else tiered
            return paged.running(cast(Sequence[PagedCache], caches), n, self.config)
        plain = cast(Sequence[MLXCache], caches)
        return plain[0].running() if len(plain) == 1 else plain_batch.running(plain)

    def output_head(self, hidden: mx.array) -> mx.array:
        """Return logits [..., V] of hidden [..., D], with the base LoRA's change of the head."""
        logits = graph.head(self._graph, hidden)
        return logits if self._head_change is None else logits + self._head_change(hidden)

    def compute_dtype(self) -> mx.Dtype:
        return self._graph.model.norm.weight.dtype


def _forward(model: nn.Module, tokens: mx.array, caches: Sequence, given: mx.array | None = None) -> mx.array:
    """Return hidden states [B, L, D] after the final norm of tokens [B, L], by a call of the whole graph (not
    of the CPU layers' `forward`). given: the input of the first layer; None: the tokens are embedded."""
    return model.model(tokens, caches, given)


def _require_graph(found: KernelVerdict) -> KernelVerdict:
    if found.graph_fails:
        raise GPUFailed(found.graph_fails)
    return found


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the name of an MLX dtype, for example "float16"."""
    return str(dtype).rpartition(".")[2]


def shapes_of(model: Model) -> Shapes:
    """Return the sizes of the model's heads and the dtype with which the GPU kernels would run the model."""
    return Shapes.of(model.config, dtype_name(_stored_dtype(model.load_weights())))


class WeightsPlan(NamedTuple):
    """The form of a model's weights in memory. unpack: True: convert packed (quantised) weights to
    `dtype`."""

    dtype: mx.Dtype  # the dtype of all weights that are not packed (quantised)
    unpack: bool
    own_layers: bool  # True: use the layers of cpu_layers.py in place of mlx-lm's layers; only for float32


def plan(weights: Weights, device: str) -> WeightsPlan:
    """Decide in which form a model's weights are in memory. On a GPU, packed weights stay packed. A CPU
    unpacks the weights to float32 if the result fits into a quarter of RAM.

    MLX's product with packed weights is slow on a CPU (starter model: 11 against 60 tok/s with float32), and
    with 16-bit scales the product is another 40 times slower. So on a CPU, the scales of weights that stay
    packed are converted to float32. Weights that are not packed become float32 if the result fits into half
    of RAM.
    """
    stored = _stored_dtype(weights)
    if device != "cpu":
        return WeightsPlan(stored, False, False)
    packed = any(name.endswith(".scales") for name in weights)
    share = 4 * sum(_numbers(weights, name) for name in weights) / cpu.total_memory()
    if share <= 0.25 or packed:
        return WeightsPlan(mx.float32, share <= 0.25, True)
    return WeightsPlan(mx.float32, False, True) if share <= 0.5 else WeightsPlan(stored, False, False)


def _stored_dtype(weights: Weights) -> mx.Dtype:
    """Return the dtype of the embedding or of its scales (bfloat16 for a float format of MLX), in which the
    model's other numbers should be, because norms of another dtype would convert every product to their
    dtype. Return float32 if 16 bits would round the scales of any matrix. If a folder stores scales as
    bfloat16, `weights` has them as float32 numbers with 16 zero bits."""
    modules = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    types = {m: tensor.type for m in modules if (tensor := stored_tensor(weights, m))}
    if any(kind.wide for kind in types.values()):
        return mx.float32
    if (embedding := types.get("model.embed_tokens")) and embedding.mode:
        # MLX computes in bfloat16 with weights that have one of MLX's float formats (MODES)
        return mx.bfloat16
    scales = weights.get("model.embed_tokens.scales")
    if scales is not None and scales.dtype == np.float32 and not (scales.view(np.uint32) & 0xFFFF).any():
        return mx.bfloat16
    table = weights.get("model.embed_tokens.weight") if scales is None else scales
    names = {"float16": mx.float16, "bfloat16": mx.bfloat16}
    return mx.float32 if table is None else names.get(table.dtype.name, mx.float32)


def _numbers(weights: Weights, name: str) -> int:
    """Return the number of weights of the tensor `name`. For packed weights of safetensors files, the
    function assumes 4 bits per weight, so the result is too large for formats with more bits."""
    module, _, kind = name.rpartition(".")
    # `stored_tensor` reads the number of weights from the file's header and converts no tensor.
    if kind != "bias" and (tensor := stored_tensor(weights, module)):
        return tensor.elements if kind == "weight" else 0
    value = weights[name]
    return value.size * 8 if value.dtype == np.uint32 else value.size
