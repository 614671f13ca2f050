"""The processor time of 64 texts of 90 tokens in an encoder of MiniLM's shape with random weights, beside
that of its matrix products alone.

    uv run python -m tests.backends.encoder_speed [--rounds N]

MiniLM has 6 layers, 384 numbers, 12 heads and an MLP of 1,536. The limit is the time of NumPy for matrix
products of the same number of multiplications (2,048 x 384 times 384 x 1,536, float32), measured by turns
with the texts. Both run in one thread.
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
PRODUCTS = 5  # products between two passes over the texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        backend = EncoderBackend(load_model(str(make_encoder(Path(folder) / "m", MINI))), threads=1)
        ids = np.random.default_rng(0).integers(0, MINI.vocab, (TEXTS, TOKENS)).tolist()
        finish(backend.text_vectors(ids))
        both = [one_round(backend, ids) for _ in range(rounds)]
    texts, rate = (float(np.median(figures)) for figures in zip(*both, strict=True))
    share = float(np.median([multiplications() / rate / seconds for seconds, rate in both]))
    print(f"{TEXTS} texts of {TOKENS} tokens: {texts:.2f} s, {TEXTS / texts:.0f} texts per second of a core")
    print(f"matrix products alone: {rate / 1e9:.0f} G multiplications per second of a core")
    print(f"the texts run at {share:.0%} of that limit")


def one_round(backend: EncoderBackend, ids: list[list[int]]) -> tuple[float, float]:
    """(seconds of the texts, multiplications per second of products alone)"""
    x, w = (np.ones(size, np.float32) for size in ((2048, 384), (384, 1536)))
    texts = seconds(lambda: finish(backend.text_vectors(ids)))
    products = seconds(lambda: [x @ w for _ in range(PRODUCTS)])
    return texts, PRODUCTS * x.size * w.shape[1] / products


def multiplications() -> int:
    """Of all matrix products of the texts, attention included."""
    weights = encoder_weights(MINI).items()
    matrices = sum(w.size for name, w in weights if name.startswith("blk.") and w.ndim == 2)
    return TEXTS * TOKENS * (matrices + 2 * MINI.layers * TOKENS * MINI.hidden)


def seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
