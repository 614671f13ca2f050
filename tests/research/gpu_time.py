"""Where the time of a decoded token goes on an NVIDIA GPU: host, kernels, gaps.

python -m tests.research.gpu_time [MODEL] [--contexts 4096,32768] [--tokens 64] [--top 12]

PyTorch's profiler (CUPTI) sees the kernels of the whole process, MLX's too, so this program needs PyTorch
beside MLX. For each player it prints, for one token: the time on the clock without the profiler, the main
thread's processor time, and with the profiler the time in which the GPU ran a kernel, the number of kernels,
and the kernels with the largest sums.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ruvmlx.backends.mlx import graph
from ruvmlx.backends.mlx.backend import MLXBackend, plan
from ruvmlx.backends.mlx.runner import default_device
from ruvmlx.engine import LLMInferenceEngine
from ruvmlx.kv.policy import TIERED, TierPolicy
from ruvmlx.models.config.model import Model
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx

from .beside_mlx_lm import with_room
from .same_words import greedy_request

Words = Callable[[list[int], int], Iterator[object]]  # yields once for each token
Spans = list[tuple[str, float, float]]  # kernel, begin, end: microseconds


def mlx_lm(model: Model, device: str) -> Words:
    from mlx_lm.generate import generate_step

    weights = model.load_weights()
    how = plan(weights, device)
    theirs = graph.build(model.config, weights, how.dtype, how.unpack)
    stream = mx.default_stream(mx.default_device())
    return lambda prompt, count: generate_step(mx.array(prompt), theirs, stream, max_tokens=count)


def ours(model: Model, backend: MLXBackend, policy: TierPolicy | None) -> Words:
    engine = LLMInferenceEngine(model, backend, policy)

    def words(prompt: list[int], count: int) -> Iterator[object]:
        request = greedy_request(engine, prompt, count)
        return (c for c in engine.stream(request) if c.generated and c.response is None)

    return words


def run_tokens(tokens: Iterator[object]) -> tuple[int, float, float]:
    """Return (tokens after the second one, their seconds, the main thread's seconds)."""
    next(tokens)
    next(tokens)
    wall, cpu = time.perf_counter(), time.thread_time()
    count = sum(1 for _ in tokens)
    return max(count, 1), time.perf_counter() - wall, time.thread_time() - cpu


def kernel_spans(work: Callable[[], object]) -> Spans:
    """The kernels and copies that the GPU ran during `work`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        mx.synchronize()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        return spans_of(json.loads(file.read_text())["traceEvents"])


def spans_of(events: Sequence[dict[str, Any]]) -> Spans:
    """The kernels and copies among the events of a Chrome trace."""
    on_gpu = "kernel", "gpu_memcpy", "gpu_memset"
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in on_gpu]


def busy(spans: Spans) -> float:
    """The time (us) in which at least one kernel ran."""
    total, until = 0.0, 0.0
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def lines(spans: Spans, tokens: int, top: int) -> list[str]:
    """The largest sums by kernel, for one token."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, begin, end in spans:
        sums[name[:90]] += end - begin
        counts[name[:90]] += 1
    rows = sums.most_common(top)
    return [f"    {us / tokens:8.1f} us {counts[name] / tokens:7.1f} x  {name}" for name, us in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--contexts", default="4096,32768")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--top", type=int, default=12)
    asked = parser.parse_args()
    contexts = [int(part) for part in asked.contexts.split(",")]
    model = with_room(load_model(asked.model), max(contexts) + asked.tokens + 1)
    device = default_device()
    with mx.stream(mx.cpu if device == "cpu" else mx.gpu):
        backend = MLXBackend(model, device=device)
        players = {"mlx-lm": mlx_lm(model, device), "plain": ours(model, backend, None)}
        players["tiered"] = ours(model, backend, TIERED)
        for context in contexts:
            prompt = np.random.default_rng(0).integers(10, model.shape.vocab_size, context).tolist()
            print(f"{model.name}, MLX on {device}, {context} tokens of context", flush=True)
            for name, words in players.items():
                run_tokens(words(prompt, asked.tokens))
                count, wall, cpu = run_tokens(words(prompt, asked.tokens))
                tokens = words(prompt, asked.tokens)
                next(tokens)
                next(tokens)
                spans = kernel_spans(lambda left=tokens: list(left))
                us, kernels = busy(spans) / count, len(spans) / count
                print(
                    f"  {name}: {1e6 * wall / count:.0f} us a token, main thread {1e6 * cpu / count:.0f} us; "
                    f"profiled: GPU busy {us:.0f} us, {kernels:.0f} kernels"
                )
                print("\n".join(lines(spans, count, asked.top)), flush=True)


if __name__ == "__main__":
    main()
