"""Kernels for GGUF's super-blocks against float64 NumPy and against each other."""

import numpy as np
import pytest

from ruvmlx.kernels import matmul as m
from ruvmlx.kernels.packing import SUPER_BLOCKS, PackedMatrix
from ruvmlx.models.files.gguf_blocks import dequantise_blocks
from ruvmlx.models.files.gguf_types import ROWS

IMPLS = m.implementations()
BLOCK = 256  # the number of activations that share one scale
KINDS = {row.name: row for row in ROWS if row.name in SUPER_BLOCKS}
kinds = pytest.mark.parametrize("kind", KINDS)
impls = pytest.mark.parametrize("impl", IMPLS)


def blocks(kind, rows, cols, seed=0):
    """Noise with small scales: uint8 [rows, bytes of a row]."""
    rng, row = np.random.default_rng(seed), KINDS[kind]
    raw = rng.integers(0, 256, (rows * cols // 256, row.nbytes), np.uint8)
    for at in row.halves:
        raw[:, at : at + 2] = rng.normal(0, 1e-3, len(raw)).astype("<f2")[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def matrix(kind, rows, cols, seed=0):
    """Packed, and as float32."""
    raw = blocks(kind, rows, cols, seed)
    return m.Matrix(raw, cols=cols, blocks=kind), dequantise_blocks(raw, KINDS[kind], "w")


@kinds
def test_rows_are_exactly_the_files(kind):
    """As many weights as in the file, to the last bit, whatever the number of rows and super-blocks."""
    for rows, cols in [(1, 256), (17, 512), (40, 768)]:
        w, plain = matrix(kind, rows, cols)
        for i in range(rows):
            assert np.array_equal(w[i].view(np.uint32), plain[i].view(np.uint32))


@impls
@kinds
@pytest.mark.parametrize("acts", [8, 16])
def test_products_equal_their_formula(impl, kind, acts):
    """Odd, unequal sizes and every number of tokens that has code of its own."""
    rng = np.random.default_rng(1)
    for rows, cols in [(1, 256), (19, 768), (35, 512)]:
        w, plain = matrix(kind, rows, cols)
        for tokens in (1, 2, 3, 5, 16, 33):
            x = rng.normal(size=(tokens, cols)).astype(np.float32)
            got, want = m.matmul(w, x, impl, acts), m.matmul_ref(plain, x, acts, BLOCK)
            size = np.abs(x).astype(np.float64) @ np.abs(plain).T.astype(np.float64)
            parts = (
                np.abs(x).sum(1, keepdims=True) * np.abs(plain).max()
            )  # scales times codes, and lows, apart
            assert np.all(np.abs(got - want) <= 2e-6 * size + 1e-6 * parts)


@kinds
@pytest.mark.parametrize("acts", [8, 16])
def test_all_implementations_return_the_same_bits(kind, acts):
    """A token alone and among others, too."""
    w, _ = matrix(kind, 35, 512, seed=2)
    x = np.random.default_rng(2).normal(size=(21, 512)).astype(np.float32)
    want = m.matmul(w, x, "scalar", acts)
    for impl in IMPLS:
        for tokens in [*range(1, 10), 21]:
            assert np.array_equal(m.matmul(w, x[:tokens], impl, acts), want[:tokens]), (impl, tokens)
        assert np.array_equal(m.matmul(w, x[7:8], impl, acts)[0], want[7]), impl


@kinds
@pytest.mark.parametrize(("acts", "most"), [(8, 0.012), (16, 5e-5)])
def test_what_quantised_activations_cost(kind, acts, most):
    """The whole error against exact activations, as a share of the result's spread."""
    w, plain = matrix(kind, 64, 768, seed=4)
    x = np.random.default_rng(4).normal(size=(8, 768)).astype(np.float32)
    want = m.matmul_ref(plain, x)
    error = m.matmul(w, x, bits=acts) - want
    assert most / 10 < np.sqrt(np.mean(error**2) / np.mean(want**2)) < most


@impls
def test_activations_of_another_form_are_refused(impl):
    """A scale per 32 columns before a super-block, or per 256 before groups of 32, is an error."""
    w, y = matrix("Q4_K", 16, 256)[0], np.zeros((1, 16), np.float32)
    scales = np.ones((16, 8), np.float32)
    groups = m.Matrix(np.zeros((16, 32), np.uint32), scales, scales, 256)
    memory, f = m.aligned_bytes(2048), m.functions(impl)
    for this, other in [(w, groups), (groups, w)]:
        for bits in (8, 16):
            call = (memory.ctypes.data, 1, 0, 1, y.ctypes.data, 16)
            assert f.matmul(this.memory.ctypes.data, this.acts_kind(bits), *call) == m.OK
            assert f.matmul(this.memory.ctypes.data, other.acts_kind(bits), *call) == m.BAD_ARGUMENT


@kinds
def test_they_take_the_bytes_of_the_file(kind):
    """Of 16 rows; a multiple of 64 bytes for each tile and a head come on top."""
    for cols in (256, 4096, 14336):
        raw = blocks(kind, 64, cols)
        assert (
            raw.nbytes <= PackedMatrix.plan_blocks(kind, raw, cols).nbytes <= 1.005 * raw.nbytes + 4 * 64 + 64
        )


@impls
@kinds
def test_a_bad_activation_spoils_its_token_only(impl, kind):
    w, _ = matrix(kind, 18, 256)
    x = np.random.default_rng(3).normal(size=(5, 256)).astype(np.float32)
    before = m.matmul(w, x, impl)
    x[3, 200] = np.inf
    after = m.matmul(w, x, impl)
    assert np.isnan(after[3]).all()
    assert np.array_equal(np.delete(after, 3, 0), np.delete(before, 3, 0))


def test_rows_that_do_not_fit_are_refused():
    """Too short for the columns, or not whole super-blocks."""
    raw = blocks("Q4_K", 3, 512)
    with pytest.raises(ValueError, match="not 256 weights"):
        PackedMatrix.plan_blocks("Q4_K", raw, 256)
    with pytest.raises(ValueError, match="not 512 weights"):
        PackedMatrix.plan_blocks("Q6_K", raw, 512)
    with pytest.raises(ValueError, match="cannot pack"):
        PackedMatrix.plan_blocks("Q4_K", raw[:, :72], 128)
