"""Which model is this? Adapters belong to a fingerprint, not to a path."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from .families import ATTENTION, MLP
from .model import ModelConfig
from .rope_scaling import LinearRope, Llama3Rope

SAMPLES, SAMPLE_BYTES = 64, 256


def fingerprint(config: ModelConfig, layout: Mapping[str, tuple], samples: Iterable[np.ndarray]) -> str:
    """32 hex digits from the configuration, every tensor's type and shape, and samples of some tensors.

    `samples` are raw bytes, uint8 [n]: the embedding or head and whatever else tells two trainings apart.
    Reading 64 places of each costs a millisecond; hashing all of a file would cost seconds.
    """
    digest = hashlib.sha256(repr(sorted(_facts(config).items())).encode())
    digest.update(repr(sorted(layout.items())).encode())
    for raw in samples:
        digest.update(_sample(raw))
    return digest.hexdigest()[:32]


def _facts(config: ModelConfig) -> dict[str, Any]:
    """The configuration as version 1 had it, plus what it did not know: older adapters keep their models."""
    facts, scaling = asdict(config), config.rope_scaling
    facts["rope_linear_factor"] = scaling.factor if isinstance(scaling, LinearRope) else 1.0
    if not isinstance(scaling, Llama3Rope):
        facts["rope_scaling"] = None
    facts |= {"attention_bias": config.biases >= ATTENTION, "mlp_bias": config.biases >= MLP}
    newer = {name: facts.pop(name) for name in ("head_norms", "layers_without_rope", "query_scale")}
    newer["biases"] = sorted(
        facts.pop("biases")
        - (ATTENTION if facts["attention_bias"] else set())
        - (MLP if facts["mlp_bias"] else set())
    )
    newer["layers_without_rope"] = sorted(newer["layers_without_rope"])
    if scaling is not None and not isinstance(scaling, LinearRope | Llama3Rope):
        newer["rope_stretch"] = repr(scaling)
    return facts | {name: value for name, value in newer.items() if value}


def _sample(raw: np.ndarray) -> bytes:
    """Evenly spread pieces of an array of bytes; all of it when it is small."""
    if raw.size <= SAMPLES * SAMPLE_BYTES:
        return raw.tobytes()
    starts = np.linspace(0, raw.size - SAMPLE_BYTES, SAMPLES).astype(np.int64)
    return b"".join(raw[at : at + SAMPLE_BYTES].tobytes() for at in starts)
