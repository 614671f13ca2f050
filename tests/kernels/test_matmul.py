"""Matrix kernels against float64 NumPy and against each other; the packed form against MLX's formula."""

import ctypes as C

import ml_dtypes
import numpy as np
import pytest

from ruvmlx.kernels import matmul as m
from ruvmlx.kernels.packing import PackedMatrix

IMPLS = m.implementations()
SHAPES = [(1, 32), (3, 96), (17, 160), (33, 256)]
TOKENS = [1, 2, 3, 7, 33]
SCALES = [np.float16, ml_dtypes.bfloat16, np.float32]
FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32]
ACTS = [8, 16]  # bits of activations


def quantised_arrays(rng, rows, cols, bits, group, dtype=np.float16, symmetric=False):
    """Random weights in MLX's layout."""
    weight = rng.integers(0, 2**32, (rows, cols * bits // 32), dtype=np.uint32)
    scales = rng.normal(0, 0.1, (rows, cols // group)).astype(dtype)
    zero = np.float32(-(2 ** (bits - 1)))
    biases = (zero * scales.astype(np.float32)).astype(dtype)
    if not symmetric:
        biases = rng.normal(0, 0.5, scales.shape).astype(dtype)
    return weight, scales, biases


def groups(cols):
    return [g for g in (32, 64, 128) if cols % g == 0]


def close(got, want, x, w):
    """Rounding of float32 sums: relative to the sum of magnitudes, whatever cancels."""
    size = np.abs(x).astype(np.float64) @ np.abs(w).T.astype(np.float64)
    assert np.all(np.abs(got - want) <= 2e-6 * size + 1e-30), np.max(np.abs(got - want) / size)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("acts", ACTS)
def test_quantised_products_equal_their_formula(impl, bits, symmetric, acts):
    """Odd, unequal sizes, every group and every number of tokens."""
    rng = np.random.default_rng(bits)
    for rows, cols in SHAPES:
        for group in groups(cols):
            arrays = quantised_arrays(rng, rows, cols, bits, group, symmetric=symmetric)
            w, plain = m.Matrix(*arrays, cols), m.dequantise_ref(*arrays, bits)
            assert w.affine == (not symmetric)
            for tokens in TOKENS:
                x = rng.normal(size=(tokens, cols)).astype(np.float32)
                close(m.matmul(w, x, impl, acts), m.matmul_ref(plain, x, acts), x, np.abs(plain) + 4)


@pytest.mark.parametrize(
    "kinds", [(np.float32, np.float16), (np.float16, np.float32), (ml_dtypes.bfloat16, np.float16)]
)
def test_scales_and_biases_may_have_two_types(kinds):
    """A folder of safetensors may have them so; C reads both with one type."""
    rng = np.random.default_rng(2)
    weight, scales, biases = quantised_arrays(rng, 33, 256, 4, 64, np.float32)
    scales, biases = scales.astype(kinds[0]), biases.astype(kinds[1])
    x = rng.normal(size=(3, 256)).astype(np.float32)
    same = m.Matrix(weight, scales.astype(np.float32), biases.astype(np.float32), 256)
    np.testing.assert_array_equal(m.matmul(m.Matrix(weight, scales, biases, 256), x), m.matmul(same, x))
    for wrong in ((weight, scales, biases[:, :2]), (weight.astype(np.int64), scales, biases)):
        with pytest.raises(ValueError, match="scales"):
            m.Matrix(*wrong, 256)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_products_equal_their_formula(impl, dtype):
    """Any number of columns; weights are converted in registers."""
    rng = np.random.default_rng(1)
    for rows, cols in [(1, 1), (3, 7), (17, 33), (65, 160)]:
        plain = rng.normal(size=(rows, cols)).astype(dtype)
        w = m.Matrix(plain)
        for tokens in [*TOKENS, 4, 16]:
            x = rng.normal(size=(tokens, cols)).astype(np.float32)
            want = m.matmul_ref(plain.astype(np.float32), x)
            close(m.matmul(w, x, impl), want, x, plain.astype(np.float32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("acts", "most"), [(8, 0.01), (16, 4e-5)])
def test_what_quantised_activations_cost(bits, acts, most):
    """The whole error against exact activations, as a share of the result's spread."""
    rng = np.random.default_rng(2)
    arrays = quantised_arrays(rng, 64, 576, bits, 64, symmetric=True)
    plain, x = m.dequantise_ref(*arrays, bits), rng.normal(size=(8, 576)).astype(np.float32)
    want = m.matmul_ref(plain, x)
    error = m.matmul(m.Matrix(*arrays, 576), x, bits=acts) - want
    assert most / 10 < np.sqrt(np.mean(error**2) / np.mean(want**2)) < most


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("acts", ACTS)
def test_a_token_does_not_depend_on_its_neighbours(impl, acts):
    """Bit for bit the same alone and among 40: a draft that is verified in a batch stays what it was."""
    rng = np.random.default_rng(3)
    for bits in (4, 8):
        w = m.Matrix(*quantised_arrays(rng, 40, 128, bits, 32), 128)
        x = rng.normal(size=(40, 128)).astype(np.float32)
        together = m.matmul(w, x, impl, acts)
        for t in range(40):
            assert np.array_equal(m.matmul(w, x[t : t + 1], impl, acts)[0], together[t])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("acts", ACTS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_few_tokens_have_the_bits_of_the_scalar_kernel(impl, acts, bits, symmetric):
    """One to nine tokens, as a call with guessed tokens has them, at rows that leave tiles unfilled."""
    rng = np.random.default_rng(12)
    for rows, cols in [(1, 32), (17, 96), (43, 160)]:
        w = m.Matrix(*quantised_arrays(rng, rows, cols, bits, 32, symmetric=symmetric), cols)
        x = rng.normal(size=(9, cols)).astype(np.float32)
        want = m.matmul(w, x, "scalar", acts)
        for tokens in range(1, 10):
            assert np.array_equal(m.matmul(w, x[:tokens], impl, acts), want[:tokens]), (rows, tokens)


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_are_exactly_the_affine_formula(bits, dtype, symmetric):
    """s * q rounded to float32, then + b rounded: what MLX computes for float32 scales."""
    rng = np.random.default_rng(4)
    for rows, cols in SHAPES:
        for group in groups(cols):
            weight, scales, biases = quantised_arrays(rng, rows, cols, bits, group, dtype, symmetric)
            w = m.Matrix(weight, scales, biases, cols)
            q = m.dequantise_ref(weight, np.ones_like(scales), np.zeros_like(scales), bits).astype(np.float32)
            s, b = (a.astype(np.float32).repeat(group, 1) for a in (scales, biases))
            want = (s * q).astype(np.float32) + b
            for row in range(rows):
                assert np.array_equal(w[row], want[row])


def test_rows_agree_with_mlx():
    """The same numbers as mx.dequantize, at float32 scales within its own rounding."""
    mx = pytest.importorskip("mlx.core")
    rng = np.random.default_rng(5)
    plain = mx.array(rng.normal(size=(48, 128)).astype(np.float32))
    for bits in (4, 8):
        packed = mx.quantize(plain, group_size=64, bits=bits)
        want = np.array(mx.dequantize(*packed, group_size=64, bits=bits))
        w = m.Matrix(*(np.array(a) for a in packed), 128)
        got = np.stack([w[i] for i in range(48)])
        assert np.max(np.abs(got - want)) <= 2e-7 * np.max(np.abs(want))


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_rows_come_back_unchanged(dtype):
    """Denormals, infinities and NaN of 16 bits included."""
    bits = np.arange(0, 65536, 7, dtype=np.uint16)[: 9 * 1040].reshape(9, 1040)
    plain = bits.view(dtype) if dtype != np.float32 else bits.astype(np.float32) * np.float32(1e-40)
    w = m.Matrix(plain)
    for i in range(9):
        assert np.array_equal(w[i], plain[i].astype(np.float32), equal_nan=True)


def test_storage_is_the_narrowest_that_loses_nothing():
    """float32 scales that halves hold are stored as halves; biases of -8 s are not stored at all."""
    rng = np.random.default_rng(6)
    weight, scales, biases = quantised_arrays(rng, 16, 64, 4, 32)
    half = PackedMatrix.plan(weight, scales, biases, 64).nbytes
    assert PackedMatrix.plan(weight, scales.astype(np.float32), biases.astype(np.float32), 64).nbytes == half
    third = scales.astype(np.float32) / np.float32(3)
    assert PackedMatrix.plan(weight, third, third, 64).nbytes == half + 2 * 16 * 2 * 2
    assert PackedMatrix.plan(weight, scales, -8 * scales, 64).nbytes == half - 2 * 16 * 2
    assert half == 64 + 16 * (32 + 2 * 4)  # head; 16 rows of 64 nibbles and two scales and biases


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("acts", ACTS)
def test_a_bad_activation_spoils_its_token_only(impl, bits, value, acts):
    """NaN in, NaN out, in every row of y; other tokens are as before."""
    rng = np.random.default_rng(7)
    w = m.Matrix(*quantised_arrays(rng, 33, 96, bits, 32), 96)
    x = rng.normal(size=(5, 96)).astype(np.float32)
    before = m.matmul(w, x, impl, acts)
    x[2, 50] = value
    after = m.matmul(w, x, impl, acts)
    assert np.isnan(after[2]).all()
    keep = [0, 1, 3, 4]
    assert np.array_equal(after[keep], before[keep])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("acts", ACTS)
def test_tiny_activations_count_as_zero(impl, acts):
    """Denormals would make 127 / max infinite; a block of them beside a normal one changes nothing."""
    rng = np.random.default_rng(8)
    w = m.Matrix(*quantised_arrays(rng, 16, 64, 4, 32), 64)
    x = rng.normal(size=(1, 64)).astype(np.float32)
    x[0, :32] = 0
    want = m.matmul(w, x, impl, acts)
    x[0, :32] = np.float32(1e-40) * np.arange(32)
    assert np.array_equal(m.matmul(w, x, impl, acts), want)
    assert np.array_equal(m.matmul(w, 0 * x, impl, acts), np.zeros((1, 16), np.float32))


def test_unaligned_arrays_give_the_same_bits():
    """x and y 4 bytes off, weights and scales from odd addresses: the same bits."""
    rng = np.random.default_rng(9)
    arrays = quantised_arrays(rng, 17, 96, 4, 32)
    x, w = rng.normal(size=(3, 96)).astype(np.float32), m.Matrix(*arrays, 96)
    odd = m.Matrix(*(off_by(a, 2 if a.dtype.itemsize == 2 else 4) for a in arrays), 96)
    assert np.array_equal(odd.memory, w.memory)
    y = off_by(np.empty((3, 17), np.float32), 4)
    assert np.array_equal(m.product(w, m.activations(w, off_by(x, 4)), y), m.matmul(w, x))


def off_by(a, n):
    """A copy of a that starts n bytes past a multiple of 64."""
    memory = m.aligned_bytes(a.nbytes + 64)[n : n + a.nbytes]
    memory[:] = np.frombuffer(a.tobytes(), np.uint8)
    return memory.view(a.dtype).reshape(a.shape)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits", ACTS)
def test_tiles_and_tokens_may_be_split(impl, bits):
    """Threads share the tiles of a product and the tokens of its activations; nothing else is written."""
    rng = np.random.default_rng(10)
    w = m.Matrix(*quantised_arrays(rng, 70, 64, 8, 64), 64)
    x, f = rng.normal(size=(20, 64)).astype(np.float32), m.functions(impl)
    want, acts = m.matmul(w, x, impl, bits), m.activations(w, x, impl, bits)
    parts = m.aligned_bytes(acts.nbytes)
    for begin, end in [(17, 20), (0, 5), (5, 17)]:
        assert f.acts(bits, x.ctypes.data, 64, 20, 64, begin, end, parts.ctypes.data) == m.OK
    assert np.array_equal(m.product(w, parts, np.empty_like(want), impl, bits), want)
    y = np.full((20, 80), 5, np.float32)
    for begin, end in [(3, 5), (0, 1), (2, 2)]:
        args = acts.ctypes.data, 20, begin, end, y.ctypes.data, 80
        assert f.matmul(w.memory.ctypes.data, bits, *args) == m.OK
    assert np.array_equal(y[:, :16], want[:, :16])
    assert np.array_equal(y[:, 48:70], want[:, 48:])
    assert (y[:, 16:48] == 5).all()
    assert (y[:, 70:] == 5).all()


def test_bad_shapes_are_refused():
    """Never read out of bounds: sizes that do not fit each other raise."""
    rng = np.random.default_rng(11)
    arrays = quantised_arrays(rng, 16, 64, 4, 32)
    w, x = m.Matrix(*arrays, 64), np.zeros((2, 64), np.float32)
    with pytest.raises(ValueError, match=r"\[T, 64\]"):
        m.matmul(w, np.zeros((2, 63), np.float32))
    with pytest.raises(ValueError, match="float32"):
        m.matmul(w, x.astype(np.float64))
    with pytest.raises(ValueError, match="activations of 3 tokens"):
        m.product(w, m.activations(w, x), np.zeros((3, 16), np.float32))
    with pytest.raises(ValueError, match="8-bit activations"):
        m.product(w, m.activations(w, x), np.zeros((2, 16), np.float32), bits=8)
    with pytest.raises(IndexError, match="row 16"):
        w[16]
    with pytest.raises(ValueError, match="groups of 16"):
        m.Matrix(arrays[0], np.zeros((16, 4), np.float16), np.zeros((16, 4), np.float16), 64)


def test_bad_calls_return_an_error():
    """The C functions themselves: null pointers, ranges past the end, memory that is no matrix."""
    w, f = m.Matrix(np.ones((40, 8), np.float32)), m.functions()
    memory, acts, kind = w.memory.ctypes.data, m.aligned_bytes(256), w.acts_kind(16)
    x, y = np.zeros((1, 8), np.float32), np.zeros((1, 40), np.float32)
    a, px, py, bad = acts.ctypes.data, x.ctypes.data, y.ctypes.data, m.BAD_ARGUMENT
    assert f.acts(kind, px, 8, 1, 8, 0, 1, a) == m.OK
    assert f.acts(kind, None, 8, 1, 8, 0, 1, a) == bad
    assert f.acts(kind, px, 7, 1, 8, 0, 1, a) == bad
    assert f.acts(kind, px, 8, 1, 8, 0, 2, a) == bad
    assert f.acts(8, px, 8, 1, 8, 0, 1, a) == bad  # 8 and 16 bits need multiples of 32 columns
    assert f.acts(16, px, 8, 1, 8, 0, 1, a) == bad
    assert f.acts(4, px, 8, 1, 8, 0, 1, a) == bad
    assert f.acts(kind, px, 8, 1, 8, 0, 1, a + 4) == bad
    assert f.matmul(memory, kind, a, 1, 0, 3, py, 40) == m.OK
    assert f.matmul(memory, kind, a, 1, 0, 4, py, 40) == bad
    assert f.matmul(memory, kind, a, 1, 2, 1, py, 40) == bad
    assert f.matmul(memory, kind, a, 0, 0, 3, py, 40) == bad
    assert f.matmul(memory, kind, a, 1, 0, 3, py, 39) == bad
    assert f.matmul(memory, kind, None, 1, 0, 3, py, 40) == bad
    assert f.matmul(None, kind, a, 1, 0, 3, py, 40) == bad
    assert f.matmul(a, kind, a, 1, 0, 3, py, 40) == bad
    assert f.matmul(memory, 16, a, 1, 0, 3, py, 40) == bad  # float weights take float activations
    packed = m.Matrix(*quantised_arrays(np.random.default_rng(12), 16, 32, 4, 32), 32).memory.ctypes.data
    assert f.matmul(packed, 16, a, 1, 0, 1, py, 16) == m.OK
    assert f.matmul(packed, kind, a, 1, 0, 1, py, 16) == bad


def test_a_mapped_matrix_is_checked():
    """A file that is cut short or whose head was changed is no matrix."""
    check, w = m._lib().rvm_matrix_check, m.Matrix(np.ones((40, 8), np.float32))
    assert check(w.memory.ctypes.data, w.memory.nbytes) == m.OK
    assert check(w.memory.ctypes.data, w.memory.nbytes - 1) == m.BAD_ARGUMENT
    assert check(w.memory.ctypes.data, 63) == m.BAD_ARGUMENT
    for at, value in [(0, 0), (8, 9), (24, 255), (32, 255), (39, 255)]:
        other = m.aligned_bytes(w.memory.nbytes)
        other[:] = w.memory
        other[at] = value
        assert check(other.ctypes.data, other.nbytes) == m.BAD_ARGUMENT


def test_a_size_that_overflows_is_refused():
    """rows * cols past 2^48, or either past 2^31: no byte count wraps around."""
    spec = (C.c_uint64 * 4)(4, 0, 1 << 31, 1)
    lib = m._lib()
    lib.rvm_matrix_bytes.restype = C.c_size_t
    assert lib.rvm_matrix_bytes(C.byref(spec)) == 0
    assert lib.rvm_acts_bytes(16, 1 << 31, 32) == 0
    assert lib.rvm_acts_bytes(32, 1, 1 << 31) == 0
    assert lib.rvm_acts_bytes(9, 1, 32) == 0


def test_unknown_implementations_are_named():
    with pytest.raises(m.LibraryError, match="scalar"):
        m.functions("sse9")
