"""Pages of the C library: the same bytes as every other implementation of them."""

import numpy as np
import pytest

from ruvmlx.kernels.library import implementations
from ruvmlx.tiers import COLD, HOT, PAGE, WARM
from tests.oracles import pages as p

IMPLS = implementations()
DIMS = (2, 18, 32, 64, 80, 96, 128, 256, 512)
BELOW = ((HOT, WARM), (WARM, COLD), (HOT, COLD))


def numbers(rng, kind, head_dim):
    """[64, D]: channels off centre, one large token, one of zeros; or what is hard to round."""
    x = rng.normal(size=(PAGE, head_dim)) * rng.uniform(0.2, 2, head_dim)
    x += rng.normal(size=head_dim) * (rng.random(head_dim) < 0.2) * 4
    x[rng.integers(PAGE)] *= 3
    x[rng.integers(PAGE)] = 0
    if kind == "ties":  # multiples of half a step
        x = rng.integers(-20, 21, x.shape) / 2.0
        x[:, 0], x[:, 1] = 127 / 2, -127 / 2
    if kind == "constant":
        x = np.full_like(x, rng.choice([0.1, -7.3, 0, 30001]))
    if kind == "tiny":  # scales become subnormal halves, or zero, or -0
        x *= 10.0 ** rng.integers(-9, -3, (PAGE, 1))
    if kind == "huge":
        x = np.clip(x * 2000, -8000, 8000)
    if kind == "negative":
        x = -np.abs(x)
    return x.astype(np.float32)


KINDS = ("plain", "ties", "constant", "tiny", "huge", "negative")


def hot_pages(rng, head_dim):
    """[len(KINDS), bytes] in the shared order."""
    both = [[numbers(rng, kind, head_dim) for _ in "kv"] for kind in KINDS]
    return np.stack([p.pack_ref(HOT, k, v) for k, v in both])


def native(tier, pages, head_dim):
    size = p.head_page_bytes(tier, head_dim)
    out = p.aligned_bytes(len(pages) * size).reshape(-1, size)
    for i, page in enumerate(pages):
        out[i] = p.from_canonical(tier, page, head_dim)
    return out


def shared_form(tier, pages, head_dim):
    return np.stack([p.canonical(tier, page, head_dim) for page in pages])


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("tier", [COLD, WARM, HOT])
def test_the_shared_order_and_back(tier, head_dim):
    """Any bytes survive; sizes are multiples of 64 and not much larger than the shared form."""
    size = p.canonical_bytes(tier, head_dim)
    data = np.random.default_rng(head_dim).integers(0, 256, size, dtype=np.uint8)
    page = p.from_canonical(tier, data, head_dim)
    np.testing.assert_array_equal(p.canonical(tier, page, head_dim), data)
    assert page.nbytes % 64 == 0
    if head_dim % 32 == 0:
        assert page.nbytes == size


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize(("source", "target"), BELOW)
def test_demotion_gives_the_bytes_of_the_formula(source, target, head_dim, impl):
    """Every implementation, at rows of padding too: hot pages hold NaN there."""
    rng = np.random.default_rng(head_dim)
    data = hot_pages(rng, head_dim)
    if source == WARM:
        data = np.stack([p.demote_ref(HOT, page, WARM, head_dim) for page in data])
    pages = native(source, data, head_dim)
    if source == HOT:
        width = -(-head_dim // 16) * 16
        pages.view(np.uint16)[:, 64 * head_dim :].reshape(-1, 64, width)[..., head_dim:] = 0x7E00
    got = p.demote(source, pages, target, head_dim, impl)
    want = np.stack([p.demote_ref(source, page, target, head_dim) for page in data])
    np.testing.assert_array_equal(shared_form(target, got, head_dim), want)
    again = native(target, want, head_dim)
    np.testing.assert_array_equal(got, again)  # padding too


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_demotion_gives_the_bytes_of_the_gpu_twin(head_dim):
    """The MLX code that the GPU kernels are compared with."""
    mx = pytest.importorskip("mlx.core")
    from ruvmlx.backends.mlx.kernels import demote

    data = hot_pages(np.random.default_rng(1), head_dim)
    hot = native(HOT, data, head_dim)
    warm = demote.demote_ops(mx.array(data), head_dim, WARM)
    cold = demote.demote_ops(warm, head_dim, COLD)
    for target, want in ((WARM, warm), (COLD, cold)):
        got = shared_form(target, p.demote(HOT, hot, target, head_dim), head_dim)
        np.testing.assert_array_equal(got, np.array(want))


def test_what_is_refused():
    """Odd and large heads, unknown tiers, promotion, memory of another size."""
    for tier, head_dim in ((HOT, 63), (HOT, 0), (WARM, 514), (3, 64), (-1, 64)):
        with pytest.raises(ValueError, match=f"tier {tier} for head_dim {head_dim}"):
            p.head_page_bytes(tier, head_dim)
    page = native(WARM, np.zeros((1, p.canonical_bytes(WARM, 64)), np.uint8), 64)
    with pytest.raises(ValueError, match="not below"):
        p.demote(WARM, page, HOT, 64)
    with pytest.raises(ValueError, match="contiguous bytes"):
        p.demote(WARM, page[:, 64:], COLD, 64)
    assert p._lib().rvm_pages_demote(WARM, page.ctypes.data, WARM, page.ctypes.data, 1, 64) == 1
    assert p._lib().rvm_pages_demote(WARM, None, COLD, page.ctypes.data, 1, 64) == 1
