"""Compare the tokens of greedy replies: the plain cache, the tiers, and mlx-lm, on MLX's CPU or its GPU.

python -m tests.research.same_words [MODEL] [--gpu] [--tokens 200]

Where two replies part, the program prints how far the two tokens' logits are apart in float32 after the same
words (the C decoder computes them). A small distance means that rounding, or a tier's bits, decided; a large
distance is an error.
"""

import argparse
from collections.abc import Callable
from itertools import takewhile

from ruvmlx.backends.mlx import graph
from ruvmlx.backends.mlx.backend import MLXBackend, plan
from ruvmlx.backends.mlx.runner import default_device
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.kv.policy import TIERED, TierPolicy
from ruvmlx.models.config.model import Message, Model
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx

QUESTIONS = (
    "What is the capital of France?",
    "Explain how rain forms.",
    "Write a short story about a fisherman who finds a letter.",
    "List the steps to bake bread, with one sentence for each.",
    "Why do rivers bend? Give three reasons.",
    "Describe the life of a bee, from egg to death.",
)
FILLER = "The river is long and the boats are slow. "  # fills the cache until it has pages of all tiers
FILL = 300  # times, for the long prompt
Writer = Callable[[list[int], int], list[int]]


def greedy_request(engine: LLMInferenceEngine, prompt: list[int], count: int) -> GenerationRequest:
    """Return a request for the `count` likeliest tokens after a prompt. The engine forgets all that it has
    read."""
    engine.sessions.clear()
    return GenerationRequest(input_ids=prompt, max_new_tokens=count, sampling=Sampling(0.0), ignore_eos=True)


def engine_writer(model: Model, backend: MLXBackend, policy: TierPolicy | None) -> Writer:
    engine = LLMInferenceEngine(model, backend, policy)

    def write(prompt: list[int], count: int) -> list[int]:
        return list(engine.generate(greedy_request(engine, prompt, count)).token_ids)

    return write


def mlx_lm_writer(model: Model, device: str) -> Writer:
    from mlx_lm.generate import generate_step

    weights = model.load_weights()
    how = plan(weights, device)
    theirs = graph.build(model.config, weights, how.dtype, how.unpack)
    stream = mx.default_stream(mx.default_device())

    def write(prompt: list[int], count: int) -> list[int]:
        return [int(t) for t, _ in generate_step(mx.array(prompt), theirs, stream, max_tokens=count)]

    return write


def same_length(one: list[int], two: list[int]) -> int:
    """The number of tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def distance(judge: NativeBackend, prompt: list[int], one: list[int], two: list[int], at: int) -> str:
    """What a decoder with f16 keys and values thinks of the two tokens at `at`, after the words before."""
    logits = judge.prefill(prompt + one[:at], judge.new_cache()).logits
    apart, whole = abs(logits[one[at]] - logits[two[at]]), logits.max() - logits.min()
    return f"{float(apart):.4f} apart of {float(whole):.0f}"


def prompts(model: Model) -> list[list[int]]:
    """The questions, then one long text with a question."""
    encode = lambda text: list(model.tokenizer.encode_chat([Message("user", text)]))  # noqa: E731
    return [encode(question) for question in (*QUESTIONS, FILLER * FILL + "What did this text tell?")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--tokens", type=int, default=200)
    asked = parser.parse_args()
    model = load_model(asked.model)
    device = default_device() if asked.gpu else "cpu"
    judge = NativeBackend(model)
    with mx.stream(mx.cpu if device == "cpu" else mx.gpu):
        backend = MLXBackend(model, device=device)
        writers = {
            "plain": engine_writer(model, backend, None),
            "tiered": engine_writer(model, backend, TIERED),
            "mlx-lm": mlx_lm_writer(model, device),
        }
        for prompt in prompts(model):
            words = {name: write(prompt, asked.tokens) for name, write in writers.items()}
            again = writers["tiered"](prompt, asked.tokens) == words["tiered"]
            print(f"prompt of {len(prompt)} tokens; tiers twice: {'equal' if again else 'DIFFERENT'}")
            for name in ("tiered", "mlx-lm"):
                at = same_length(words["plain"], words[name])
                if at == asked.tokens:
                    print(f"  plain and {name}: {at} tokens equal", flush=True)
                else:
                    why = distance(judge, prompt, words["plain"], words[name], at)
                    print(f"  plain and {name}: equal for {at} tokens; then logits {why}", flush=True)


if __name__ == "__main__":
    main()
