"""This module runs model architectures for which ruvmlx has no own decoder, with mlx-lm's model code and
caches.

MicroLoRA (the adapter of the output head) learns from ratings with this backend too, because it needs only
the final hidden states and the logits. MicroLoRA's change is added to the model's final logits, after the
scale or cap that some models apply to logits. KV tiers, a base LoRA, background training, and ratings that
change other matrices than the output head need ruvmlx's own decoder, so this backend does not have these
features.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from ...errors import AdapterMismatch
from ...kv.policy import TierPolicy
from ...lora.base_lora import BaseLoRA
from ...models.config.model import Model, missing_features
from ...platform.mx import BLAS, mx
from ...progress import QUIET, Watch
from ..base import Adapters, KVCache, Step, each
from . import graph
from .any_cache import AnyCache
from .any_graph import SplitGraph
from .any_load import load_graph, one_line
from .check_results import GPU_ERRORS
from .gpu_memory import GPUMemory
from .runner import MLXRunner, default_device


class AnyBackend(MLXRunner):
    """This class implements base.Backend and base.Streaming for an mlx-lm model whose hidden states
    any_graph.py can find."""

    name = "mlx"
    pool = None

    def __init__(
        self, model: Model, device: str | None = None, threads: int | None = None, watch: Watch = QUIET
    ):
        """watch: an object that receives the progress of loading. On a GPU, MLX's errors GPU_ERRORS pass
        through the constructor, except while mlx-lm builds the model."""
        kind = device or default_device()
        super().__init__(model.shape, kind, threads)
        self.lora: BaseLoRA | None = None
        # on a CPU, a step that runs ahead would compete with the current step for cores
        self.streams = kind != "cpu"
        self.kernels = f"cpu+{BLAS.name}, mlx-lm" if kind == "cpu" else f"{kind}, mlx-lm"
        with mx.stream(self.device), one_line(model, *(() if kind == "cpu" else GPU_ERRORS)):
            loaded = load_graph(model, kind == "cpu", watch)
            self.nbytes = sum(a.nbytes for a in graph.parameters(loaded).values())
            self._graph = SplitGraph(loaded, model.shape)
            mx.clear_cache()
        self.gpu_memory = GPUMemory(self, self.nbytes) if kind == "metal" else None
        told = self.gpu_memory.why_not if self.gpu_memory else ""
        self.caveat = f"{told}; {missing_features(model.shape)}" if told else missing_features(model.shape)

    def set_lora(self, base: BaseLoRA | None) -> None:
        if base is not None:
            raise AdapterMismatch(
                f"a base LoRA was trained for a Llama-like model; {self.shape.model_type} has none. "
                "Use another adapter: --adapter NAME."
            )

    def new_cache(self, policy: TierPolicy | None = None) -> AnyCache:
        """Return an empty cache with one mlx-lm cache for each layer. The tier policy has no effect."""
        return AnyCache.of(self._graph.model)

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        """Append one token to each cache, one sequence after the other, because mlx-lm cannot run the caches
        of several sequences in one step for every model."""
        rows = zip(tokens, caches, each(adapter, tokens), strict=True)
        return [self.decode(token, cache, own) for token, cache, own in rows]

    def forward(self, tokens: mx.array, layers: Sequence[Any]) -> mx.array:
        return self._graph.hidden_states(tokens, layers)

    def output_head(self, hidden: mx.array) -> mx.array:
        return self._graph.logits(hidden[None])[0]

    def running(self, caches: Sequence[KVCache], n: int) -> AbstractContextManager[AnyCache]:
        return cast(AnyCache, caches[0]).running(n)

    def compute_dtype(self) -> mx.Dtype:
        return self._graph.dtype
