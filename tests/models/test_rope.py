"""What depends on the context, and attention factors that only transformers reads; the rest is compared with
mlx-lm in tests/backends/test_families.py."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.models.config.hf_config import config_from_json
from ruvmlx.models.config.rope import query_scales, rope
from ruvmlx.models.config.rope_scaling import DynamicRope, LongRope
from ruvmlx.platform.mx import mx

from .make_models import hf_config
from .shapes import Shape

LONG = LongRope(64, 1.3, tuple(1 + i / 16 for i in range(16)), tuple(2 + i for i in range(16)))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def of(context: int | None = None, **shape) -> np.ndarray:
    return rope(Shape(**shape).config(), context).frequencies


@pytest.mark.parametrize("context", [512, 513, 2048])
def test_dynamic_is_mlx_lms_at_the_longest_context(context):
    """A text of that length, turned in one call: mlx-lm decides by its length."""
    from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

    turn = DynamicNTKScalingRoPE(32, 512, False, 10000.0, 3.0)
    x = np.random.default_rng(1).normal(size=(1, 1, context, 32)).astype(np.float32)
    want = np.array(turn(mx.array(x)))[0, 0]
    angles = np.outer(np.arange(context), of(context, rope=DynamicRope(3.0)))
    a, b = x[0, 0, :, :16], x[0, 0, :, 16:]
    got = np.hstack([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)])
    np.testing.assert_allclose(got, want, atol=2e-3)


def test_dynamic_is_plain_within_the_models_own_context():
    np.testing.assert_array_equal(of(rope=DynamicRope(3.0)), of())
    np.testing.assert_array_equal(of(100, rope=DynamicRope(3.0)), of())
    assert (of(1024, rope=DynamicRope(3.0))[1:] < of()[1:]).all()


def test_longrope_takes_its_factors_by_the_context():
    """Long ones beyond the original context; None: the model's own context decides."""
    plain = of()
    np.testing.assert_allclose(of(65, rope=LONG), plain / np.array(LONG.long_factor))
    np.testing.assert_allclose(of(64, rope=LONG), plain / np.array(LONG.short_factor))
    np.testing.assert_array_equal(of(rope=LONG), of(512, rope=LONG))
    assert rope(Shape(rope=LONG).config()).factor == 1.3


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, 0.1 * np.log(4) + 1),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 0.7, "mscale_all_dim": 1.2}, (0.07 * np.log(4) + 1) / (0.12 * np.log(4) + 1)),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarns_attention_factor(keys, factor):
    """As transformers: given, or by mscale, or by the factor."""
    config = config_from_json(hf_config(Shape()) | {"rope_scaling": YARN | keys}, True, "m")
    assert rope(config).factor == pytest.approx(factor)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    config = config_from_json(hf_config(Shape()) | {"rope_scaling": YARN | {"beta_fast": 4.0}}, True, "m")
    stretch = rope(replace(config, rope_scaling=None)).frequencies / rope(config).frequencies
    assert stretch[0] == 1 and stretch[-1] == pytest.approx(4.0) and (np.diff(stretch) >= -1e-12).all()
    assert ((stretch > 1.01) & (stretch < 3.99)).any()


def test_queries_are_scaled_in_steps():
    """1 in the first span, then by the logarithm of the span's number."""
    scale = Shape(family="ministral3", span=50).config().query_scale
    got = query_scales(scale, np.array([0, 49, 50, 99, 100, 1000]))
    np.testing.assert_allclose(got, 1 + 0.3 * np.log([1, 1, 2, 2, 3, 21]), rtol=1e-6)
