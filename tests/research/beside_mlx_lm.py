"""Prefill and decode on MLX's CPU device, or on its GPU: ours beside mlx-lm's generate_step, in turns.

python -m tests.research.beside_mlx_lm [MODEL [rounds [gpu]]]        # the starter model, 5 rounds, the CPU

Both run in one process. On the CPU they have the same float32 weights and the same BLAS, on a GPU the same
weights as stored. A ratio is the median over the rounds; above 1 means faster than mlx-lm.
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from ruvmlx.backends.mlx import graph
from ruvmlx.backends.mlx.backend import MLXBackend, plan
from ruvmlx.backends.mlx.runner import default_device
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.kv.policy import TIERED, TierPolicy
from ruvmlx.models.config.model import Model
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx

PROMPT, TOKENS = 512, 48
Speed = tuple[float, float]  # tokens a second: prefill, decode


def mlx_lm(model: Model, device: str, prompt: list[int]) -> Callable[[], Speed]:
    from mlx_lm.generate import generate_step

    weights = model.load_weights()
    how = plan(weights, device)
    dtype, unpack = (mx.float32, True) if device == "cpu" else (how.dtype, how.unpack)
    theirs = graph.build(model.config, weights, dtype, unpack)
    stream = mx.default_stream(mx.default_device())

    def turn() -> Speed:
        started = time.perf_counter()
        tokens = generate_step(mx.array(prompt), theirs, stream, max_tokens=TOKENS)
        next(tokens)
        first = time.perf_counter()
        count = sum(1 for _ in tokens)
        return len(prompt) / (first - started), count / (time.perf_counter() - first)

    return turn


def ours(
    model: Model, backend: MLXBackend, policy: TierPolicy | None, prompt: list[int]
) -> Callable[[], Speed]:
    """The whole engine, greedy like generate_step."""
    engine = LLMInferenceEngine(model, backend, policy)

    def turn() -> Speed:
        engine.sessions.clear()  # each turn reads its prompt
        done = engine.generate(
            GenerationRequest(
                input_ids=prompt, max_new_tokens=TOKENS, sampling=Sampling(0.0), ignore_eos=True
            )
        )
        return done.prompt_tps, done.generation_tps

    return turn


def measure_turns(model: Model, rounds: int, device: str) -> dict[str, list[Speed]]:
    """One warm-up turn of each, then `rounds` measured ones."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(10, model.shape.vocab_size, PROMPT).tolist()
    with mx.stream(mx.cpu if device == "cpu" else mx.gpu):
        backend = MLXBackend(model, device=device)
        turns = {
            "mlx-lm": mlx_lm(model, device, prompt),
            "plain": ours(model, backend, None, prompt),
            "tiered": ours(model, backend, TIERED, prompt),
        }
        found: dict[str, list[Speed]] = {name: [] for name in turns}
        for i in range(rounds + 1):
            for name, turn in turns.items():
                speed = turn()
                found[name] += [speed] if i else []
    return found


def main() -> None:
    model = load_model(sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] else None)
    device = default_device() if "gpu" in sys.argv[3:] else "cpu"
    found = measure_turns(model, int(sys.argv[2]) if len(sys.argv) > 2 else 5, device)
    print(f"{model.name}, MLX on {device}, prompt {PROMPT}, reply {TOKENS} tokens")
    for name, speeds in found.items():
        for i, what in enumerate(("prefill", "decode")):
            ratio = statistics.median(a[i] / b[i] for a, b in zip(speeds, found["mlx-lm"], strict=True))
            print(f"{name:7} {what:8} {statistics.median(s[i] for s in speeds):8.1f} tok/s  {ratio:5.2f}")


if __name__ == "__main__":
    main()
