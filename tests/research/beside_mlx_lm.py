"""Prefill and decode on MLX's CPU device, or on its GPU: ours beside mlx-lm's generate_step, in turns.

python -m tests.research.beside_mlx_lm [MODEL] [--rounds 5] [--gpu] [--contexts 512] [--tokens 48]

    --gpu --contexts 256,4096,32768 --tokens 128        # a prompt of each of these lengths, on the GPU

All run in one process. On the CPU they have the same float32 weights and the same BLAS, on a GPU the same
weights as stored. A ratio is the median over the rounds; above 1 means faster than mlx-lm. A context that is
longer than the model's own costs the same time, but its text has no meaning.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

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
PEER = "mlx-lm"
Speed = tuple[float, float]  # tokens a second: prefill, decode
Turn = Callable[[list[int], int], Speed]  # reads a prompt, then writes a number of tokens
Players = dict[str, Turn]


def mlx_lm(model: Model, device: str) -> Turn:
    from mlx_lm.generate import generate_step

    weights = model.load_weights()
    how = plan(weights, device)
    dtype, unpack = (mx.float32, True) if device == "cpu" else (how.dtype, how.unpack)
    theirs = graph.build(model.config, weights, dtype, unpack)
    stream = mx.default_stream(mx.default_device())

    def turn(prompt: list[int], count: int) -> Speed:
        started = time.perf_counter()
        tokens = generate_step(mx.array(prompt), theirs, stream, max_tokens=count)
        next(tokens)
        first = time.perf_counter()
        made = sum(1 for _ in tokens)
        return len(prompt) / (first - started), made / (time.perf_counter() - first)

    return turn


def ours(model: Model, backend: MLXBackend, policy: TierPolicy | None) -> Turn:
    """The whole engine, greedy like generate_step."""
    engine = LLMInferenceEngine(model, backend, policy)

    def turn(prompt: list[int], count: int) -> Speed:
        engine.sessions.clear()  # each turn reads its prompt
        done = engine.generate(
            GenerationRequest(input_ids=prompt, max_new_tokens=count, sampling=Sampling(0.0), ignore_eos=True)
        )
        return done.prompt_tps, done.generation_tps

    return turn


def make_players(model: Model, device: str) -> Players:
    """mlx-lm, our plain cache, our tiers. Call it, and the players, with MLX's stream of this device."""
    backend = MLXBackend(model, device=device)
    return {
        PEER: mlx_lm(model, device),
        "plain": ours(model, backend, None),
        "tiered": ours(model, backend, TIERED),
    }


def measure_turns(
    players: Players, vocab_size: int, rounds: int, context: int, tokens: int
) -> dict[str, list[Speed]]:
    """One warm-up turn of each, then `rounds` measured ones: each reads `context` random tokens, and writes
    `tokens` tokens."""
    prompt = np.random.default_rng(0).integers(10, vocab_size, context).tolist()
    found: dict[str, list[Speed]] = {name: [] for name in players}
    for i in range(rounds + 1):
        for name, turn in players.items():
            speed = turn(prompt, tokens)
            found[name] += [speed] if i else []
    return found


def with_room(model: Model, tokens: int) -> Model:
    """The model, with a context of at least `tokens` tokens."""
    return replace(model, shape=replace(model.shape, max_context=max(tokens, model.shape.max_context)))


def table(found: dict[str, list[Speed]]) -> list[str]:
    """A line for each player and each kind of work: the median speed, and the ratio to mlx-lm's."""
    lines = []
    for name, speeds in found.items():
        for i, what in enumerate(("prefill", "decode")):
            ratio = statistics.median(a[i] / b[i] for a, b in zip(speeds, found[PEER], strict=True))
            median = statistics.median(s[i] for s in speeds)
            lines.append(f"{name:7} {what:8} {median:8.1f} tok/s  {ratio:5.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--contexts", default=str(PROMPT))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    asked = parser.parse_args()
    contexts = [int(part) for part in asked.contexts.split(",")]
    model = with_room(load_model(asked.model), max(contexts) + asked.tokens + 1)
    device = default_device() if asked.gpu else "cpu"
    with mx.stream(mx.cpu if device == "cpu" else mx.gpu):
        players = make_players(model, device)
        for context in contexts:
            found = measure_turns(players, model.shape.vocab_size, asked.rounds, context, asked.tokens)
            print(f"{model.name}, MLX on {device}, prompt {context}, reply {asked.tokens} tokens", flush=True)
            print("\n".join(table(found)), flush=True)


if __name__ == "__main__":
    main()
