"""Arithmetic of the taste model against its slow twins, and its features."""

import subprocess
import sys

import numpy as np
import pytest

from ruvmlx.platform import numpy_blas
from ruvmlx.sona import taste_columns, taste_evidence, taste_features, taste_fit, taste_measures
from ruvmlx.sona.taste_evidence import sums_of_products
from ruvmlx.sona.taste_features import ReplyFeatures, ReplyTable, bucket, features_of
from tests.oracles import taste as slow
from tests.sona import simulated_tastes as sim

M = len(taste_measures.MEASURES)


def regression(rows: int, columns: int, seed: int = 0):
    """x, y, prior, noise, weight"""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    return x, y, rng.uniform(0.1, 2, columns), 0.7, rng.uniform(0.3, 1.5, rows)


@pytest.mark.parametrize("rows, columns", [(1, 3), (3, 7), (7, 3), (40, 11)])
def test_evidence_and_prediction_match_the_definition(rows, columns):
    x, y, prior, noise, weight = regression(rows, columns)
    sums = taste_evidence.Sums.of(x, y, weight)
    expected = slow.log_evidence(x, y, prior, noise, weight)
    assert taste_evidence.log_evidence(sums, prior, noise) == pytest.approx(expected, abs=1e-6)
    new = np.random.default_rng(1).normal(size=(5, columns))
    found = taste_evidence.Posterior.of(sums, prior, noise).predict(new)
    np.testing.assert_allclose(found, slow.predict(x, y, prior, noise, weight, new), atol=1e-9)


def test_a_part_of_the_ratings_and_the_rest_add_up():
    x, y, _, _, weight = regression(30, 5)
    parts = [taste_evidence.Sums.of(x[p], y[p], weight[p]) for p in (slice(0, 11), slice(11, 30))]
    whole = taste_evidence.Sums.of(x, y, weight)
    np.testing.assert_allclose((parts[0] + parts[1]).joint, whole.joint)
    assert (parts[0] + parts[1]).count == pytest.approx(whole.count)


def test_the_scan_finds_the_column_that_raises_the_evidence_most():
    """Against the evidence of each regression with one column more, computed from the definition."""
    shown = sim.texts(40, seed=1)
    replies = sim.features(shown)
    y = sim.stars(sim.phrase, shown) - 3
    weight = np.random.default_rng(0).uniform(0.5, 1.5, 40)
    rows = taste_fit.Rows(ReplyTable.of(replies), y, weight, [None] * 40)
    scale = taste_columns.Scale.of(replies)
    pool, x = taste_columns.candidates(replies, scale), taste_columns.design(replies, [], scale)
    variances = taste_evidence.Variances(0.02, 0.6)
    prior = variances.prior(M)
    now = taste_evidence.Posterior.of(rows.sums(x), prior, variances.noise)
    best, strength = taste_fit.Scan(pool, rows, x, []).best(now)
    assert best is not None

    def gain(column: int, a: float) -> float:
        more = np.column_stack([x, pool.values[:, column]])
        with_it = slow.log_evidence(more, y, np.r_[prior, a], variances.noise, rows.weight)
        return with_it - slow.log_evidence(x, y, prior, variances.noise, rows.weight) - pool.cost[column]

    grid = 2.0 ** np.arange(-9, 0.1, 0.5)
    others = [max(gain(column, a) for a in grid) for column in range(len(pool.columns))]
    assert gain(best, strength) > max(others) - 0.02
    assert gain(best, strength) > 0


def test_candidates_hold_what_the_columns_compute():
    """The matrix that is scanned against the columns that predict."""
    replies = sim.features(sim.texts(37, seed=2))
    scale = taste_columns.Scale.of(replies)
    pool = taste_columns.candidates(replies, scale)
    assert {"word", "opener", "measure"} == {
        name for c in pool.columns for name in ("word", "opener", "measure") if getattr(c, name) is not None
    }
    np.testing.assert_allclose(
        pool.values, taste_columns.design(replies, pool.columns, scale)[:, 1 + M :], atol=1e-6
    )


def test_long_replies_differ_in_length_where_most_are_long():
    """Measures are scaled by what this user sees: 300 and 600 words are not both "very long"."""
    replies = [features_of("How?", "some words here. " * n, True) for n in [60, 100, 140, 200] * 10]
    length = taste_columns.Scale.of(replies).measures(replies)[:, 0]
    assert (np.diff(np.unique(length.round(6))) > 0.5).all() and np.ptp(length) < taste_columns.MAX_SPREADS
    few = taste_columns.Scale.of([]).measures(replies)[:, 0]
    assert few.max() == taste_columns.MAX_SPREADS


def test_word_columns_hold_the_roots_of_their_counts():
    shown = sim.texts(25, seed=3)
    replies, gram = sim.features(shown), "for example"
    counted = [slow.gram_counts(taste_features.grams(text), gram) for _, text in shown]
    assert max(counted) >= 2
    np.testing.assert_allclose(taste_columns.roots(replies, [bucket(gram)])[:, 0] ** 2, counted, atol=1e-5)


# -- features --------------------------------------------------------------------------------------------


def test_features_are_stored_and_read_again():
    found = features_of("How do I bake?", "First, you knead. Then you wait!\n- dough\n- yeast", False)
    again = ReplyFeatures.from_bytes(found.data)
    assert again is not None and again.opener == found.opener
    for name in ("measures", "words", "counts"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))
    assert len(found.data) == 6 + 4 * M + 3 * len(found.words)


def test_a_table_of_replies_gives_what_the_list_gives():
    """Two parts of the table, joined again, also give the same. A part can have no replies."""
    replies = sim.features(sim.texts(23, seed=4))
    table = ReplyTable.of(replies)
    scale = taste_columns.Scale.of(replies)
    columns = taste_columns.candidates(replies, scale).columns
    whole = taste_columns.design(replies, columns, scale)
    for at in (0, 1, 9, 23):
        parts = table.part(slice(at)), table.part(slice(at, None))
        assert [len(part) for part in parts] == [at, 23 - at]
        np.testing.assert_array_equal(taste_columns.design(parts[0] + parts[1], columns, scale), whole)
        np.testing.assert_array_equal(taste_columns.design(parts[1], columns, scale), whole[at:])
    assert len(table.part(slice(9, 3))) == len(table.part(slice(9, 3)).words) == 0


@pytest.mark.parametrize("damage", [None, b"", b"\x00" * 5, b"\x00" * 7, b"\xff" * 6])
def test_damaged_or_older_features_are_refused(damage):
    assert ReplyFeatures.from_bytes(damage) is None


def test_features_with_other_measures_are_refused():
    found = features_of("How?", "Like this.", True)
    shorter = ReplyFeatures.of(found.measures[:-1], found.words, found.counts, found.opener)
    assert ReplyFeatures.from_bytes(shorter.data) is None


@pytest.mark.parametrize(
    "name, high, low",
    [
        ("longer replies", "word " * 80, "word"),
        ("lists", "1. a\n2. b\n- c", "a, b and c"),
        ("more 'you'", "You can do it, your way.", "It can be done."),
        ("contractions", "It's fine, don't worry.", "It is fine, do not worry."),
        ("contractions", "It\u2019s fine, don\u2019t worry.", "It is fine, do not worry."),
        ("exclamation marks", "Great! Yes!", "Great. Yes."),
        ("questions back", "What do you think? Why?", "Think of it."),
        (
            "longer sentences",
            "one two three four five six seven eight nine ten eleven",
            "One. Two. Three. Four.",
        ),
        ("more long words", "considerable approximation", "a big red box"),
        ("headings", "# Steps\n\nGo.", "Steps go."),
        ("code", "```\nx = 1;\n```", "x is one"),
        ("more numbers", "It took 12 of 15 days.", "It took many days."),
        ("more names", "They met Anna in Paris, then Bob.", "They met a friend in town, then a man."),
        ("more repeated words", "a a a a a a a a a a a a", "one two six ten red box cup map tea sun sky sea"),
        ("more letters beyond ASCII", "\u00e7a \u00e9t\u00e9", "ca ete"),
    ],
)
def test_a_measure_tells_two_texts_apart(name, high, low):
    at = next(i for i, m in enumerate(taste_measures.MEASURES) if name in (m.more, m.less))
    sign = 1 if taste_measures.MEASURES[at].more == name else -1
    more, less = (taste_measures.measure_text(text, True)[at] for text in (high, low))
    assert sign * (more - less) > 0.5


@pytest.mark.parametrize("text", ["", " \n ", "\U0001f600", "...", "a" * 100_000, "\n" * 1000, "# " * 2000])
def test_any_text_has_finite_features(text):
    found = features_of(text[:50], text, True)
    assert np.isfinite(found.measures).all() and len(found.words) == len(found.counts)


@pytest.mark.parametrize("ratings", [0, 1, 63, 64, 65, 200])
def test_sums_of_products_are_the_product(ratings):
    rng = np.random.default_rng(ratings)
    a, b = rng.normal(size=(ratings, 37)), rng.normal(size=(ratings, 5))
    np.testing.assert_allclose(sums_of_products(a, b), a.T @ b, rtol=1e-12, atol=1e-12)


# The program prints the resident kilobytes of OpenBLAS's work memory after products of two sizes. This memory
# has one mapping of 32 MB or more for each thread.
MEMORY_OF_PRODUCTS = """
import numpy as np
from ruvmlx.sona.taste_evidence import sums_of_products

def work_memory():
    total = size = 0
    for words in map(str.split, open("/proc/self/smaps")):
        if "-" in words[0]:
            first, end = words[0].split("-")
            size = int(end, 16) - int(first, 16) if len(words) == 5 else 0
        elif words[0] == "Rss:" and 30 << 20 < size < 70 << 20:
            total += int(words[1])
    return total

a, b = np.ones((600, 3000), np.float32), np.ones((600, 72), np.float32)
for ratings in (64, 600):
    sums_of_products(a[:ratings], b[:ratings])
    print(work_memory())
"""


@pytest.mark.skipif(numpy_blas.used_threads() is None or sys.platform != "linux", reason="OpenBLAS on Linux")
def test_the_work_memory_does_not_grow_with_the_ratings():
    """If one product has all ratings, this memory grows from 0.6 to 4 MB (two threads)."""
    done = subprocess.run([sys.executable, "-c", MEMORY_OF_PRODUCTS], capture_output=True, text=True)
    few, many = map(int, done.stdout.split())
    assert 0 < many <= few + 100
