"""The time of 64 texts of 90 tokens in an encoder of MiniLM's shape with random weights, beside that of its
matrix products alone.

    uv run python -m tests.backends.encoder_speed [--rounds N]

MiniLM has 6 layers, 384 numbers, 12 heads and an MLP of 1,536. The limit is the time of NumPy for matrix
products of the same number of multiplications (2,048 x 384 times 384 x 1,536, float32), measured by turns
with the texts.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ruvmlx.backends.encoder.backend import EncoderBackend, finish
from ruvmlx.models.load import load_model
from tests.models.encoder_models import EncoderShape, encoder_weights, make_encoder

MINI = EncoderShape(hidden=384, heads=12, ffn=1536, layers=6, context=512)
TEXTS, TOKENS = 64, 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        backend = EncoderBackend(load_model(str(make_encoder(Path(folder) / "m", MINI))))
        ids = np.random.default_rng(0).integers(0, MINI.vocab, (TEXTS, TOKENS)).tolist()
        x, w = (np.ones(size, np.float32) for size in ((2048, 384), (384, 1536)))
        both = [
            (seconds(lambda: finish(backend.text_vectors(ids))), seconds(lambda: x @ w))
            for _ in range(rounds)
        ]
    texts, product = (float(np.median(times)) for times in zip(*both, strict=True))
    rate = x.size * w.shape[1] / product
    least = products() / rate
    print(f"{TEXTS} texts of {TOKENS} tokens: {texts:.3f} s, {TEXTS / texts:.0f} texts per second")
    print(f"matrix products alone: {least:.3f} s at {rate / 1e9:.0f} G multiplications per second")
    print(f"the texts run at {least / texts:.0%} of that limit")


def products() -> int:
    """The multiplications of all matrix products, attention included."""
    matrices = sum(
        w.size for name, w in encoder_weights(MINI).items() if name.startswith("blk.") and w.ndim == 2
    )
    attention = 2 * MINI.layers * TOKENS * MINI.hidden
    return TEXTS * TOKENS * (matrices + attention)


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
