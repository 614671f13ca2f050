"""Decode attention over the three tiers: the kernel in the simulator, its twin, and a float64 reference."""

import numpy as np
import pytest

from ruvmlx.backends.mlx.kernels import decode, demote, pages
from ruvmlx.backends.mlx.kernels.rope_append import Turned
from ruvmlx.platform.mx import mx
from ruvmlx.tiers import COLD, HOT, WARM

from . import make
from .kernels import DIMS, GROUPS, SLOPED
from .simulator import to_mx

# (cold pages, warm pages, hot tokens, first visible token) of each sequence
SEQUENCES = {
    "one token": [(0, 0, 1, 0)],
    "hot only, partly filled": [(0, 0, 130, 0)],
    "all tiers": [(3, 2, 100, 0)],
    "no hot page": [(2, 1, 0, 0)],
    "no warm page": [(1, 0, 64, 0)],
    "several, unequal": [(5, 1, 63, 0), (0, 0, 2, 0), (0, 4, 65, 0)],
    "window": [(4, 2, 70, 100), (4, 2, 70, 64 * 5 + 63), (4, 2, 70, 64 * 6 + 69), (2, 0, 64, 128)],
    "nothing visible": [(0, 0, 40, 40), (1, 0, 5, 0), (0, 0, 0, 0)],
    "many pages to a simdgroup": [(21, 5, 140, 0), (21, 5, 140, 64 * 9 + 1)],
}


def problem(sequences, d, group, split=3, n_kv=2, slopes=None):
    """Queries, a cache and its table; cold keys have queries of their own, as rotated ones do."""
    rng = np.random.default_rng(d + group + len(sequences))
    made = make.cache(rng, d, n_kv, sequences)
    q, q_rotated = rng.normal(size=(2, len(sequences), n_kv * group, d)).astype(np.float32)
    return q, q_rotated, made, pages.GPUPageTable(made.views, n_kv * group, n_kv, d, split, slopes)


def attend(q, q_rotated, made, table, run, matrix=False):
    return decode.attend_gpu(q, q_rotated, made.pools, make.opened(made), table, run=run, matrix=matrix)


def wanted_attention(q, q_rotated, made, slopes=None):
    return np.array([make.attention(q[i], q_rotated[i], made, i, slopes) for i in range(len(q))])


def slopes_of(n_heads):
    """Steep and flat ones, in no order, so that no two heads can be swapped."""
    return np.random.default_rng(n_heads).permutation(np.geomspace(0.3, 1 / 512, n_heads)).astype(np.float32)


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("d,group", [(64, 3), (80, 4), (128, 1), (128, 8), (256, 2)])
def test_kernel_and_twin(run, sequences, d, group):
    q, q_rotated, made, table = problem(sequences, d, group)
    want = wanted_attention(q, q_rotated, made)
    np.testing.assert_allclose(attend(q, q_rotated, made, table, run), want, atol=3e-5 if d < 256 else 1e-4)
    pools, opened = [mx.array(p) for p in made.pools], mx.array(make.opened(made))
    twin = decode.attend_ops(mx.array(q), mx.array(q_rotated), pools, opened, table)
    np.testing.assert_allclose(twin, want, atol=1e-4)


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("d,group", [(64, 3), (64, 8), (128, 1), (128, 4), (128, 6)])
def test_kernel_on_matrix_units(run, sequences, d, group):
    """Queries and probabilities are two halves each there: 20 bits or so."""
    for split in (3, 64):
        q, q_rotated, made, table = problem(sequences, d, group, split)
        got = attend(q, q_rotated, made, table, run, matrix=True)
        np.testing.assert_allclose(got, wanted_attention(q, q_rotated, made), atol=1e-4)


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("d,group", SLOPED)
def test_slopes_over_all_tiers(run, sequences, d, group):
    """ALiBi: the distance counts from the query, whatever the tier, the window and the page."""
    slopes = slopes_of(3 * group)
    q, q_rotated, made, table = problem(sequences, d, group, n_kv=3, slopes=slopes)
    want = wanted_attention(q, q_rotated, made, slopes)
    np.testing.assert_allclose(attend(q, q_rotated, made, table, run), want, atol=3e-5 if d < 256 else 1e-4)
    pools, opened = [mx.array(p) for p in made.pools], mx.array(make.opened(made))
    twin = decode.attend_ops(mx.array(q), mx.array(q_rotated), pools, opened, table)
    np.testing.assert_allclose(twin, want, atol=1e-4)


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("d,group", [(64, 3), (64, 8), (128, 1), (128, 4), (128, 6)])
def test_slopes_on_matrix_units(run, sequences, d, group):
    """The same, where a lane has the scores of two heads."""
    slopes = slopes_of(2 * group)
    for split in (3, 64):
        q, q_rotated, made, table = problem(sequences, d, group, split, slopes=slopes)
        got = attend(q, q_rotated, made, table, run, matrix=True)
        np.testing.assert_allclose(got, wanted_attention(q, q_rotated, made, slopes), atol=2e-4)


def test_slopes_of_zero_change_nothing(run):
    """To the last bit; and other slopes change the result."""
    q, q_rotated, made, table = problem(SEQUENCES["all tiers"], 64, 3)
    plain = attend(q, q_rotated, made, table, run)
    for slopes, same in ((np.zeros(6, np.float32), True), (slopes_of(6), False)):
        table = problem(SEQUENCES["all tiers"], 64, 3, slopes=slopes)[3]
        assert np.array_equal(attend(q, q_rotated, made, table, run), plain) == same


@pytest.mark.parametrize("d", DIMS)
def test_a_demoted_page_still_answers(d):
    """Through the function that the backend calls."""
    made = make.cache(np.random.default_rng(d), d, 2, [(0, 0, 200, 0)])
    hot, ids = mx.array(made.pools[HOT]), made.views[0].by_tier[HOT]
    cold = demote.demote(demote.demote(hot, ids[:2], d, WARM), [0, 1], d, COLD)
    q = np.random.default_rng(1).normal(size=(1, 6, d)).astype(np.float32) * 0.3
    table = pages.GPUPageTable([pages.SequencePages([[0, 1], [], ids[2:]], 200)], 6, 2, d)
    new = Turned(mx.array(q), demote.rotate(mx.array(q)), hot[ids[-1]][None])
    got = np.array(decode.attend(new, [cold, cold, hot], table, mx.float32))
    want = make.attention(q[0], q[0], made, 0)
    assert np.linalg.norm(got[0] - want) < 0.08 * np.linalg.norm(
        want
    )  # 0.25 and more if nothing rotates them


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("d", DIMS)
def test_every_size_and_split(run, d, group):
    """A page to a threadgroup, an odd number of them, and all in one."""
    for split in (1, 3, 16):
        q, q_rotated, made, table = problem([(6, 1, 70, 0), (0, 0, 65, 3)], d, group, split)
        want = wanted_attention(q, q_rotated, made)
        np.testing.assert_allclose(attend(q, q_rotated, made, table, run), want, atol=3e-5)


@pytest.mark.parametrize(
    "d,group,matrix", [(64, 8, False), (80, 3, False), (128, 4, False), (128, 4, True), (64, 8, True)]
)
def test_order_of_threads_does_not_matter(run, d, group, matrix):
    """20 orders of threadgroups, simdgroups and lanes: the same bits."""
    q, q_rotated, made, table = problem([(2, 1, 70, 5)], d, group, split=2)
    results = set()
    for seed in range(20):
        seeded = lambda *a, seed=seed: run(*a, seed=seed)  # noqa: E731
        results.add(attend(q, q_rotated, made, table, seeded, matrix).tobytes())
    assert len(results) == 1


def test_scores_far_apart(run):
    """Scores of +-1000s: no overflow, and the softmax is all but one-hot."""
    q, q_rotated, made, table = problem([(1, 1, 70, 0)], 128, 4)
    q, q_rotated = 300 * q, 300 * q_rotated
    want = wanted_attention(q, q_rotated, made)
    np.testing.assert_allclose(attend(q, q_rotated, made, table, run), want, atol=2e-3)


def test_nan_in_a_query_is_not_hidden(run):
    q, q_rotated, made, table = problem([(1, 1, 70, 0)], 64, 4)
    q[0, 3, 5] = np.nan
    out = attend(q, q_rotated, made, table, run)
    bad = np.isnan(out).all(axis=-1)[0]
    assert bad.tolist() == [h == 3 for h in range(8)]


@pytest.mark.parametrize("slopes", [None, slopes_of(24)], ids=["plain", "slopes"])
def test_groups_wider_than_a_threadgroup(run, slopes):
    """12 query heads to a KV head, as in Mistral Large: two threadgroups of 6."""
    q, q_rotated, made, table = problem([(1, 1, 70, 0)], 64, 12, slopes=slopes)
    assert table.shared == 6
    want = wanted_attention(q, q_rotated, made, slopes)
    np.testing.assert_allclose(attend(q, q_rotated, made, table, run), want, atol=3e-5)


@pytest.mark.parametrize(
    "view",
    [
        pages.SequencePages([[0], [], []], 65),
        pages.SequencePages([[0], [1], [2]], 128),
        pages.SequencePages([[0, 1], [], []], 100),
        pages.SequencePages([[], [], [0]], 5, 6),
    ],
)
def test_impossible_views_are_refused(view):
    with pytest.raises(ValueError, match="token"):
        pages.GPUPageTable([view], 4, 2, 64)


@pytest.mark.parametrize("first", [0, 63, 64, 64 * 7, 64 * 9 + 5])
def test_threadgroups_get_pages_of_equal_cost(first):
    """The table asks for as many as the visible pages cost; that each page has one, the tests above show."""
    view = pages.SequencePages([range(7), range(3), range(4)], 64 * 13 + 5, first)
    for split in (1, 6, 10, 50):
        table = pages.GPUPageTable([view], 8, 2, 64, split)
        assert table.splits == -(-view.visible_cost // split)
    cost = [1] * 7 + [3] * 3 + [6] * 4
    assert view.visible_cost == sum(cost[first // 64 :])


@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16])
def test_the_result_has_the_graphs_own_type(run, kind):
    """Rounded once, from float32."""
    q, q_rotated, made, table = problem([(1, 1, 70, 0), (0, 0, 5, 0)], 64, 3)
    opened = make.opened(made)
    wide = attend(q, q_rotated, made, table, run)
    got = decode.attend_gpu(q, q_rotated, made.pools, opened, table, kind, run, matrix=False)
    want = mx.array(wide).astype(kind)
    np.testing.assert_array_equal(to_mx(got).astype(mx.float32), want.astype(mx.float32))


def test_the_last_hot_page_is_the_open_one(run):
    """Its place in the pool may hold anything."""
    q, q_rotated, made, table = problem([(1, 0, 70, 0), (0, 1, 64, 0)], 128, 4)
    want, opened = attend(q, q_rotated, made, table, run), make.opened(made)
    for view in made.views:
        made.pools[HOT][view.by_tier[HOT][-1]] = 255
    got = decode.attend_gpu(q, q_rotated, made.pools, opened, table, run=run, matrix=False)
    np.testing.assert_array_equal(got, want)
