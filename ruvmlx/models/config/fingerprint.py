"""This module computes the fingerprint of a model, a hash that identifies its content. A stored adapter names
the fingerprint of its model and not a path, so the user can move the model's files."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from .families import ATTENTION, MLP
from .model import ModelConfig, ModelShape
from .rope_scaling import LinearRope, Llama3Rope

SAMPLES, SAMPLE_BYTES = 64, 256
PIECE_BYTES = 1024
_NEWEST_FORMAT = ("layer_norm", "norm_biases", "rope_dims", "alibi_bias_max", "gated_mlp")


def fingerprint(config: ModelShape, layout: Mapping[str, tuple], samples: Iterable[np.ndarray]) -> str:
    """Return 32 hex digits: a hash of the configuration, of every tensor's type and shape, and of bytes of
    some tensors.

    samples: the raw bytes, uint8 [n], of some tensors (for example the embedding), which differ between two
        trainings. The function reads at most 16 KiB of each array, which takes about a millisecond. A hash of
        a whole file would take seconds.
    """
    digest = hashlib.sha256(repr(sorted(_facts(config).items())).encode())
    digest.update(repr(sorted(layout.items())).encode())
    for raw in samples:
        digest.update(_sample(raw))
    return digest.hexdigest()[:32]


def content_hash(names: Iterable[str], raw: Callable[[str], np.ndarray]) -> str:
    """Return 32 hex digits: a hash of the PIECE_BYTES bytes in the middle of every tensor (of all bytes of a
    smaller tensor). `fingerprint` reads the bytes of a few tensors only, so it can be the same for two models
    that differ in other tensors.

    raw: a function of a tensor's name that returns the bytes of the tensor, uint8 [n]
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        stored = raw(name)
        start = max(0, stored.size - PIECE_BYTES) // 2
        digest.update(name.encode() + b"\0" + stored[start : start + PIECE_BYTES].tobytes())
    return digest.hexdigest()[:32]


def _facts(config: ModelShape) -> dict[str, Any]:
    """Return the fields of a ModelConfig in the form of the first version of ruvmlx, with added fields for
    those settings that the first version did not have; return all fields of another class than ModelConfig
    unchanged. Because of this form, a model that the first version could run has the same fingerprint as in
    the first version, so old adapters still fit."""
    facts = asdict(config)
    if not isinstance(config, ModelConfig):
        return facts
    newer = ("biases", "head_norms", "layers_without_rope", "query_scale", *_NEWEST_FORMAT)
    kept = {name: value for name, value in facts.items() if name not in newer}
    return kept | _of_version_1(config) | {name: value for name, value in _since(config).items() if value}


def _of_version_1(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "rope_scaling": asdict(scaling) if isinstance(scaling, Llama3Rope) else None,
        "rope_linear_factor": scaling.factor if isinstance(scaling, LinearRope) else 1.0,
        "attention_bias": config.biases >= ATTENTION,
        "mlp_bias": config.biases >= MLP,
    }


def _since(config: ModelConfig) -> dict[str, Any]:
    """Return the values of the ModelConfig fields that the first version of ruvmlx did not have. A value is
    false or empty (and left out of the hash) if it is the value that the first version used for every
    model."""
    flagged = [modules for modules in (ATTENTION, MLP) if config.biases >= modules]
    known = config.rope_scaling is None or isinstance(config.rope_scaling, LinearRope | Llama3Rope)
    return {
        "biases": sorted(config.biases.difference(*flagged)),
        "head_norms": config.head_norms,
        "layers_without_rope": sorted(config.layers_without_rope),
        "query_scale": config.query_scale and asdict(config.query_scale),
        "rope_stretch": "" if known else repr(config.rope_scaling),
        "layer_norm": config.layer_norm,
        "norm_biases": config.norm_biases,
        "rope_dims": "" if config.rope_dims is None else str(config.rope_dims),
        "alibi_bias_max": config.alibi_bias_max,
        "ungated_mlp": not config.gated_mlp,
    }


def _sample(raw: np.ndarray) -> bytes:
    """Return the bytes of SAMPLES pieces of `raw` at equal distances, or all bytes of `raw` if it has at most
    SAMPLES * SAMPLE_BYTES bytes."""
    if raw.size <= SAMPLES * SAMPLE_BYTES:
        return raw.tobytes()
    starts = np.linspace(0, raw.size - SAMPLE_BYTES, SAMPLES).astype(np.int64)
    return b"".join(raw[at : at + SAMPLE_BYTES].tobytes() for at in starts)
