"""This module has the shapes of the small random models that the tests make, and their weights.

Two models with the same shape and seed have the same float32 weights.
So tests can compare formats with each other.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ruvmlx.models.config.families import ATTENTION, MLP, QKV, family_of
from ruvmlx.models.config.layout import matrices, vectors
from ruvmlx.models.config.model import ModelConfig, QueryScale
from ruvmlx.models.config.rope_scaling import Llama3Rope, RopeScaling

LLAMA3 = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
BETA = 0.3  # of queries' scale by position
BIAS_MAX = 8.0  # of ALiBi


@dataclass(frozen=True)
class Shape:
    """A tiny decoder with grouped heads and unequal sizes, so that no axis can be swapped unseen."""

    seed: int = 0
    hidden_size: int = 64
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 192
    vocab_size: int = 320
    max_context: int = 512
    rope_theta: float = 10000.0
    tie: bool = False
    sliding_window: int | None = None  # makes it a Mistral
    llama3: bool = False  # LLAMA3 rope scaling
    rope: RopeScaling | None = None  # another one
    attention_bias: bool = False
    mlp_bias: bool = False
    family: str = ""  # a model_type; "": Llama, or Mistral with a window
    span: int = 50  # the context before stretching of a Ministral 3: its queries are scaled beyond
    wrapped: bool = False  # as the language model of a mistral3, beside one for images
    rope_dims: int | None = None  # of a StableLM: turned numbers of each head

    @property
    def model_type(self) -> str:
        return self.family or ("mistral" if self.sliding_window else "llama")

    @property
    def scaling(self) -> RopeScaling | None:
        return LLAMA3 if self.llama3 else self.rope

    def config(self) -> ModelConfig:
        family = family_of(self.model_type, "make_models")
        every_fourth = frozenset(range(3, self.n_layers, 4))
        flags = {"attention_bias": QKV if self.family == "stablelm" else ATTENTION, "mlp_bias": MLP}
        biases = [modules for flag, modules in flags.items() if getattr(self, flag)]
        return ModelConfig(
            model_type=self.model_type,
            hidden_size=self.hidden_size,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            rms_norm_eps=1e-5,
            rope_theta=self.rope_theta,
            max_context=self.max_context,
            tie_word_embeddings=self.tie,
            rope_scaling=self.scaling,
            sliding_window=self.sliding_window,
            biases=family.biases.union(*biases),
            head_norms=family.head_norms,
            layers_without_rope=every_fourth if family.skips_rope else frozenset(),
            query_scale=QueryScale(BETA, self.span) if family.scales_queries else None,
            layer_norm=family.layer_norm,
            norm_biases=family.norm_biases,
            rope_dims=self.rope_dims if family.has_rope else 0,
            alibi_bias_max=0.0 if family.has_rope else BIAS_MAX,
            gated_mlp=family.gated_mlp,
        )


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights by mlx-lm's names: matrices ~ N(0, 1/in), norms near 1, biases near 0."""
    rng = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for module, (rows, cols) in matrices(config):
        scale = 1.0 if module == "model.embed_tokens" else cols**-0.5
        out[f"{module}.weight"] = (rng.standard_normal((rows, cols)) * scale).astype(np.float32)
    for name, shape in vectors(config):
        middle = 0.0 if name.endswith(".bias") else 1.0
        out[name] = (middle + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    return out


def with_fused(arrays: dict[str, Any], parts: tuple[str, ...], fused: str) -> dict[str, Any]:
    """The rows of several matrices as one, in the order of `parts`."""
    first, *others = parts
    out = {name: array for name, array in arrays.items() if not any(f".{part}." in name for part in others)}
    for name in [name for name in out if f".{first}." in name]:
        rows = [arrays[name.replace(f".{first}.", f".{part}.")] for part in parts]
        out[name.replace(f".{first}.", f".{fused}.")] = np.concatenate(rows)
        del out[name]
    return out
