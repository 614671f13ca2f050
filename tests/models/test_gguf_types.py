"""Every packed type of GGUF against ggml's own conversion, to the last bit, and against its affine form."""

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile
from ruvmlx.models.files import gguf_blocks, gguf_codes
from ruvmlx.models.files.affine import dequantise
from ruvmlx.models.files.gguf import GGUFTensor
from ruvmlx.models.files.gguf_blocks import check_blocks, dequantise_blocks, unpack
from ruvmlx.models.files.gguf_types import ROWS

from ..oracles import ggml

PACKED = [row for row in ROWS if row.block > 1]
BY_NAME = {row.name: row for row in ROWS}
packed = pytest.mark.parametrize("kind", PACKED, ids=lambda row: row.name)


def random_blocks(kind, n, seed=0, sane=False):
    """Bytes of noise with finite numbers of either sign; `sane`: of the size of weights."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n, kind.nbytes), np.uint8)
    for at in kind.halves:
        half = rng.normal(0, 0.01, n).astype("<f2") if sane else rng.integers(0, 0x7C00, n).astype("<u2")
        signs = rng.integers(0, 2, n).astype("<u2") << 15
        blocks[:, at : at + 2] = (half.view("<u2") ^ signs)[:, None].view(np.uint8)
    if kind.name == "Q8_K":
        blocks[:, :4] = rng.normal(0, 0.01, n).astype("<f4")[:, None].view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 130, n) if sane else rng.integers(0, 240, n)
    return blocks


@packed
def test_sizes_are_ggmls(kind):
    """Name, weights and bytes of a block, by number."""
    name, block, nbytes = ggml.traits(kind)
    assert (name.upper(), block, nbytes) == (kind.name.upper(), kind.block, kind.nbytes)


@packed
def test_weights_are_ggmls_to_the_last_bit(kind):
    """Noise in every field, denormal scales and both signs; several pieces at a time."""
    blocks = random_blocks(kind, 301)
    got = dequantise_blocks(blocks, kind, "w")
    assert got.shape == (301, kind.block)
    want = ggml.dequantise(blocks, kind).reshape(got.shape)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    assert len(np.unique(want)) > 300


@packed
def test_what_ggml_quantises_comes_back(kind):
    """Blocks that ggml made of weights: the same bits, and near the weights."""
    if kind.name == "Q8_K":
        pytest.skip("ggml makes Q8_K of activations only")
    w = np.random.default_rng(1).normal(0, 0.02, (3, 512)).astype(np.float32)
    raw = ggml.quantise(w, kind)
    got = dequantise_blocks(raw, kind, "w")
    np.testing.assert_array_equal(got.reshape(-1), ggml.dequantise(raw, kind))
    assert np.sqrt(np.mean((got - w) ** 2)) < 0.02 * (0.4 if kind.bits == 2 else 0.25)


@packed
def test_pieces_change_nothing(kind, monkeypatch):
    """Blocks are converted some at a time; shapes of more than one axis are kept."""
    blocks = random_blocks(kind, 12, sane=True)
    want = dequantise_blocks(blocks, kind, "w").reshape(3, -1)
    monkeypatch.setattr(gguf_blocks, "BLOCKS", kind.block // 32 * 5)
    np.testing.assert_array_equal(dequantise_blocks(blocks.reshape(3, -1), kind, "w"), want)


@packed
def test_the_affine_form_has_the_same_weights(kind):
    """Exactly for groups of 32 to 128 weights; groups of 16 are rounded, by a tenth of their own rounding."""
    blocks = random_blocks(kind, 15, sane=True)
    cols = 5 * kind.block
    parts = unpack(blocks, GGUFTensor("w", (3, cols), kind, 0))
    assert parts["weight"].shape == (3, cols * kind.affine_bits // 32)
    assert parts["scales"].shape == parts["biases"].shape == (3, cols // min(128, max(32, kind.group)))
    got = dequantise(parts["weight"], parts["scales"], parts["biases"], cols)
    want = dequantise_blocks(blocks, kind, "w").reshape(3, cols)
    if kind.affine:
        np.testing.assert_array_equal(got, want)
    else:
        most = np.abs(want).reshape(-1, 32).max(1).repeat(32).reshape(want.shape)
        assert np.all(np.abs(got - want) <= 0.51 / 127 * most)


def test_quick_ways_have_their_twin():
    """Q4_0, Q4_1 and Q8_0 without codes in between: the same arrays."""
    for name, quick in gguf_blocks._QUICK.items():
        kind = BY_NAME[name]
        blocks = random_blocks(kind, 40, sane=True)
        for got, want in zip(quick(blocks), gguf_blocks._pack_codes(kind.codes(blocks), kind), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_words_hold_every_code(bits):
    """Bit by bit: value i lies in bits i * bits and up."""
    q = np.random.default_rng(bits).integers(0, 1 << bits, (5, 96), np.uint8)
    words = gguf_blocks.pack_words(q, bits)
    assert words.shape == (5, 96 * bits // 32)
    for row, got in zip(q, words, strict=True):
        want = sum(int(v) << (bits * i) for i, v in enumerate(row))
        assert int.from_bytes(got.tobytes(), "little") == want


def test_q3_k_fits_into_q6_k():
    """The same weights to the last bit."""
    blocks = random_blocks(BY_NAME["Q3_K"], 33)
    as_q6_k = gguf_codes.q3_k_as_q6_k(blocks)
    got = dequantise_blocks(as_q6_k, BY_NAME["Q6_K"], "w")
    np.testing.assert_array_equal(got, dequantise_blocks(blocks, BY_NAME["Q3_K"], "w"))


@packed
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(kind, bad):
    """In any float of any block, in each of the three ways to read them."""
    if not kind.halves:
        pytest.skip("another test has the types without float16")
    for at in kind.halves:
        blocks = random_blocks(kind, 9, sane=True)
        blocks[7, at : at + 2] = np.array([bad], "<f2").view(np.uint8)
        with pytest.raises(CorruptFile, match="NaN or infinity"):
            check_blocks(blocks, kind, "w")
        with pytest.raises(CorruptFile, match="NaN or infinity"):
            dequantise_blocks(blocks, kind, "w")
        with pytest.raises(CorruptFile, match="NaN or infinity"):
            unpack(blocks, GGUFTensor("w", (9, kind.block), kind, 0))


@pytest.mark.parametrize("e", [255, 254])
def test_mxfp4_powers_that_no_float_has_are_refused(e):
    """255 is NaN; 12 times the power of 254 is infinite."""
    kind = BY_NAME["MXFP4"]
    blocks = random_blocks(kind, 9, sane=True)
    blocks[3] = 0x77
    blocks[3, 0] = e
    for read in (dequantise_blocks, lambda b, k, n: unpack(b, GGUFTensor(n, (9, 32), k, 0))):
        with pytest.raises(CorruptFile, match="NaN or infinity"):
            read(blocks, kind, "w")


def test_a_wide_q8_k_scale_is_refused():
    kind = BY_NAME["Q8_K"]
    blocks = random_blocks(kind, 3)
    blocks[1, :4] = np.array([np.inf], "<f4").view(np.uint8)
    with pytest.raises(CorruptFile, match="NaN or infinity"):
        dequantise_blocks(blocks, kind, "w")
