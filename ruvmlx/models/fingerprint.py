"""Which model is this? Adapters belong to a fingerprint, not to a path."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict

import numpy as np

from .model import ModelShape

SAMPLES, SAMPLE_BYTES = 64, 256


def fingerprint(config: ModelShape, layout: Mapping[str, tuple], samples: Iterable[np.ndarray]) -> str:
    """32 hex digits from the configuration, every tensor's type and shape, and samples of some tensors.

    `samples` are raw bytes, uint8 [n]: the embedding or head and whatever else tells two trainings apart.
    Reading 64 places of each costs a millisecond; hashing all of a file would cost seconds.
    """
    digest = hashlib.sha256(repr(sorted(asdict(config).items())).encode())
    digest.update(repr(sorted(layout.items())).encode())
    for raw in samples:
        digest.update(_sample(raw))
    return digest.hexdigest()[:32]


def _sample(raw: np.ndarray) -> bytes:
    """Evenly spread pieces of an array of bytes; all of it when it is small."""
    if raw.size <= SAMPLES * SAMPLE_BYTES:
        return raw.tobytes()
    starts = np.linspace(0, raw.size - SAMPLE_BYTES, SAMPLES).astype(np.int64)
    return b"".join(raw[at : at + SAMPLE_BYTES].tobytes() for at in starts)
