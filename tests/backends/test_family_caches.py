"""Families with tiers, batches, LoRA and training: heads normed, layers without rope, stretched rope, queries
scaled by position."""

import numpy as np
import pytest

from ruvmlx.models.config.rope_scaling import YarnRope
from ruvmlx.models.load import load_model
from tests.models.make_models import make_safetensors_model

from . import (
    test_decode_batch,
    test_lora,
    test_mlx_batch,
    test_tiered_mlx,
    test_tiered_native,
    test_training,
)
from .test_agreement import STORED
from .test_lora import steady  # noqa: F401 - a fixture: the last bit is compared

SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64, "n_heads": 4, "n_kv_heads": 2}
# Little sharper than plain attention: the tolerances are those of plain models.
STRETCHED = YarnRope(2.0, 50, 0.1 * float(np.log(2.0)) + 1, beta_fast=8.0)
EVEN = YarnRope(4.0, 50, 1.0, beta_fast=8.0)
SHAPES = {
    "qwen3": SIZES | {"family": "qwen3"},
    "smollm3": SIZES | {"family": "smollm3", "n_layers": 4, "rope": STRETCHED, "tie": True},
    "ministral3": SIZES | {"family": "ministral3", "rope": EVEN, "span": 300},
}


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.fixture
def model(shape, tmp_path):
    return load_model(str(make_safetensors_model(tmp_path / "m", dtype="float32", **shape)))


def test_tiers_on_the_native_backend(model):
    """All tiers, against the oracle's attention over what the pages hold."""
    test_tiered_native.test_attention_over_the_pages(model, test_tiered_native.SMALL)


@pytest.mark.parametrize("way", ["cpu", "graph"])
def test_tiers_on_mlx(model, way):
    """All tiers, against the graph's own attention over the same quantised pages."""
    test_tiered_mlx.test_judge_and_full_cache(model, way)


def test_batches_on_the_native_backend(shape, tmp_path):
    """Rows have the bits that they have alone."""
    check = test_decode_batch.test_native_quantised_rows_have_the_bits_that_they_have_alone
    check(tmp_path, shape, "cold", 2)


@pytest.mark.parametrize("policy", ["plain", "cold"])
@pytest.mark.parametrize("way", ["cpu", "graph"])
def test_batches_on_mlx(model, way, policy, pytestconfig):
    """Each sequence has the logits that it has alone."""
    test_mlx_batch.test_each_has_what_it_has_alone(model, way, policy, 7, pytestconfig)


@pytest.mark.parametrize("name", test_lora.OPEN)
def test_lora_of_every_module(shape, tmp_path, name):
    """Against fused weights."""
    path = make_safetensors_model(tmp_path / "m", **shape, **STORED["float32"])
    test_lora.test_agrees_with_fused_weights(load_model(str(path)), name)


def test_training_values(model):
    """A reply's log-probability and KL, against the oracle."""
    test_training.test_values_are_the_oracles(model)


@pytest.mark.parametrize("how", ["cpu", "as on a gpu"])
def test_training_gradients(model, how, monkeypatch):
    """Against finite differences, module by module."""
    test_training.test_gradients_are_finite_differences(model, monkeypatch, "reply", how)


@pytest.mark.parametrize("way", ["cpu", "graph"])
def test_batches_of_a_model_with_alibi(tmp_path, way, pytestconfig):
    """Sequences of unequal lengths over pages of every tier: each has the logits that it has alone."""
    shape = test_tiered_mlx.SHAPES["d64-alibi"]
    made = load_model(str(make_safetensors_model(tmp_path / "m", dtype="float32", **shape)))
    test_mlx_batch.test_each_has_what_it_has_alone(made, way, "cold", 7, pytestconfig)
