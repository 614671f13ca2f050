"""Predicted against given stars: predictions must not know the rating that they are compared with."""

import dataclasses
import itertools

import numpy as np
import pytest

from ruvmlx.sona import taste_record
from ruvmlx.sona.adapter_history import AdapterHistory
from ruvmlx.sona.taste import NEUTRAL, RatedFeatures, TasteModel
from ruvmlx.sona.taste_record import PredictedRating, TasteRecord, predicted_before
from ruvmlx.sona.user_taste import UserTaste
from ruvmlx.store import Store
from tests.sona import simulated_tastes as sim
from tests.sona.test_user_taste import keep, rate_all


def rated_replies(count: int, taste=None, seed: int = 0) -> list[tuple[str, RatedFeatures]]:
    """(reply id, rating) of `count` replies. taste: None: the ratings are random, so a prediction that knows
    only earlier ratings cannot beat their mean."""
    shown = sim.texts(count, seed)
    dice = np.random.default_rng([seed, 9]).integers(1, 6, count)
    given = sim.stars(taste, shown) if taste else dice
    return [(f"r{i}", rating) for i, rating in enumerate(sim.rating_features(shown, given))]


def after_the_fact(ratings) -> TasteRecord:
    """The mistake: one model, fitted to all ratings, predicts each of them."""
    model = TasteModel.fit([rating for _, rating in ratings])
    means, _ = model.predict([rating.features for _, rating in ratings])
    honest = predicted_before(ratings).ratings
    pairs = zip(honest, means, strict=True)
    return TasteRecord(tuple(dataclasses.replace(r, predicted=float(mean)) for r, mean in pairs))


def one_too_many(ratings) -> TasteRecord:
    """The mistake by one: the model has seen the rating itself."""
    found = []
    for at, honest in enumerate(predicted_before(ratings).ratings):
        model = TasteModel.fit([rating for _, rating in ratings[: at + 1]])
        mean = float(model.predict([ratings[at][1].features])[0][0])
        found.append(dataclasses.replace(honest, predicted=mean))
    return TasteRecord(tuple(found))


def knows_too_much(of, ratings) -> bool:
    """Change single ratings: does the prediction of the changed rating, or of an earlier one, change, too?"""
    before = of(ratings).ratings
    for at in range(5, len(ratings), 7):
        reply_id, rating = ratings[at]
        other = dataclasses.replace(
            rating, rating=str(6 - int(rating.rating)) if rating.rating != "3" else "1"
        )
        changed = of([*ratings[:at], (reply_id, other), *ratings[at + 1 :]]).ratings
        if [r.predicted for r in changed[: at + 1]] != [r.predicted for r in before[: at + 1]]:
            return True
    return False


@pytest.mark.parametrize("taste", [sim.lists, None], ids=["lists", "dice"])
def test_a_prediction_does_not_know_its_rating_nor_a_later_one(taste):
    ratings = rated_replies(30, taste)
    assert not knows_too_much(predicted_before, ratings)
    assert knows_too_much(after_the_fact, ratings) and knows_too_much(one_too_many, ratings)


def test_dice_cannot_be_predicted_but_seem_so_after_the_fact():
    honest, leaking = (
        [of(rated_replies(60, seed=s)) for s in range(3)] for of in (predicted_before, after_the_fact)
    )
    assert np.mean([r.correlation for r in honest]) < 0.3 < np.mean([r.correlation for r in leaking])
    assert np.mean([r.error - r.usual_error for r in honest]) > -0.1


def test_a_taste_is_predicted_better_than_by_the_mean():
    record = predicted_before(rated_replies(60, sim.lists))
    assert record.correlation > 0.7 and record.error < 0.7 * record.usual_error


def test_the_first_prediction_is_neutral_and_the_usual_one_is_the_mean_so_far():
    ratings = rated_replies(4, sim.lists)
    record = predicted_before(ratings).ratings
    given = [r.given for r in record]
    assert (record[0].predicted, record[0].usual) == (NEUTRAL, NEUTRAL)
    assert [r.usual for r in record[1:]] == [pytest.approx(np.mean(given[:n])) for n in (1, 2, 3)]


def test_many_ratings_are_fitted_less_often_than_given(monkeypatch):
    """After each rating at first, then after every twentieth part more."""
    sizes, fit = [], TasteModel.fit

    def fit_and_count(ratings, background=()):
        sizes.append(len(ratings))
        return fit(ratings[-10:])

    monkeypatch.setattr(taste_record.TasteModel, "fit", fit_and_count)
    predicted_before(rated_replies(300))
    assert sizes[:20] == list(range(20)) and len(sizes) < 100
    assert all(b - a <= 1 + a // 20 for a, b in itertools.pairwise(sizes))


def test_few_or_equal_ratings_have_no_correlation():
    assert TasteRecord(()).error is None and TasteRecord(()).correlation is None
    same = [PredictedRating("r", "up", 4.5, 3.0 + i, 1.0, 3.0) for i in range(5)]
    assert TasteRecord(tuple(same)).correlation is None


def test_the_record_follows_the_ratings_in_force(home):
    store = Store(home / "taste.db")
    history, shown = AdapterHistory(store, "model"), sim.texts(12, seed=4)
    ids, given = keep(store, shown), sim.stars(sim.shorter, shown)
    rate_all(history, ids, given)
    expected = predicted_before(list(zip(ids, sim.rating_features(shown, given), strict=True)))
    assert UserTaste(history).record() == expected
    history.undo()
    assert UserTaste(history).record().ratings == expected.ratings[:-1]
    store.close()
