"""Each layer kernel against its NumPy twin, in every implementation, at odd and unequal sizes."""

import numpy as np
import pytest

from ruvmlx.kernels import layers
from ruvmlx.kernels.library import implementations
from ruvmlx.lora.quantised import pack_pair, unpack_pair
from tests.oracles.c_kernels import from_half, to_half

IMPLS = implementations()
pytestmark = pytest.mark.parametrize("impl", IMPLS)


def random(*shape, seed=0, spread=1.0):
    return np.random.default_rng(seed + sum(shape)).normal(0, spread, shape).astype(np.float32)


@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (3, 17), (2, 576), (5, 1023)])
def test_rms_norm_matches_its_twin(impl, tokens, dim):
    """Against float64."""
    x, w = random(tokens, dim, spread=3), random(dim, seed=1)
    np.testing.assert_allclose(
        layers.rms_norm(x, w, 1e-5, impl), layers.rms_norm_ref(x, w, 1e-5), rtol=2e-6, atol=1e-7
    )


def test_rms_norm_of_large_and_tiny_rows(impl):
    """Squares of 1e15 fit in float32; denormals give 0, not NaN."""
    x = np.stack([np.full(33, 1e15, np.float32), np.full(33, 1e-42, np.float32), np.zeros(33, np.float32)])
    y = layers.rms_norm(x, np.ones(33, np.float32), 1e-5, impl)
    np.testing.assert_allclose(y[0], 1, rtol=1e-6)
    np.testing.assert_allclose(y[1:], 0, atol=1e-35)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 1), (3, 17), (2, 576), (5, 1023)])
def test_layer_norm_matches_its_twin(impl, tokens, dim, biased):
    """Against float64, with rows far from zero."""
    x, w = random(tokens, dim, spread=3) + 10, random(dim, seed=1)
    bias = random(dim, seed=2) if biased else None
    got, want = layers.layer_norm(x, w, bias, 1e-5, impl), layers.layer_norm_ref(x, w, bias, 1e-5)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_layer_norm_far_from_zero(impl):
    """Numbers around 3000: their squares leave no digits for a variance of 1."""
    x = 3000 + random(4, 333)
    got = layers.layer_norm(x, np.ones(333, np.float32), None, 1e-5, impl)
    want = layers.layer_norm_ref(x, np.ones(333, np.float32), None, 1e-5)
    np.testing.assert_allclose(got, want, atol=2e-3)
    same = np.full((1, 9), 7, np.float32)
    np.testing.assert_array_equal(layers.layer_norm(same, x[0, :9], None, 1e-5, impl), 0)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 2), (3, 5, 10), (7, 2, 64), (2, 3, 80)])
def test_rope_matches_its_twin(impl, tokens, heads, dim, traditional):
    """Half-split and interleaved pairs."""
    x = random(tokens, heads, dim)
    turn = layers.turns(np.arange(1000, 1000 + tokens), 10000.0 ** (-np.arange(dim // 2) * 2 / dim))
    got = layers.rope(x, turn, traditional, impl)
    np.testing.assert_allclose(got, layers.rope_ref(x, turn, traditional), rtol=1e-5, atol=1e-6)
    assert np.abs(got - x).max() > 0.1


@pytest.mark.parametrize("n", [1, 15, 160, 1001])
def test_swiglu_matches_its_twin(impl, n):
    gate, up = random(n, spread=5), random(n, seed=2)
    gate[0] = 100 if n % 2 else -100  # e^100 overflows float32
    np.testing.assert_allclose(
        layers.swiglu(gate, up, impl), layers.swiglu_ref(gate, up), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("n", [1, 15, 160, 1001])
def test_gelu_matches_its_twin(impl, n):
    x = random(n, spread=3)
    x[0] = 40 if n % 2 else -40
    np.testing.assert_allclose(layers.gelu(x, impl), layers.gelu_ref(x), rtol=2e-6, atol=3e-7)


def test_gelu_of_a_negative_tail(impl):
    """The small results there are right to 6 digits, not only near zero."""
    x = np.linspace(-9, -0.1, 777, dtype=np.float32)
    np.testing.assert_allclose(layers.gelu(x, impl), layers.gelu_ref(x), rtol=1e-5)
    ends = np.float32([np.nan, np.inf, -1e30, 1e30, 0])
    got = layers.gelu(ends, impl)
    assert np.isnan(got[0])
    np.testing.assert_array_equal(got[1:], [np.inf, 0, np.float32(1e30), 0])


def test_exponentials_of_swiglu_are_within_4_ulp(impl):
    """y = -x / (1 + e^x), so e^x = -x / y - 1: every 2,048th float from 17 to 88.37."""
    low, high = np.float32([17, 88.37]).view(np.int32)
    x = np.arange(low, high, 2048, np.int32).view(np.float32)
    y = layers.swiglu(-x, np.ones_like(x), impl).astype(np.float64)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(-x / y - 1 - exact) / np.spacing(exact.astype(np.float32))).max() < 4


def test_swiglu_at_the_ends_of_its_exponential(impl):
    """Beyond them e^x is 0 or infinite; NaN is not swallowed, whatever its payload."""
    gate = np.float32([-1e30, -88.5, 0, 87.01, 1e30, np.nan] * 9)
    gate[5::6] = np.array([0x7FC00001], np.uint32).view(np.float32)
    y = layers.swiglu(gate, np.ones_like(gate), impl).reshape(9, 6)
    np.testing.assert_array_equal(y[:, :5], np.tile(np.float32([0, 0, 0, 87.01, 1e30]), (9, 1)))
    assert np.isnan(y[:, 5]).all()


def test_every_half_survives_the_way_to_float_and_back(impl):
    """All 65,536 halves to float and back; NaN stays NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    got, want = from_half(bits, impl), bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    back = to_half(want, impl)
    nan = np.isnan(want)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert np.isnan(back[nan].view(np.float16)).all()


def test_rounding_to_half(impl):
    """Ties to even, the borders of the subnormals and of infinity: as NumPy rounds."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[1:] + halves[:-1]) / 2
    x = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, 9e9), -middle])
    x = np.concatenate([x, [65519.996, 65520.0, 1e30, np.inf, -np.inf, 1e-45, 2.9e-8, 3e-8]])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(to_half(x, impl), want)


@pytest.mark.parametrize("rank", [1, 2, 3, 8, 64])
@pytest.mark.parametrize(("tokens", "width", "out"), [(1, 5, 3), (4, 33, 1030)])
def test_lora_add_matches_its_twin(impl, tokens, width, out, rank):
    """y += s (x A) B, one token and several, in place."""
    x, a, b = random(tokens, width), random(width, rank, seed=3), random(rank, out, seed=4)
    y = random(tokens, out, seed=5)
    want = y.copy()
    layers.lora_add(y, x, a, b, 0.7, impl)
    layers.lora_add_ref(want, x, a, b, 0.7)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3, 8, 64])
@pytest.mark.parametrize(("tokens", "width", "out"), [(1, 5, 3), (4, 33, 1030), (3, 577, 64)])
def test_packed_lora_add_matches_its_twin(impl, tokens, width, out, rank):
    """As above, of factors with 4 bits; the twin reads the unpacked factors."""
    packed = pack_pair((random(width, rank, seed=3), random(rank, out, seed=4)))
    x, y = random(tokens, width), random(tokens, out, seed=5)
    want = y.copy()
    layers.lora_add(y, x, packed[0].to_words(), packed[1].to_words(), 0.7, impl)
    layers.lora_add_ref(want, x, *unpack_pair(*packed), 0.7)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.pairwise
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [0, 1, 50, 130])
@pytest.mark.parametrize(
    ("head_dim", "group", "queries", "past"),
    [(32, 1, 1, 0), (64, 3, 1, 255), (80, 2, 1, 200), (128, 8, 2, 330), (64, 3, 21, 190), (18, 7, 40, 70)],
)
def test_attention_matches_its_twin(impl, head_dim, group, queries, past, window, parts):
    """Causal, windowed, few and many queries, one key range or several merged, against float64."""
    total = past + queries
    frequencies = 10000.0 ** (-np.arange(head_dim // 2) * 2 / head_dim)
    turn = layers.turns(np.arange(total), frequencies)
    k, v = random(total, head_dim), random(total, head_dim, seed=6)
    q = random(queries, group, head_dim, seed=7, spread=2)
    cache = layers.PagedKV(head_dim)
    cache.append(k[: past // 2], v[: past // 2], turn[: past // 2], impl)
    cache.append(k[past // 2 :], v[past // 2 :], turn[past // 2 :], impl)
    parts = min(parts, len(cache.pages))
    got = cache.attend(q, turn[past:], past, window, parts, impl)
    want = layers.attend_ref(q, k, v, turn, past, window)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("head_dim", "group", "queries", "past"),
    [(64, 1, 1, 255), (80, 3, 1, 200), (64, 4, 2, 126), (80, 1, 21, 190), (64, 3, 65, 63), (80, 4, 1, 64)],
)
def test_attention_with_slopes_matches_its_twin(impl, head_dim, group, queries, past, parts):
    """ALiBi: steep and flat slopes, across the ends of pages; no rope."""
    total = past + queries
    turn = layers.turns(np.zeros(total, np.int64), np.zeros(head_dim // 2))
    k, v = random(total, head_dim), random(total, head_dim, seed=6)
    q = random(queries, group, head_dim, seed=7, spread=2)
    slopes = np.float32([0.5, 1 / 256, 0.0884, 0.01])[:group]
    cache = layers.PagedKV(head_dim)
    cache.append(k, v, turn, impl)
    got = cache.attend(q, turn[past:], past, 0, min(parts, len(cache.pages)), impl, slopes=slopes)
    want = layers.attend_ref(q, k, v, turn, past, slopes=slopes)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)
    assert np.abs(layers.attend_ref(q, k, v, turn, past) - want).max() > 0.05


def test_shapes_that_do_not_fit_are_refused(impl):
    """Shapes that do not fit are refused before C sees them."""
    x = random(2, 4)
    with pytest.raises(ValueError, match="weight has shape"):
        layers.rms_norm(x, random(5), 1e-5, impl)
    with pytest.raises(ValueError, match="up has shape"):
        layers.swiglu(x, random(5), impl)
