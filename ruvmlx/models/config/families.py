"""This module has a table with one row for each model family. A row lists the differences from Llama's
decoder, and the fields of the model's files that describe these differences.

To support a new family that differs from Llama only in the points that the fields of `Family` describe, add a
row. tests/backends/test_families.py compares every family with mlx-lm's model, and MPT, which mlx-lm does not
have, with the tests' own model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...errors import UnsupportedModel

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
QKV = frozenset({"q_proj", "k_proj", "v_proj"})
MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
LLAMA_BIASES = {"attention_bias": ATTENTION, "mlp_bias": MLP}


class Window(Enum):
    """This enum says which layers have a sliding window (attention only to the newest tokens) if config.json
    has no `layer_types`."""

    NO_LAYER = 0
    EVERY_LAYER = 1
    FROM_MAX_WINDOW_LAYERS = 2  # layers from index max_window_layers on, if `use_sliding_window` is true
    WITHOUT_ROPE = 3  # the layers without RoPE, if `use_sliding_window` is true


@dataclass(frozen=True)
class Family:
    """The differences between the models of one family and Llama's models.

    model_type: the family's name in config.json
    architectures: the family's names in GGUF's general.architecture
    defaults: {field: the value if config.json does not have the field}, for fields with the same default in
        transformers and mlx-lm
    """

    name: str
    model_type: str
    architectures: tuple[str, ...]
    # True: in the family's GGUF files, the rows of q and k are in another order (interleaved), made by
    # llama.cpp's converter
    interleaved: bool = False
    biases: frozenset[str] = frozenset()  # the linear layers that have a bias in each model of the family
    # {flag of config.json: modules that have a bias if the flag is true}
    bias_flags: Mapping[str, frozenset[str]] = field(default_factory=dict)
    window: Window = Window.NO_LAYER
    head_norms: bool = False
    # True: some layers have no RoPE; the fields no_rope_layers or no_rope_layer_interval say which
    skips_rope: bool = False
    # True: queries are scaled by position (QueryScale, from the field llama_4_scaling_beta)
    scales_queries: bool = False
    layer_norm: bool = False  # True: the family has LayerNorm instead of RMS norm
    norm_biases: bool = False
    has_rope: bool = True  # False: the family has ALiBi instead of RoPE
    gated_mlp: bool = True
    partial_rope: bool = False  # True: RoPE can rotate only a part of each head (partial_rotary_factor)
    # {flag of config.json with which ruvmlx refuses a model: the meaning of the flag}
    unsupported: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def eps(self) -> str:
        """Return the name of the field with the epsilon of the norms, in config.json or, for MPT, in the
        result of mpt.common_fields."""
        return "layer_norm_eps" if self.layer_norm else "rms_norm_eps"


FAMILIES = (
    Family(
        "Llama", "llama", ("llama",), interleaved=True, bias_flags=LLAMA_BIASES,
        defaults={"rope_theta": 1e4, "rms_norm_eps": 1e-6},
    ),
    Family(
        "Mistral", "mistral", ("llama", "mistral3"), interleaved=True, bias_flags=LLAMA_BIASES,
        window=Window.EVERY_LAYER, defaults={"rope_theta": 1e4, "rms_norm_eps": 1e-6},
    ),
    Family(
        "Ministral3", "ministral3", ("mistral3",), interleaved=True, window=Window.EVERY_LAYER,
        scales_queries=True,
    ),
    Family(
        "Qwen2", "qwen2", ("qwen2",), biases=QKV,
        window=Window.FROM_MAX_WINDOW_LAYERS, defaults={"rms_norm_eps": 1e-6},
    ),
    Family(
        "Qwen3", "qwen3", ("qwen3",), bias_flags={"attention_bias": ATTENTION}, head_norms=True,
        window=Window.FROM_MAX_WINDOW_LAYERS, defaults={"rms_norm_eps": 1e-6},
    ),
    Family(
        "SmolLM3", "smollm3", ("smollm3",), interleaved=True, bias_flags=LLAMA_BIASES, skips_rope=True,
        window=Window.WITHOUT_ROPE, defaults={"rms_norm_eps": 1e-6},
    ),
    Family(
        "StableLm", "stablelm", ("stablelm",), bias_flags={"use_qkv_bias": QKV}, layer_norm=True,
        norm_biases=True, partial_rope=True, unsupported={
            "qk_layernorm": "a LayerNorm of each head's own before RoPE",
            "use_parallel_residual": "attention and MLP side by side",
        },
    ),
    Family("Mpt", "mpt", ("mpt",), layer_norm=True, has_rope=False, gated_mlp=False),
)  # fmt: skip

# {model_type of a model for text and images: possible families of its language model}. `text_config` in
# config.json describes the language model.
WRAPPED = {"mistral3": ("mistral", "ministral3")}

# {model_type of a model that resembles one of FAMILIES: the reason why ruvmlx's own decoder cannot run it}.
# mlx-lm runs the safetensors folders of these models, but not their GGUF files.
OTHERS = {
    "llama4": "its layers are mixtures of experts with attention in chunks",
    "mistral4": "its layers are mixtures of experts with compressed keys and values",
}

MODEL_TYPES = (*(family.model_type for family in FAMILIES), *WRAPPED)
ARCHITECTURES = tuple(dict.fromkeys(name for family in FAMILIES for name in family.architectures))


def has_decoder(data: Mapping[str, Any]) -> bool:
    """Return True if ruvmlx has its own decoder for the model_type in the config.json `data`. The function
    does not check the sizes and the format of the weights."""
    text = data.get("text_config")
    if isinstance(text, dict) and str(text.get("model_type")) in OTHERS:
        return False
    return data.get("model_type") in MODEL_TYPES


def family_of(model_type: object, where: str) -> Family:
    """Return the family with this model_type. Raises UnsupportedModel if no family has this model_type."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    raise _not_run(f"{where}: model_type", model_type, MODEL_TYPES)


def families_of(architecture: object, where: str) -> list[Family]:
    """Return the families whose GGUF files have this architecture. Raises UnsupportedModel if no family has
    this architecture."""
    # a damaged file can have an array as its architecture
    name = architecture if isinstance(architecture, str) else None
    found = [family for family in FAMILIES if name in family.architectures]
    if not found:
        raise _not_run(f"{where}: architecture", architecture, ARCHITECTURES)
    return found


def _not_run(what: str, got: object, known: tuple[str, ...]) -> UnsupportedModel:
    if got is None:
        return UnsupportedModel(f"{what} is missing; expected one of {', '.join(known)}.")
    kind = str(got)[:40]
    why = f" ({OTHERS[kind]})" if kind in OTHERS else ""
    return UnsupportedModel(f"{what} {kind!r} is not run{why}; {', '.join(known)} are.")
