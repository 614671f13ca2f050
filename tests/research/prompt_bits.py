"""This study measures how activations of 8 bits change the predictions of a model with quantised weights.

    python -m tests.research.prompt_bits MODEL [--prompt 256] [--after 128]

`prefill` of the native backend reads a prompt with 8 bits (neon/src/decoder_linear.c). `verify`
reads a prompt with 16 bits. The program reads the same prompt with both. Then `verify` reads the next tokens
after both. The program prints KL(verify || prefill) in nats per token, and the negative log-likelihood of the
text after both.

`decode_coarse` writes replies that no user sees with 8 bits, too. The program appends the next tokens with
`decode_batch` and with `decode_coarse`, and prints KL(decode_batch || decode_coarse).
"""

import argparse
from pathlib import Path

import numpy as np

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.models.load import load_model

TEXT = Path(__file__).parents[1] / "data" / "teacher_forced.txt"


def log_probs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the KL divergence [T] of q from p in nats. p, q: log-probabilities [T, V]"""
    return np.asarray((np.exp(p) * (p - q)).sum(axis=-1))


def logits_after(backend: NativeBackend, prompt: list[int], after: list[int], method: str) -> np.ndarray:
    """Append the tokens `after` [T] to a prompt one by one with a method of the backend. Return the logits
    [T, V]."""
    cache, append = backend.new_cache(), getattr(backend, method)
    backend.prefill(prompt, cache)
    return np.stack([append([token], [cache])[0].logits for token in after])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--after", type=int, default=128)
    flags = parser.parse_args()
    model = load_model(flags.model)
    tokens = model.tokenizer.encode(flags.text.read_text())
    prompt, after = tokens[: flags.prompt], tokens[flags.prompt :][: flags.after]
    backend = NativeBackend(model)
    exact_cache, coarse_cache = backend.new_cache(), backend.new_cache()
    first = log_probs(backend.verify(prompt, exact_cache)[-1:])
    first_coarse = log_probs(backend.prefill(prompt, coarse_cache).logits[None])
    print(f"the first token after the prompt: KL {divergence(first, first_coarse)[0]:.5f}")
    want, got = (log_probs(backend.verify(after, cache)) for cache in (exact_cache, coarse_cache))
    kl, rows = divergence(want, got), np.arange(len(after) - 1)
    losses = [-np.mean(x[rows, after[1:]]) for x in (want, got)]
    print(
        f"{len(after)} tokens after it: KL mean {kl.mean():.5f}, max {kl.max():.5f}; "
        f"nll {losses[0]:.4f} with 16 bits, {losses[1]:.4f} with 8 bits"
    )
    fine, coarse = (
        log_probs(logits_after(backend, prompt, after, f)) for f in ("decode_batch", "decode_coarse")
    )
    kl = divergence(fine, coarse)
    print(f"{len(after)} tokens of a reply that no user sees: KL mean {kl.mean():.5f}, max {kl.max():.5f}")


if __name__ == "__main__":
    main()
