"""What a prompt that is read with activations of 8 bits changes in the replies of a model with K-quants.

    python -m tests.research.prompt_bits MODEL.gguf [--prompt 256] [--after 128]

The native backend reads the tokens of a prompt with 8 bits, and all tokens whose logits it returns with 16
bits (neon/src/decoder_linear.c). So the program reads the same text twice: by `prefill` and by `verify`. Then
it reads the next tokens by `verify` after both. The lines have the Kullback-Leibler divergence of the second
distribution from the first (nats per token), and the negative log-likelihood of the text after both.
"""

import argparse
from pathlib import Path

import numpy as np

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.load import load_model

TEXT = Path(__file__).parents[2] / "docs/learning.md"


def log_probs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return KL(p || q) of log-probabilities [T, V] as [T], in nats."""
    return np.asarray((np.exp(p) * (p - q)).sum(axis=-1))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("model")
    ask.add_argument("--text", type=Path, default=TEXT)
    ask.add_argument("--prompt", type=int, default=256)
    ask.add_argument("--after", type=int, default=128)
    flags = ask.parse_args()
    model = load_model(flags.model)
    tokens = model.tokenizer.encode(flags.text.read_text())
    prompt, after = tokens[: flags.prompt], tokens[flags.prompt :][: flags.after]
    backend = NativeBackend(model)
    exact, coarse = backend.new_cache(), backend.new_cache()
    first = log_probs(backend.verify(prompt, exact)[-1:])
    first_coarse = log_probs(backend.prefill(prompt, coarse).logits[None])
    print(f"the first token after the prompt: KL {divergence(first, first_coarse)[0]:.5f}")
    want, got = (log_probs(backend.verify(after, cache)) for cache in (exact, coarse))
    kl, rows = divergence(want, got), np.arange(len(after) - 1)
    losses = [-np.mean(x[rows, after[1:]]) for x in (want, got)]
    print(
        f"{len(after)} tokens after it: KL mean {kl.mean():.5f}, max {kl.max():.5f}; "
        f"nll {losses[0]:.4f} with 16 bits, {losses[1]:.4f} with 8 bits"
    )


if __name__ == "__main__":
    main()
