"""Host time of a token on MLX, ours beside mlx-lm's. If it is longer than the GPU's step, the GPU waits.

python -m tests.research.host_time [rounds]

Both run mlx-lm's own layers, as on a GPU, but on MLX's CPU device, with a model so narrow that building and
submitting the graph is most of the work. They take turns; a ratio is the median over the rounds.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from ruvmlx.apps.bench.random_model import make
from ruvmlx.apps.bench.rows import Row, at_most, round_digits

from ruvmlx.backends.mlx import backend as mlx
from ruvmlx.backends.mlx import graph
from ruvmlx.backends.mlx.kernels.decode import ATTEND, MERGE
from ruvmlx.backends.mlx.kernels.rope_append import ROPE_APPEND
from ruvmlx.backends.mlx.kernels.source import DTYPES, Kernel
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.kv.policy import TIERED, TierPolicy
from ruvmlx.lora.micro_lora import MicroLoRA
from ruvmlx.models.config.model import Model, ModelConfig
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx
from ruvmlx.sona.trace import Trace

from .as_gpu import Placeholders, as_on_gpu

TOKENS = 64  # in a turn
TEMPERATURE = 0.7
PROMPT = list(range(2, 40))
BAR = 1.1  # times mlx-lm's time, at most
PEER = "mlx-lm"
KERNELS_OF_A_LAYER = (  # (kernel, its outputs' shapes, its template values)
    (ROPE_APPEND, [(64,)] * 3, (64, 0, mx.float16)),
    (ATTEND, [(64,)] * 2, (64, 4)),
    (MERGE, [(64,)], (64, mx.float16)),
)
Cost = tuple[float, float]  # seconds a token: CPU time of the main thread, wall time
Turn = Callable[[], Iterator[object]]  # yields once for each token


def run(rounds: int, log: Callable[[str], None] = lambda text: None) -> list[Row]:
    """The rows of the suite."""
    with tempfile.TemporaryDirectory() as folder, mx.stream(mx.cpu):
        model = load_model(str(make("narrow", Path(folder) / "narrow.gguf")))
        costs = measure_turns(players(model), rounds)
        on_gpu = measure_turns(gpu_players(model), rounds)
    extra = model.shape.n_layers * len(KERNELS_OF_A_LAYER) * kernel_call_seconds()
    on_gpu["tiered"] = [(cpu + extra, wall + extra) for cpu, wall in on_gpu["tiered"]]
    log(f"host time of a token: {rounds} rounds of {TOKENS} tokens")
    rows = [row for name in costs if name != PEER for row in _rows(name, costs)]
    return rows + [row for name in on_gpu if name != PEER for row in _rows(name, on_gpu, " as on a GPU")]


def measure_turns(turns: dict[str, Turn], rounds: int) -> dict[str, list[Cost]]:
    """One warm-up turn of each, then `rounds` measured ones."""
    for turn in turns.values():
        cost(turn)
    found: dict[str, list[Cost]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            found[name].append(cost(turn))
    return found


def cost(turn: Turn) -> Cost:
    """From the first token to the end, work after the last token included."""
    tokens = turn()
    next(tokens)
    cpu, wall = time.thread_time(), time.perf_counter()
    count = sum(1 for _ in tokens)
    return (time.thread_time() - cpu) / count, (time.perf_counter() - wall) / count


def players(model: Model) -> dict[str, Turn]:
    backend = mlx.MLXBackend(model, device="cpu", own_layers=False)
    adapter = some_adapter(model.config)
    return {
        PEER: mlx_lm(model),
        "plain": ours(model, backend, None, adapter),
        "plain, with its trace": ours(model, backend, None, adapter, trace=True),
        "tiered": ours(model, backend, TIERED, adapter),
    }


def gpu_players(model: Model) -> dict[str, Turn]:
    """The GPU's code path. On both sides, kernels and fused operations compute nothing."""
    parts = Placeholders()
    unpacked = mlx.WeightsPlan(mx.float32, True, False)  # as in mlx-lm on a CPU: no 4-bit products
    with as_on_gpu(parts.run, parts.fused_result), mock.patch.object(mlx, "plan", lambda *_: unpacked):
        backend = mlx.MLXBackend(model, device="metal")
    adapter = some_adapter(model.config)
    found = {
        PEER: mlx_lm(model),
        "tiered": ours(model, backend, TIERED, adapter),
        "plain": ours(model, backend, None, adapter),
    }
    return {name: _on_placeholders(parts, turn) for name, turn in found.items()}


def _on_placeholders(parts: Placeholders, turn: Turn) -> Turn:
    def inside() -> Iterator[object]:
        with as_on_gpu(parts.run, parts.fused_result):
            yield from turn()

    return inside


def kernel_call_seconds(repeats: int = 300) -> float:
    """Seconds to add one of our kernels to a graph, beyond a placeholder: the mean of a layer's three.

    MLX generates a kernel's source at each call. Without a GPU, that can be called while a graph is traced.
    """
    spent: dict[str, float] = {}

    def time_launches(name: str, launch: Callable[..., object], arrays: dict[str, mx.array]) -> None:
        started = time.thread_time()
        for kernel, shapes, templates in KERNELS_OF_A_LAYER:
            inputs = [arrays[c_type] for _, c_type in kernel.inputs]
            for _ in range(repeats):
                launch(kernel, inputs, shapes, (8, 1, 1), templates)
        spent[name] = (time.thread_time() - started) / (repeats * len(KERNELS_OF_A_LAYER))

    def step(*given: mx.array) -> mx.array:
        arrays = dict(zip((*DTYPES, "T"), given, strict=True))
        time_launches("kernel", Kernel.launch, arrays)
        time_launches("placeholder", Placeholders().run, arrays)
        return given[0] + 1

    kinds = (*DTYPES.values(), mx.float16)
    mx.export_function(lambda part: None, step, *(mx.zeros(64, kind) for kind in kinds))
    return spent["kernel"] - spent["placeholder"]


def some_adapter(config: ModelConfig) -> MicroLoRA:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(config.hidden_size, 2)), rng.normal(size=(2, config.vocab_size))
    return MicroLoRA(a.astype(np.float32), b.astype(np.float32))


def ours(
    model: Model, backend: mlx.MLXBackend, policy: TierPolicy | None, adapter: MicroLoRA, trace: bool = False
) -> Turn:
    """The whole engine: stream, sampler, adapter, text."""
    engine = LLMInferenceEngine(model, backend, policy)

    def turn() -> Iterator[object]:
        engine.sessions.clear()  # each turn reads its prompt
        sampling = Sampling(TEMPERATURE, seed=1)
        request = GenerationRequest(
            input_ids=PROMPT, max_new_tokens=TOKENS, sampling=sampling, ignore_eos=True
        )
        for chunk in engine.stream(request, adapter, Trace(adapter, 1) if trace else None):
            if chunk.generated and chunk.response is None:
                yield chunk

    return turn


def mlx_lm(model: Model) -> Turn:
    """mlx-lm's generate_step over the same weights, and its sampler."""
    from mlx_lm.generate import generate_step
    from mlx_lm.sample_utils import make_sampler

    theirs = graph.build(model.config, model.load_weights(), mx.float32, True)
    stream = mx.default_stream(mx.cpu)

    def turn() -> Iterator[object]:
        sampler = make_sampler(TEMPERATURE)
        return iter(generate_step(mx.array(PROMPT), theirs, stream, max_tokens=TOKENS, sampler=sampler))

    return turn


def _rows(name: str, costs: dict[str, list[Cost]], where: str = "") -> list[Row]:
    """Rows for main thread and wall time. The target is for the main thread: a plain cache, or the GPU's
    path."""
    found = []
    for i, what in enumerate(("main thread", "clock")):
        ratio = statistics.median(
            own[i] / theirs[i] for own, theirs in zip(costs[name], costs[PEER], strict=True)
        )
        us, theirs_us = (1e6 * statistics.median(c[i] for c in costs[who]) for who in (name, PEER))
        label = f"host time of a token, {name}{where}: {what}"
        note = f"{us:.0f} us; mlx-lm {theirs_us:.0f} us"
        barred = (name == "plain" or where) and i == 0
        plain = Row(label, round_digits(ratio), "x", note=note, better="lower")
        found.append(at_most(label, ratio, "x", BAR, note) if barred else plain)
    return found


if __name__ == "__main__":
    for row in run(int(sys.argv[1]) if len(sys.argv) > 1 else 7, print):
        print(f"{row.name:55} {row.value:.3f} times mlx-lm's ({row.note})")
