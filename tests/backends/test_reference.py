"""The oracle's own pieces, against definitions written out by hand."""

import math

import numpy as np
import pytest

from ruvmlx.backends import reference
from ruvmlx.models.config.rope import rope as rope_of
from tests.models.make_models import quantize_affine
from tests.models.shapes import LLAMA3, Shape


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_numbers_become_scale_times_code_plus_bias(bits):
    """Each packed number by hand: shift, mask, scale, add."""
    w = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    packed, scales, biases = quantize_affine(w, bits, 32)
    got = reference.dequantise(packed, scales, biases, 96)
    per_word = 32 // bits
    for row in range(5):
        for i in range(96):
            q = (int(packed[row, i // per_word]) >> (bits * (i % per_word))) & (2**bits - 1)
            assert got[row, i] == pytest.approx(scales[row, i // 32] * q + biases[row, i // 32], abs=1e-6)
    assert np.abs(got - w).max() <= scales.max() / 2 + 1e-6


@pytest.mark.parametrize("bits", [3, 6])
def test_dequantise_like_mlx(bits):
    """Widths that do not divide 32 straddle words."""
    from ruvmlx.platform.mx import mx

    with mx.stream(mx.cpu):
        parts = mx.quantize(mx.random.normal((7, 64)), group_size=32, bits=bits)
        expected = mx.dequantize(*parts, group_size=32, bits=bits)
        mx.eval(expected, *parts)
    got = reference.dequantise(*(np.array(p) for p in parts), 64)
    np.testing.assert_allclose(got, np.array(expected), atol=1e-6)


def test_rope_rotates_pairs():
    """Pair (i, i + d/2) turns by its angle; lengths stay."""
    x = np.random.default_rng(2).standard_normal((3, 4, 6)).astype(np.float32)
    angles = np.random.default_rng(3).uniform(-9, 9, (4, 3))
    y = reference.rope(x, angles)
    for h, t, i in np.ndindex(3, 4, 3):
        z = complex(x[h, t, i], x[h, t, i + 3]) * complex(math.cos(angles[t, i]), math.sin(angles[t, i]))
        assert y[h, t, i] == pytest.approx(z.real, abs=1e-5)
        assert y[h, t, i + 3] == pytest.approx(z.imag, abs=1e-5)


def test_llama3_frequencies():
    """Short wavelengths stay, long ones stretch by the factor, between them a blend."""
    config = Shape(llama3=True).config()
    plain = rope_of(Shape().config()).frequencies
    scaled = rope_of(config).frequencies
    wavelength = 2 * np.pi / plain
    short = wavelength < LLAMA3.original_max_position / LLAMA3.high_freq_factor
    long = wavelength > LLAMA3.original_max_position / LLAMA3.low_freq_factor
    assert short.any() and long.any() and (~short & ~long).any()
    np.testing.assert_allclose(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / LLAMA3.factor)
    between = ~short & ~long
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / LLAMA3.factor)).all()


def test_a_window_hides_older_tokens():
    """Token 5 with a window of 3 sees 3, 4 and 5."""
    seen = reference.visible(4, 2, 3)
    assert seen.tolist() == [[False, False, True, True, True, False], [False, False, False, True, True, True]]
    assert reference.visible(1, 2, None).tolist() == [[True, True, False], [True, True, True]]
