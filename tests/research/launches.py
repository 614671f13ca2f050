"""Counts the operations of one decoded token in the graph that MLX exports: ours beside mlx-lm's.

python -m tests.research.launches        # prints the table of LAUNCHES.md; needs no GPU and no weights

Traced on a CPU, MLX's fused operations (RMS norm, RoPE, attention) become several small ones. On a GPU each
is one kernel, so here each is traced as one custom kernel of that name. Widths do not change the counts and
are small here; layers, heads, head sizes and vocabulary are the named model's.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ruvmlx.backends.mlx import graph, tiered
from ruvmlx.backends.mlx.kernels.source import Kernel
from ruvmlx.backends.mlx.sampler import MLXSampler
from ruvmlx.backends.mlx.storage import MLXStorage
from ruvmlx.backends.mlx.stream import HeadChange
from ruvmlx.engine import Sampling
from ruvmlx.kv.cache import PagedCache
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.kv.pool import PagePool
from ruvmlx.lora.micro_lora import MicroLoRA
from ruvmlx.models.config.model import ModelConfig
from ruvmlx.platform import mlxlm
from ruvmlx.platform.mx import mx, nn
from ruvmlx.tiers import TIERS

from .as_gpu import as_on_gpu

# Primitives without a kernel launch: they only make views.
VIEWS = {
    *("Broadcast", "BroadcastAxes", "ExpandDims", "Squeeze", "Reshape", "Flatten", "Unflatten", "Transpose"),
    *("Slice", "Split", "View", "AsStrided", "StopGradient", "NumberOfElements", "Depends"),
}
LIMIT = 1.15  # times mlx-lm's launches, at most
POLICY = TierPolicy("tiered", tuple(range(64, 64 * len(TIERS), 64)))
CONTEXT = 64 * len(TIERS) + 108  # tokens in the cache: pages of all tiers


@dataclass(frozen=True)
class DecoderSize:
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int = 512
    window: int | None = None


SHAPES = {
    "Llama 3.2 1B": DecoderSize(16, 32, 8, 64, 128_256),
    "Llama 3.1 8B": DecoderSize(32, 32, 8, 128, 128_256),
    "Mistral 7B v0.1": DecoderSize(32, 32, 8, 128, 32_000, 4096),
}


@dataclass(frozen=True)
class LaunchCount:
    launches: int
    nodes: int
    by_name: dict[str, int]


def count_launches(step: Callable[..., Any], *inputs: mx.array) -> LaunchCount:
    """Count the primitives of the graph that `step` builds."""
    names: Counter[str] = Counter()

    def take(part: dict[str, Any]) -> None:
        if part["type"] == "primitive":
            name = part["name"]
            names[_kernel(part["arguments"][0]) if name == "CustomKernel" else name] += 1

    with as_on_gpu(Kernel.launch, _trace_kernel):
        mx.export_function(take, step, *inputs)
    launches = sum(n for name, n in names.items() if name not in VIEWS)
    return LaunchCount(launches, names.total(), dict(names))


def _kernel(name: str) -> str:
    """Our name of an exported kernel: custom_kernel_ruvmlx_rope_append__64_0_float16 -> rope_append."""
    return name.removeprefix("custom_kernel_").removeprefix("ruvmlx_").split("__")[0].split("_float")[0]


def _trace_kernel(name: str, inputs: list[mx.array], shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """A custom kernel in place of a fused operation."""
    made: Any = mx.fast.metal_kernel(name, [f"x{i}" for i in range(len(inputs))], ["out"], "out[0] = 0;")
    return made(
        inputs=inputs,
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
        stream=mx.gpu,
    )[0]


def model(shape: DecoderSize, own: bool = True) -> tuple[nn.Module, ModelConfig]:
    """The graph of this shape, packed in 4 bits, computing in float16; own: False for mlx-lm's unchanged."""
    config = ModelConfig(
        model_type="mistral" if shape.window else "llama",
        hidden_size=128,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=128,
        vocab_size=shape.vocab_size,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_context=8192,
        tie_word_embeddings=False,
        sliding_window=shape.window,
    )
    llama = mlxlm.load("models.llama")
    made = llama.Model(llama.ModelArgs.from_dict(graph.model_args(config)))
    if own:
        graph.adapt(made.model, config)
    elif shape.window:
        graph.slide(made.model)
    made.set_dtype(mx.float16)
    nn.quantize(made, group_size=64, bits=4)
    mx.eval(made.parameters())
    return made, config


@functools.cache
def theirs(shape: DecoderSize) -> LaunchCount:
    """A step of mlx-lm's generate_step, greedy."""
    made, config = model(shape, own=False)
    caches = mlxlm.load("models.cache").make_prompt_cache(made)
    if shape.window:
        caches = [mlxlm.load("models.cache").RotatingKVCache(shape.window) for _ in caches]
    kv = mx.zeros((1, config.n_kv_heads, 5, config.head_dim), mx.float16)
    for cache in caches:
        cache.update_and_fetch(kv, kv)
        cache.update_and_fetch(kv[:, :, :1], kv[:, :, :1])
    mx.eval([cache.state for cache in caches])

    def step(token: mx.array) -> list[mx.array]:
        logits = made(token[None], cache=caches)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return [mx.argmax(logprobs, axis=-1), *(array for c in caches for array in (c.keys, c.values))]

    return count_launches(step, mx.array([1]))


@functools.cache
def ours(shape: DecoderSize, batch: int = 1, full: bool = False) -> LaunchCount:
    """The same step over tiered caches. full: sampled at a temperature, with an adapter."""
    made, config = model(shape)
    tiered.install(made, config)
    storage = MLXStorage(config)
    pool = PagePool(storage, pressure=lambda: 0.0)
    caches = [PagedCache(pool, POLICY, shape.window or 0) for _ in range(batch)]
    for cache in caches:
        cache.reserve(CONTEXT)
        cache.advance(CONTEXT)
        cache.reserve(1)
        mx.eval(*cache.table.open_page_at(CONTEXT)[0].arrays)
    mx.eval(*storage.arrays())

    change, sampler = HeadChange(some_adapter(config)), MLXSampler(Sampling(0.7 if full else 0.0, seed=1))

    def step(tokens: mx.array) -> list[mx.array]:
        running = tiered.DecodeStep(caches, config)
        layers = [tiered.LayerPages(running, layer) for layer in range(config.n_layers)]
        hidden = made.model(tokens[:, None], layers)[:, -1]
        logits = graph.head(made, hidden).astype(mx.float32)
        logits = change(logits, hidden) if full else logits
        return [sampler(logits), logits.sum(), *running.arrays()]

    return count_launches(step, mx.array([1] * batch))


def prompt(shape: DecoderSize, tokens: int = 130) -> LaunchCount:
    """Prefill of `tokens` new tokens after pages of all tiers. Tracing fails if the host reads an array."""
    made, config = model(shape)
    tiered.install(made, config)
    storage = MLXStorage(config)
    cache = PagedCache(PagePool(storage, pressure=lambda: 0.0), POLICY, shape.window or 0)
    for n in (CONTEXT, tokens):
        cache.reserve(n)
        if n == CONTEXT:
            cache.advance(n)
    mx.eval(*storage.arrays())

    def step(ids: mx.array) -> list[mx.array]:
        running = tiered.PromptStep(cache, tokens, config)
        layers = [tiered.LayerPages(running, layer) for layer in range(config.n_layers)]
        return [made.model(ids, layers)[:, -1], *running.arrays()]

    return count_launches(step, mx.array([[1] * tokens]))


def some_adapter(config: ModelConfig) -> MicroLoRA:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(config.hidden_size, 2)), rng.normal(size=(2, config.vocab_size))
    return MicroLoRA(a.astype(np.float32), b.astype(np.float32))


def main() -> None:
    for line in table():
        print(line)


def table() -> Iterator[str]:
    yield "| model | mlx-lm, greedy | ours, greedy | ours, temperature and adapter | nodes of mlx-lm | ours |"
    yield "|---|---|---|---|---|---|"
    for name, shape in SHAPES.items():
        a, b, c = theirs(shape), ours(shape), ours(shape, full=True)
        ratios = [f"{n.launches} ({n.launches / a.launches:.2f})" for n in (b, c)]
        yield f"| {name} | {a.launches} | {ratios[0]} | {ratios[1]} | {a.nodes} | {c.nodes} |"


if __name__ == "__main__":
    main()
