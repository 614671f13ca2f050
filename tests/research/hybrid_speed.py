"""Measure a reply while questions are embedded: one side alone, and both sides of the hybrid backend.

    python -m tests.research.hybrid_speed [--model NAME] [--questions 8] [--tokens 128]

Two ways take turns: the main side writes a reply and then embeds questions ("then"), and the other side
embeds the questions while the main side writes the reply ("beside"). "alone" is the reply without questions.
"""

import argparse
import statistics
import time

from ruvmlx.backends.base import QUESTIONS
from ruvmlx.backends.hybrid.backend import HybridBackend, measure_side
from ruvmlx.backends.hybrid.placement import Placement, plan_words
from ruvmlx.backends.hybrid.side import Side, overlap
from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.models.load import load_model
from ruvmlx.platform.gpu import gpu
from ruvmlx.sona.embedding import read_question

TEXT = "Why does a river bend, and what becomes of the water that is left behind? Question number {}."


def reply(engine, tokens):
    """Return (seconds of the whole reply, tokens per second of the decoding)."""
    begun = time.perf_counter()
    request = GenerationRequest(
        prompt="Tell me about rivers.", max_new_tokens=tokens, sampling=Sampling(0.0), ignore_eos=True
    )
    response = engine.generate(request)
    return time.perf_counter() - begun, response.generation_tps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    model = load_model(asked.model)
    sides = [Side(open_backend(name, model)) for name in ("native", "mlx")]
    for side in sides:
        measure_side(side)
    main_side, other = sorted(sides, key=lambda side: side.costs["decode"])
    hybrid = HybridBackend(Placement(main_side, other, are_apart=True))
    print(f"GPU: {gpu.kind or 'none'}; as two devices: {plan_words(hybrid.placement)}")
    chosen = Placement(main_side, other, are_apart=bool(gpu.kind))
    print(f"as on this machine: {plan_words(chosen)}")
    texts = [TEXT.format(i) for i in range(asked.questions)]

    def read(backend):
        for text in texts:
            read_question(backend, model.tokenizer, text)

    alone = LLMInferenceEngine(model, main_side.backend)
    both = LLMInferenceEngine(model, hybrid)
    rows = {"alone": [], "then": [], "beside": []}
    for _ in range(asked.rounds):
        seconds, speed = reply(alone, asked.tokens)
        rows["alone"].append((seconds, speed))
        begun = time.perf_counter()
        read(main_side.backend)
        rows["then"].append((seconds + time.perf_counter() - begun, speed))
        begun = time.perf_counter()
        job = hybrid.start_beside(QUESTIONS, lambda backend, pause: read(backend))
        speed = reply(both, asked.tokens)[1] if job else 0.0
        job.result()
        rows["beside"].append((time.perf_counter() - begun, speed))
    for name, found in rows.items():
        seconds, speeds = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:7} {seconds:6.2f} s with the questions, {speeds:6.1f} tokens/s in the reply")
    print(f"both sides at once: {overlap([*main_side.intervals, *other.intervals]):.2f} s")


if __name__ == "__main__":
    main()
