"""The taste model learns from preferences between two replies, alone and beside ratings. No model runs."""

import numpy as np
import pytest

from ruvmlx.sona import taste_columns, taste_fit
from ruvmlx.sona.taste import PreferredFeatures, TasteModel
from ruvmlx.sona.taste_features import ReplyTable
from ruvmlx.sona.user_taste import UserTaste
from ruvmlx.store import PreferenceRow
from tests.sona import simulated_tastes as sim

from .test_user_taste import history, keep, rate, store  # noqa: F401 - fixtures

USERS = (sim.shorter, sim.lists, sim.to_the_reader, sim.lists_for_how)


def share_in_order(model: TasteModel, taste: sim.Taste, seed: int, count: int = 60) -> float:
    """Share of unseen pairs that the model orders as the taste does."""
    unseen = sim.pairs(taste, count, 90_000 + seed)
    better, worse = (model.predict(sim.features([p[side] for p in unseen]))[0] for side in (0, 1))
    return float(np.mean((better > worse) + 0.5 * (better == worse)))


@pytest.mark.parametrize("taste", USERS[:3], ids=lambda taste: taste.__name__)
def test_ten_pairs_order_unseen_pairs(taste):
    """Chance is 0.5; the mean of five users of each kind is far above it."""
    found = [
        share_in_order(TasteModel.fit(sim.preference_features(sim.pairs(taste, 10, seed))), taste, seed)
        for seed in range(5)
    ]
    assert np.mean(found) > 0.75 and min(found) > 0.6


def test_pairs_that_say_nothing_order_nothing():
    """Better and worse by dice: unseen pairs stay at chance."""
    rng, found = np.random.default_rng(1), []
    for seed in range(6):
        shown = [p if rng.random() < 0.5 else p[::-1] for p in sim.pairs(sim.lists, 10, seed)]
        found.append(share_in_order(TasteModel.fit(sim.preference_features(shown)), sim.lists, seed))
    assert 0.25 < np.mean(found) < 0.75


def test_the_wrong_way_round_orders_the_wrong_way_round():
    shown = [p[::-1] for p in sim.pairs(sim.lists, 10, 3)]
    assert share_in_order(TasteModel.fit(sim.preference_features(shown)), sim.lists, 3) < 0.25


def test_pairs_help_beside_ratings():
    """Six ratings and twelve pairs order unseen pairs better than the ratings alone."""
    alone, both = [], []
    for taste in USERS[:3]:
        for seed in range(4):
            shown = sim.texts(6, seed=200 + seed)
            given = sim.rating_features(shown, sim.stars(taste, shown))
            pairs = sim.preference_features(sim.pairs(taste, 12, seed))
            alone.append(share_in_order(TasteModel.fit(given), taste, seed))
            both.append(share_in_order(TasteModel.fit([*given, *pairs]), taste, seed))
    assert np.mean(both) > np.mean(alone) + 0.05


def test_a_weak_preference_counts_less():
    shown = sim.preference_features(sim.pairs(sim.lists, 4, 2))
    weak = [PreferredFeatures(p.better, p.worse, 0.2) for p in shown]
    lead = []
    for given in (shown, weak):
        (better, worse), _ = TasteModel.fit(given).predict([shown[0].better, shown[0].worse])
        lead.append(better - worse)
    assert 0 < lead[1] < lead[0]


def test_a_pair_is_the_difference_of_its_replies_columns():
    """Against the rows' columns taken one by one; a rating among pairs stays as it is."""
    shown = sim.features(sim.texts(5, seed=3))
    rows = taste_fit.Rows(
        ReplyTable.of(shown[:3]), np.array([1.0, 2.0, 3.0]), np.ones(3), [None, shown[3], shown[4]]
    )
    scale = taste_columns.Scale.of(shown)
    columns = [taste_columns.Column(measure=2), taste_columns.Column(opener=shown[0].opener)]
    one = taste_columns.design(shown, columns, scale)
    expected = np.stack([one[0], one[1] - one[3], one[2] - one[4]])
    np.testing.assert_array_equal(rows.design(columns, scale), expected)
    assert expected[0, 0] == 1 and not expected[1:, 0].any()
    np.testing.assert_array_equal(rows.rated_stars, [1.0])
    pool = rows.candidates(scale)
    whole = taste_columns.candidates(shown, scale).values
    np.testing.assert_array_equal(pool.values, [whole[0], whole[1] - whole[3], whole[2] - whole[4]])
    both = rows[:1] + rows[1:]
    assert both.pairs == [1, 2]
    for name, found in vars(both.all_replies).items():
        np.testing.assert_array_equal(found, getattr(rows.all_replies, name))


def test_the_stores_preferences_are_learned_from_in_the_order_in_which_they_were_given(store, history):  # noqa: F811
    """And after an undo, or without the words, they are not."""
    chosen = sim.pairs(sim.lists, 10, 4)
    better = keep(store, [p[0] for p in chosen])
    worse = keep(store, [p[1] for p in chosen], first=100)
    (rated,) = keep(store, sim.texts(1, seed=5), first=200)
    taste = UserTaste(history)
    for i, pair in enumerate(zip(better, worse, strict=True)):
        if i == 5:
            rate(history, rated, "4")
        row = PreferenceRow(*pair, "compare", 1.0, 2.0)
        history.pairs.commit(history.version(), row, b"state", 0.0, 0.0)
    given = sim.preference_features(chosen)
    expected = [*given[:5], *sim.rating_features(sim.texts(1, seed=5), np.array([4])), *given[5:]]
    shown = sim.features(sim.texts(9, seed=6))
    np.testing.assert_array_equal(taste.model.predict(shown), TasteModel.fit(expected).predict(shown))
    assert taste.status.ratings == 11 and share_in_order(taste.model, sim.lists, 1) > 0.75
    history.undo()
    assert taste.status.ratings == 10
    with store.transaction():
        store.replies.erase(worse[0])
    assert UserTaste(history).status.ratings == 9
    assert [row.id for row in history.unrated_words(9)] == [worse[-1], better[-1]]  # of the undone one
