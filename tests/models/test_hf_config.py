"""config.json, in the spellings that transformers and mlx-lm have used over the years."""

import pytest

from ruvmlx.errors import CorruptFile, UnsupportedModel
from ruvmlx.models.config.families import has_decoder
from ruvmlx.models.config.hf_config import Affine, config_from_json, quantization
from ruvmlx.models.config.rope_scaling import LinearRope, Llama3Rope

from .make_models import hf_config
from .shapes import Shape

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**keys):
    data = hf_config(Shape()) | keys
    return config_from_json({k: v for k, v in data.items() if v != "absent"}, True, "m")


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_theta": "absent"},
    ],
)
def test_llama3_scaling_in_every_spelling(keys):
    """Old `type`, newer `rope_type`, newest `rope_parameters`."""
    got = config(**({"rope_theta": 500000.0} | keys))
    assert got.rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)
    assert got.rope_theta == 500000.0


def test_linear_scaling_and_none():
    """Linear scaling is a factor; null and "default" are none."""
    assert config(rope_scaling={"type": "linear", "factor": 4.0}).rope_scaling == LinearRope(4.0)
    assert config(rope_scaling={"rope_type": "default"}).rope_scaling is None
    assert config(rope_scaling=None).rope_scaling is None


def test_defaults_of_transformers():
    """What config.json leaves out or sets to null."""
    got = config(head_dim=None, num_key_value_heads="absent", rope_theta="absent", rms_norm_eps="absent")
    assert (got.head_dim, got.n_kv_heads, got.rope_theta, got.rms_norm_eps) == (16, 4, 10000.0, 1e-6)


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 64),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, None),
        ({"model_type": "mistral", "sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, 64),
        ({"model_type": "mistral", "sliding_window": 64, "layer_types": ["full_attention"] * 2}, None),
        ({"model_type": "llama", "sliding_window": 64}, None),
        ({"model_type": "llama", "sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, 64),
    ],
)
def test_a_sliding_window_holds_where_the_family_says(keys, window):
    """Mistral's window holds everywhere, Llama's only where layer_types asks for it."""
    assert config(**keys).sliding_window == window


@pytest.mark.parametrize(
    ("keys", "words", "error"),
    [
        ({"model_type": "phi3"}, "model_type 'phi3'", UnsupportedModel),
        ({"model_type": "llama4"}, "mixtures of experts with attention in chunks", UnsupportedModel),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'", UnsupportedModel),
        ({"partial_rotary_factor": 0.5}, "part of each head", UnsupportedModel),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'", UnsupportedModel),
        ({"rope_scaling": {"rope_type": "mrope"}}, "'mrope'", UnsupportedModel),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "make sense",
            CorruptFile,
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "kinds of layers", UnsupportedModel),
        (
            {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
            "differ",
            UnsupportedModel,
        ),
        ({"hidden_size": "64"}, "hidden_size is '64'", CorruptFile),
        ({"hidden_size": "absent"}, "hidden_size is missing", CorruptFile),
        ({"model_type": None}, "model_type is missing", UnsupportedModel),
        ({"hidden_size": True}, "hidden_size is 'True'", CorruptFile),
        ({"num_hidden_layers": 0}, "n_layers is 0", CorruptFile),
        ({"num_hidden_layers": 10**6}, "n_layers is 1000000", CorruptFile),
        ({"num_attention_heads": 0}, "num_attention_heads is 0", CorruptFile),
        ({"num_key_value_heads": 3}, "cannot share 3", CorruptFile),
        ({"head_dim": 33}, "head_dim is 33", CorruptFile),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps", CorruptFile),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps", CorruptFile),
        ({"rope_theta": 0.0}, "rope_theta is 0.0", CorruptFile),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'", CorruptFile),
        ({"rope_scaling": "x"}, "rope_scaling is 'x'", CorruptFile),
    ],
)
def test_wrong_configurations_are_refused_in_one_line(keys, words, error):
    """One line each; what would run but wrongly is refused too."""
    with pytest.raises(error, match=words) as caught:
        config(**keys)
    assert "\n" not in str(caught.value)


def test_modules_may_differ_from_the_default_quantisation():
    """A default, and modules that differ or are left alone."""
    table = {"group_size": 64, "bits": 4, "a": {"bits": 8}, "b": False, "mode": "affine"}
    assert quantization({"quantization": table}, "m") == (Affine(64, 4), {"a": Affine(64, 8), "b": None})
    assert quantization({}, "m") == (None, {})


@pytest.mark.parametrize(
    "table", [{"bits": 7}, {"group_size": 16}, {"mode": "mxfp4", "bits": 4, "group_size": 64}]
)
def test_unknown_quantisations_are_refused(table):
    """Of MLX's kinds some sizes are known."""
    with pytest.raises(UnsupportedModel):
        quantization({"quantization": table}, "m")


def test_which_models_are_computed_here():
    """The others go to mlx-lm, also when a known wrapper holds one of them."""
    assert has_decoder({"model_type": "qwen3"})
    assert has_decoder({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}})
    assert not has_decoder({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}})
    assert not any(has_decoder({"model_type": kind}) for kind in ("llama4", "phi3", None, ["llama"]))
