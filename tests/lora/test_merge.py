"""Consolidation against its dense twin: the matrices themselves, added up."""

import numpy as np
import pytest

from ruvmlx.kernels.micro import NotFinite
from ruvmlx.lora import MicroLoRA
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.lora.merge import HEAD, fold_micro, merge_changes

SIZES = [(1, 1), (3, 7), (17, 5), (61, 130)]  # in, out


def a_pair(rng, n_in, n_out, rank):
    return rng.standard_normal((n_in, rank)).astype(np.float32), rng.standard_normal((rank, n_out)).astype(
        np.float32
    )


def dense(pair, scale=1.0):
    """[in, out] float64: what a pair adds to x @ W^T."""
    return scale * pair[0].astype(np.float64) @ pair[1]


def a_micro(rng, d, v, rank=2):
    a, b = a_pair(rng, d, v, rank)
    return MicroLoRA(a, b, np.ones((3, a.shape[1], 5), np.float32))


@pytest.mark.parametrize("n_in,n_out", SIZES)
@pytest.mark.parametrize("r,q", [(1, 1), (4, 2), (3, 5), (0, 2)])
def test_nothing_is_lost_when_the_ranks_suffice(n_in, n_out, r, q):
    rng = np.random.default_rng(n_in + r)
    one, other = a_pair(rng, n_in, n_out, r), a_pair(rng, n_in, n_out, q)
    found = merge_changes(one, 0.7, other, 2.0, r + 1, max(q - 1, 0))
    wanted = dense(one, 0.7) + dense(other, 2.0)
    assert found.kept[0].shape[1] <= r + 1 and found.tail[0].shape[1] <= q - 1
    assert found.lost < 1e-10 * np.linalg.norm(wanted)
    np.testing.assert_allclose(dense(found.kept) + dense(found.tail), wanted, atol=1e-5 * abs(wanted).max())


def test_what_is_kept_is_the_best_of_its_rank_and_the_loss_is_said():
    """Against the SVD of the dense matrix (Eckart-Young)."""
    rng = np.random.default_rng(1)
    one, other = a_pair(rng, 23, 41, 6), a_pair(rng, 23, 41, 2)
    wanted = dense(one) + dense(other, 3.0)
    found = merge_changes(one, 1.0, other, 3.0, 4, 2)
    values = np.linalg.svd(wanted, compute_uv=False)
    assert np.linalg.norm(wanted - dense(found.kept)) == pytest.approx(np.linalg.norm(values[4:]), rel=1e-5)
    assert found.lost == pytest.approx(np.linalg.norm(values[6:]), rel=1e-5)
    left = np.linalg.norm(wanted - dense(found.kept) - dense(found.tail))
    assert left == pytest.approx(found.lost, rel=1e-5)


def test_adding_the_factors_instead_would_err_by_more_than_the_update():
    rng = np.random.default_rng(2)
    one, other = a_pair(rng, 31, 37, 2), a_pair(rng, 31, 37, 2)
    naive = dense((one[0] + other[0], one[1] + other[1]))
    assert np.linalg.norm(naive - dense(one) - dense(other)) > np.linalg.norm(dense(other))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_refused(bad):
    rng = np.random.default_rng(3)
    one, other = a_pair(rng, 5, 7, 2), a_pair(rng, 5, 7, 1)
    other[1][0, 3] = bad
    with pytest.raises(NotFinite):
        merge_changes(one, 1.0, other, 1.0, 2)


@pytest.mark.parametrize("d,v", [(7, 11), (61, 130)])
@pytest.mark.parametrize("rank,held", [(4, 0), (4, 4), (3, 3), (8, 4)])
def test_folding_micro_into_the_base_changes_no_output(d, v, rank, held):
    """Before and after equal within 1e-5 of the largest change, because the tail fits into micro."""
    rng = np.random.default_rng(d + rank)
    micro, base = a_micro(rng, d, v), BaseLoRA({("q_proj", 1): a_pair(rng, 3, 5, 2)}, 0.5)
    if held:
        base = BaseLoRA({**base.pairs, HEAD: a_pair(rng, d, v, held)}, 0.5)
    x = rng.standard_normal((9, d)).astype(np.float32)
    before = x @ dense(base.pairs[HEAD], 0.5) if held else np.zeros((9, v))
    before += x @ dense((micro.lora_a, micro.lora_b), micro.scale)
    new, rest = fold_micro(base, micro, rank)
    after = x @ dense(new.pairs[HEAD], new.scale) + x @ dense((rest.lora_a, rest.lora_b), rest.scale)
    np.testing.assert_allclose(after, before, atol=1e-5 * abs(before).max())
    assert new.pairs[HEAD][0].shape[1] <= rank and new.pairs["q_proj", 1] is base.pairs["q_proj", 1]
    assert rest.evidence.size == (0 if rest.lora_b.any() else micro.evidence.size)
    assert rest.alpha == micro.alpha and (rest.lora_b.any() or rest.gain == micro.gain)
    assert all(w.flags.c_contiguous and w.dtype == np.float32 for w in (*new.pairs[HEAD], rest.lora_a))
    assert rest.lora_b.any() == (held + 2 > rank)


@pytest.mark.parametrize("rank,held", [(4, 0), (8, 4), (4, 4)])
def test_a_kept_part_is_not_folded_unless_there_is_a_tail(rank, held):
    """The output does not change in either case."""
    d, v = 61, 130
    rng = np.random.default_rng(rank + held)
    micro, base = a_micro(rng, d, v), BaseLoRA({HEAD: a_pair(rng, d, v, held)} if held else {})
    kept = np.zeros_like(micro.lora_b)
    kept[0, 3:90] = rng.standard_normal(87)
    x = rng.standard_normal((9, d)).astype(np.float32)
    before = x @ dense(base.pairs[HEAD], 1.0) if held else np.zeros((9, v))
    before += x @ dense((micro.lora_a, micro.lora_b), micro.scale)
    new, rest = fold_micro(base, micro, rank, kept)
    after = x @ dense(new.pairs[HEAD], 1.0) + x @ dense((rest.lora_a, rest.lora_b), rest.scale)
    np.testing.assert_allclose(after, before, atol=1e-5 * abs(before).max())
    if held + 2 > rank:  # a tail
        assert rest.lora_b.any() and not np.array_equal(rest.lora_b, kept)
    else:
        np.testing.assert_array_equal(rest.lora_b, kept)
        np.testing.assert_array_equal(rest.lora_a, micro.lora_a)
        assert rest.evidence is micro.evidence and rest.taste is micro.taste


def test_micro_goes_on_reading_in_its_directions():
    """Unused columns have zero lora_b, but lora_a is never zero there: a rating can still learn."""
    rng = np.random.default_rng(4)
    micro, base = a_micro(rng, 19, 23), BaseLoRA({HEAD: a_pair(rng, 19, 23, 3)})
    _, rest = fold_micro(base, micro, 4)  # five directions: one is left over
    used = np.abs(rest.lora_b).max(axis=1) > 0
    assert used.tolist() == [True, False]
    lengths = np.linalg.norm(rest.lora_a, axis=0)
    np.testing.assert_allclose(lengths, np.linalg.norm(micro.lora_a) / np.sqrt(2), rtol=1e-5)
    assert abs(rest.lora_a[:, 0] @ rest.lora_a[:, 1]) < 1e-4 * lengths[0] ** 2
    _, empty = fold_micro(BaseLoRA({}), micro, 4)
    np.testing.assert_array_equal(empty.lora_a, micro.lora_a)


def test_an_untouched_micro_adds_nothing_to_the_base():
    micro = MicroLoRA.fresh(np.eye(5, 2, dtype=np.float32), 7)
    new, rest = fold_micro(BaseLoRA({}), micro, 4)
    assert new.pairs == {} and not rest.lora_b.any()
