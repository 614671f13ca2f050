"""No field of config.json is silently wrong: what mlx-lm reads for a model_type is run as mlx-lm runs it, or
refused."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.errors import RuvmlxError
from ruvmlx.models.config.families import FAMILIES, WRAPPED
from ruvmlx.models.config.rope_scaling import YarnRope
from ruvmlx.models.load import load_model
from tests.oracles.mlx_lm import mlx_lm_logits, mlx_lm_model

from .make_models import make_safetensors_model

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 320, 90)]
TOLERANCE = 2e-5
SIZES = {"n_layers": 5, "head_dim": 16, "intermediate_size": 96, "dtype": "float32"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "smollm3": {"family": "smollm3"},
    "ministral3": {"family": "ministral3", "rope": YarnRope(4.0, 50, 1.0, beta_fast=8.0)},
    "mistral3": {"family": "mistral", "wrapped": True},
    "stablelm": {"family": "stablelm", "rope_dims": 4},
}
NOT_IN_MLX_LM = {"mpt"}  # test_families.py has another judge for it
MODULES = {"mistral": "llama"}  # mlx-lm's own remapping

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 40}
BLEND = {"low_freq_factor": 1.5, "high_freq_factor": 3.0}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 40,
    "short_factor": [1.0] * 8,
    "long_factor": [1 + i / 2 for i in range(8)],
}
SCALINGS = [
    {"rope_type": "default"},
    {"type": "linear", "factor": 2.5},
    {"type": "linear", "rope_type": "default", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.5},
    LLAMA3 | BLEND,
    LLAMA3 | BLEND | {"factor": 7.0},
    LLAMA3,
    {"rope_type": "llama3", "factor": 4.0},
    YARN,
    YARN | {"factor": 9.0},
    YARN | {"original_max_position_embeddings": 300},
    YARN | {"beta_fast": 5.0},
    YARN | {"beta_slow": 0.3},
    YARN | {"mscale": 1.0},
    YARN | {"mscale": 0.7},
    YARN | {"mscale_all_dim": 0.7},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 40},
    LONG,
    LONG | {"long_factor": [3.0] * 8},
    LONG | {"original_max_position_embeddings": 100},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
    YARN | {"rope_theta": 500.0},
]
EVEN = {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
ABSENT = "absent"
UNUSUAL: dict[str, list[Any]] = {
    "hidden_size": [96],
    "num_hidden_layers": [4, 6],
    "intermediate_size": [192],
    "num_attention_heads": [2, 8],
    "rms_norm_eps": [0.3],
    "vocab_size": [640],
    "head_dim": [8, 32],
    "max_position_embeddings": [96],
    "num_key_value_heads": [1, 4, ABSENT],
    "attention_bias": [True],
    "mlp_bias": [True],
    "rope_theta": [77.0, ABSENT],
    "rope_traditional": [True],
    "rope_scaling": SCALINGS,
    "rope_parameters": [
        YARN | EVEN,
        YARN | EVEN | {"llama_4_scaling_beta": 1.5},
        YARN | EVEN | {"original_max_position_embeddings": 20},
        YARN | EVEN | {"rope_theta": 77.0},
        {"rope_type": "default", "original_max_position_embeddings": 20} | EVEN,
        LLAMA3 | EVEN,
        YARN | {"rope_theta": 10000.0},
    ],
    "tie_word_embeddings": [True, False],
    "layer_types": [["sliding_attention"] * 4 + ["full_attention"], ["full_attention"] * 4],
    "sliding_window": [40],
    "no_rope_layer_interval": [2, 3],
    "no_rope_layers": [[1, 0, 1, 1, 0], [1, 0]],
    "use_qkv_bias": [True],
    "partial_rotary_factor": [0.5, 1.0, 0.3, 0.0, ABSENT],
    "layer_norm_eps": [0.3, ABSENT],
    "use_parallel_residual": [True, ABSENT],
    "qk_layernorm": [True, ABSENT],
    "text_config": [],  # its fields are walked in its own place
    "model_type": [],
}
# transformers' window holds for every layer of these, with or without layer_types; mlx-lm wants layer_types.
ALWAYS_SLIDE = ("mistral", "ministral3", "mistral3")


def fields_of(model_type: str) -> list[str]:
    """The names of ModelArgs, and those of the text model's in one for images."""
    module = importlib.import_module(f"mlx_lm.models.{MODULES.get(model_type, model_type)}")
    names = [field.name for field in dataclasses.fields(module.ModelArgs)]
    return names + fields_of("llama") if model_type in WRAPPED else names


def is_walked_always(model_type: str, field: str, i: int) -> bool:
    """Rope's table is read by the same lines for all families: all of it with Llama, a part with others."""
    return field != "rope_scaling" or model_type == "llama" or i % 5 == 0


WALK = [
    pytest.param(model_type, field, i, id=f"{model_type}-{field}-{i}")
    for model_type in SHAPES
    for field in dict.fromkeys(fields_of(model_type))
    for i in range(len(UNUSUAL.get(field, [])))
]


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return {name: make_safetensors_model(folder / name, **SIZES | shape) for name, shape in SHAPES.items()}


def change_config(folder: Path, tmp_path: Path, **keys: Any) -> Path:
    """The same model with other fields in its (text model's) configuration."""
    new = tmp_path / "m"
    new.mkdir()
    for file in folder.iterdir():
        (new / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text.update(keys)
    for key in [key for key, value in text.items() if value == ABSENT]:
        del text[key]
    (new / "config.json").unlink()
    (new / "config.json").write_text(json.dumps(config))
    return new


def ours(folder: Path) -> np.ndarray:
    backend = ReferenceBackend(load_model(str(folder)))
    return backend.verify(TOKENS, backend.new_cache())


def check(folder: Path, slides: bool = False) -> str:
    """ "equal" to mlx-lm, or "refused" by a line that says what."""
    try:
        got = ours(folder)
    except RuvmlxError as error:
        assert "\n" not in str(error)
        return f"refused: {error}"
    want = mlx_lm_logits(mlx_lm_model(folder, slides=slides), TOKENS, (len(TOKENS),))
    assert np.abs(got - want).max() / np.abs(want).max() < TOLERANCE
    return "equal"


def test_every_field_of_mlx_lm_is_walked():
    """A field that a new mlx-lm reads has to be thought about."""
    for model_type in SHAPES:
        assert set(fields_of(model_type)) <= UNUSUAL.keys()
    assert SHAPES.keys() == {family.model_type for family in FAMILIES} - NOT_IN_MLX_LM | WRAPPED.keys()


@pytest.mark.parametrize(("model_type", "field", "i"), WALK)
def test_a_field_is_run_as_mlx_lm_runs_it_or_refused(model_folders, tmp_path, full, model_type, field, i):
    """Each field at unusual values, one at a time."""
    if not full and not is_walked_always(model_type, field, i):
        pytest.skip("every scaling with every family: --full")
    value = UNUSUAL[field][i]
    slides = field == "sliding_window" and model_type in ALWAYS_SLIDE
    check(change_config(model_folders[model_type], tmp_path, **{field: value}), slides)


def test_fields_that_change_the_arithmetic_do_change_it(model_folders, tmp_path):
    """Else the walk would pass on fields that neither side reads."""
    plain = ours(model_folders["smollm3"])
    for i, keys in enumerate(({"rms_norm_eps": 0.3}, {"no_rope_layer_interval": 2}, {"rope_scaling": YARN})):
        (tmp_path / str(i)).mkdir()
        other = change_config(model_folders["smollm3"], tmp_path / str(i), **keys)
        assert check(other) == "equal"
        assert np.abs(ours(other) - plain).max() > 0.01


@pytest.mark.parametrize("model_type", SHAPES)
def test_fields_that_nobody_reads_are_harmless(model_folders, tmp_path, model_type):
    """Neither refused nor run."""
    unread = {"attention_dropout": 0.5, "pretraining_tp": 2, "initializer_range": 9.0, "use_cache": False}
    unread |= {"no_such_field": {"a": [1]}, "logits_scaling": 3.0, "residual_multiplier": 2.0}
    unread |= {"torch_dtype": "bfloat16", "transformers_version": "9", "embedding_multiplier": 2.0}
    assert check(change_config(model_folders[model_type], tmp_path, **unread)) == "equal"


REFUSED = [
    ("llama", {"rope_traditional": True}, "rope_traditional"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen2", {"rope_traditional": True}, "rope_traditional"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen2", {"rope_theta": None}, "rope_theta"),
    ("smollm3", {"rope_theta": None}, "rope_theta"),
    ("llama", {"rope_scaling": YARN | {"mscale": 0.7}}, "mscale"),
    ("llama", {"rope_scaling": YARN | {"mscale_all_dim": 0.7}}, "mscale_all_dim"),
    ("llama", {"rope_scaling": YARN | {"truncate": False}}, "truncate"),
    ("llama", {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": YARN | {"rope_theta": 500.0}}, "rope_theta"),
    ("llama", {"rope_scaling": LONG | {"factor": 2.0}}, "factor"),
    ("llama", {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_type"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
    ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 99}, "original_max_position"),
    ("llama", {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 5.0}}, "factor"),
    ("llama", {"rope_scaling": LONG | {"long_factor": [1.0] * 7}}, "long_factor"),
    ("llama", {"rope_scaling": YARN | {"factor": 0.0}}, "factor"),
    ("llama", {"rope_scaling": YARN | {"original_max_position_embeddings": 10**400}}, "original_max"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, "layer_types"),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 9}, "layer_types"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ("ministral3", {"rope_parameters": YARN | {"rope_theta": 1e4}}, "llama_4_scaling_beta"),
    ("mistral3", {"model_type": "qwen3"}, "qwen3"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual"),
    ("stablelm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("stablelm", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("stablelm", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ("llama", {"model_type": ["llama"]}, "model_type"),
]


@pytest.mark.parametrize(("model_type", "keys", "words"), REFUSED)
def test_what_is_not_run_is_refused_by_name(model_folders, tmp_path, model_type, keys, words):
    """Also what only transformers reads, and what the two read differently."""
    with pytest.raises(RuvmlxError, match=words) as caught:
        load_model(str(change_config(model_folders[model_type], tmp_path, **keys)))
    assert "\n" not in str(caught.value)
