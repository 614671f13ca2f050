"""4-bit storage: its error bound, its size, and that MLX reads the same numbers."""

import io
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile
from ruvmlx.lora.base_lora import BaseLoRA, PackedPairs
from ruvmlx.lora.quantised import GROUP, Packed, pack, pack_pair, unpack, unpack_pair


def error_bound(w: np.ndarray) -> np.ndarray:
    """What the docstring promises for every weight."""
    rows, n = w.shape
    groups = np.pad(w, ((0, 0), (0, -n % GROUP)), mode="edge").reshape(rows, -1, GROUP)
    span = groups.max(2) - groups.min(2)
    rounding = 4 * np.finfo(np.float32).eps * np.abs(groups).max(2)
    return np.repeat(span / 30 + rounding, GROUP, axis=1)[:, :n]


@pytest.mark.parametrize("rows,n", [(1, 1), (2, 31), (3, 32), (5, 77), (8, 768)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_error_stays_within_its_bound(rows, n, size):
    rng = np.random.default_rng(n)
    w = (size * rng.standard_normal((rows, n)) * 10.0 ** rng.integers(-3, 3, (rows, 1))).astype(np.float32)
    packed = pack(w)
    assert packed.weight.dtype == np.uint32 and packed.weight.shape[1] == 4 * -(-n // GROUP)
    assert (np.abs(unpack(packed) - w) <= error_bound(w)).all()


def test_a_constant_group_is_exact():
    w = np.full((2, 40), -3.7, np.float32)
    np.testing.assert_array_equal(unpack(pack(w)), w)


def test_rank_8_at_768_takes_a_fifth():
    rng = np.random.default_rng(0)
    pair = rng.standard_normal((768, 8)).astype(np.float32), rng.standard_normal((8, 768)).astype(np.float32)
    packed = pack_pair(pair)
    assert sum(w.nbytes for w in pair) == 49_152 and sum(p.nbytes for p in packed) == 9_216
    back = unpack_pair(*packed)
    assert back[0].shape == (768, 8) and all(w.flags.c_contiguous for w in back)
    wanted = pair[0] @ pair[1]
    assert np.linalg.norm(back[0] @ back[1] - wanted) < 0.13 * np.linalg.norm(wanted)


def test_mlx_reads_the_same_numbers():
    import mlx.core as mx

    w = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
    p = pack(w)
    parts = (mx.array(x) for x in (p.weight, p.scales, p.biases))
    theirs = np.array(mx.dequantize(*parts, group_size=GROUP, bits=4))
    np.testing.assert_allclose(theirs, unpack(p), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_not_packed(bad):
    with pytest.raises(ValueError):
        pack(np.array([[1, bad]], np.float32))


def test_parts_that_do_not_fit_are_corrupt():
    p = pack(np.ones((2, 40), np.float32))
    broken: list[Packed] = [replace(p, n=65), replace(p, n=32), replace(p, weight=p.weight[:, :7])]
    for one in [*broken, replace(p, biases=p.biases[:1])]:
        with pytest.raises(CorruptFile):
            unpack(one)


def a_base(seed=0, width=77, out=45) -> BaseLoRA:
    rng, pairs = np.random.default_rng(seed), {}
    for place, rank in ((("q_proj", 1), 3), (("lm_head", 0), 5)):
        a, b = (rng.standard_normal(s).astype(np.float32) for s in ((width, rank), (rank, out)))
        pairs[place] = a, b
    return BaseLoRA(pairs, 0.5)


def test_a_layer_of_rank_8_at_768_takes_at_most_12_kb_in_memory():
    pair = tuple(np.ones(s, np.float32) for s in ((768, 8), (8, 768)))
    packed = BaseLoRA({("q_proj", 0): pair}).to_4_bits()
    assert packed.nbytes == 9_216 <= 12_000
    words = [p.to_words().nbytes for p in packed.parts["q_proj", 0]]  # what the C decoder copies
    assert sum(words) == 9_216


def test_a_stored_base_keeps_its_4_bits():
    """Codes, scales and biases come back bit for bit, so caches made before a restart stay valid."""
    packed = a_base().to_4_bits()
    back = BaseLoRA.from_bytes(packed.to_bytes())
    assert isinstance(back.pairs, PackedPairs) and back.to_bytes() == packed.to_bytes()
    assert back.of_keys == packed.of_keys != a_base().of_keys and back.rank == 5
    for place, pair in packed.pairs.items():
        for mine, theirs in zip(pair, back.pairs[place], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    smaller = back.shrunk(0.5)
    assert smaller.scale == 0.25 and smaller.nbytes == packed.nbytes
    moved = back.select_places({("q_proj", 1): ("q_proj", 0), ("k_proj", 1): ("k_proj", 0)})
    assert moved.parts == {("q_proj", 0): back.parts["q_proj", 1]} and moved.scale == 0.5
    assert back.select_places({}) is None


def test_damage_to_4_bits_is_named():
    packed = a_base().to_4_bits()
    words = packed.pairs.packed["q_proj", 1][0].to_words()
    for bad, n in ((words[:, :-1], 77), (words, 97), (words.view(np.float32), 77), (words[0], 77)):
        with pytest.raises(ValueError, match="packed matrix"):
            Packed.from_words(bad, n)
    with np.load(io.BytesIO(packed.to_bytes())) as f:
        arrays = {name: f[name] for name in f.files if name != "1.q_proj.widths"}
    out = io.BytesIO()
    np.savez(out, **arrays)
    with pytest.raises(CorruptFile, match="rollback"):
        BaseLoRA.from_bytes(out.getvalue())
    a, b = a_base().pairs["q_proj", 1]
    with pytest.raises(CorruptFile, match="NaN"):
        BaseLoRA({("q_proj", 1): (a * np.nan, b)}).to_4_bits()
