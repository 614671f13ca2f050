"""The taste model, on made-up replies and people whose taste is known."""

import pickle
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.sona import taste_fit
from ruvmlx.sona.taste import RatedFeatures, TasteModel
from ruvmlx.sona.taste_columns import design
from ruvmlx.sona.taste_features import features_of
from ruvmlx.sona.taste_measures import MEASURES, measure_text
from ruvmlx.sona.taste_words import sentence
from tests.sona import simulated_tastes as sim

UNSEEN = sim.texts(120, seed=99)
TASTES = [sim.shorter, sim.lists, sim.to_the_reader, sim.phrase, sim.lists_for_how]


def given_by(taste: sim.Taste, ratings: int, seed: int = 0, wrong: float = 0.0) -> list[RatedFeatures]:
    """Return the ratings of a user. wrong: the share of the ratings whose stars are reversed (1 for 5)."""
    shown = sim.texts(ratings, seed)
    given = sim.stars(taste, shown)
    flipped = np.random.default_rng(seed).random(ratings) < wrong
    return sim.rating_features(shown, np.where(flipped, 6 - given, given))


def fit_taste(taste: sim.Taste, ratings: int, seed: int = 0, wrong: float = 0.0) -> TasteModel:
    return TasteModel.fit(given_by(taste, ratings, seed, wrong))


def said(given: list[RatedFeatures], shown: Sequence[tuple[str, str]] = ()) -> str:
    """Return the sentence about a user who gave these ratings. shown: the rated texts."""
    return sentence(TasteModel.fit(given).preferences(given, (), shown))


def agreement(model: TasteModel, taste: sim.Taste) -> float:
    """Correlation of predicted and true stars of unseen replies."""
    mean, _ = model.predict(sim.features(UNSEEN))
    return float(np.corrcoef(mean, sim.stars(taste, UNSEEN))[0, 1])


@pytest.mark.parametrize("taste", TASTES[:4], ids=lambda t: t.__name__)
def test_thirty_ratings_recover_a_taste_and_more_ratings_do_better(taste):
    few, more = fit_taste(taste, 30), fit_taste(taste, 200)
    assert agreement(few, taste) > 0.6
    assert agreement(more, taste) > 0.85
    assert agreement(more, taste) > agreement(few, taste) - 0.02


def test_a_hundred_ratings_recover_a_taste_that_is_opposite_for_some_questions():
    assert agreement(fit_taste(sim.lists_for_how, 100), sim.lists_for_how) > 0.9


@pytest.mark.parametrize("taste", [sim.shorter, sim.lists, sim.to_the_reader], ids=lambda t: t.__name__)
def test_a_fifth_of_wrong_ratings_does_not_hide_the_taste(taste):
    assert agreement(fit_taste(taste, 100, wrong=0.2), taste) > 0.8


def test_stars_by_dice_teach_no_taste():
    """The mean over seeds is near 0, and predictions stay near the mean of the stars."""
    found = []
    for seed in range(8):
        shown = sim.texts(60, seed)
        model = TasteModel.fit(sim.rating_features(shown, np.random.default_rng(seed).integers(1, 6, 60)))
        found.append(agreement(model, sim.shorter))
        mean, _ = model.predict(sim.features(UNSEEN))
        assert np.std(mean) < 0.7
    assert abs(np.mean(found)) < 0.35


@pytest.mark.parametrize("side", ["up", "down"])
def test_one_thumb_alone_teaches_with_the_replies_that_were_passed_over(side):
    shown = sim.texts(90, seed=3)
    given = sim.stars(sim.to_the_reader, shown)
    pressed = given >= 4 if side == "up" else given <= 2
    known = sim.features(shown)
    model = TasteModel.fit(
        [RatedFeatures(f, side) for f, p in zip(known, pressed, strict=True) if p],
        [RatedFeatures(f, "") for f, p in zip(known, pressed, strict=True) if not p],
    )
    assert agreement(model, sim.to_the_reader) > 0.8


def test_one_thumb_without_background_teaches_no_direction():
    """All replies were liked, so nothing tells them apart; the stars are high for every reply."""
    model = TasteModel.fit([RatedFeatures(f, "up") for f in sim.features(sim.texts(40, seed=3))])
    mean, _ = model.predict(sim.features(UNSEEN))
    assert mean.min() > 3.8 and np.std(mean) < 0.1


def test_the_weights_for_all_questions_are_the_mean_over_the_rated_questions():
    """The user likes lists in a third of the questions, and dislikes lists in the others. The slow way: raise
    a measure of each rated reply, and take the mean rise of the prediction."""
    shown = sim.texts(120, seed=1)
    known = sim.rating_features(shown, sim.stars(sim.lists_for_how, shown))
    model = TasteModel.fit(known)
    assert any(column.opener is not None and column.measure is not None for column in model.fitted.columns)
    weights, replies = model.token_weights().mean, [one.features for one in known]
    for name in ("lists", "longer replies", "complete replies"):
        at = [measure.more for measure in MEASURES].index(name)
        raised = []
        for reply in replies:
            measures = reply.measures.copy()
            measures[at] += 0.01
            raised.append(reply.with_measures(measures))
        rise = (model.predict(raised)[0] - model.predict(replies)[0]) / 0.01
        assert weights[at] == pytest.approx(rise.mean(), abs=2e-3)


def test_a_taste_that_turns_is_followed_within_ten_ratings():
    shown = sim.texts(90, seed=5)
    given = sim.stars(sim.lists, shown)
    given[80:] = 6 - given[80:]
    model = TasteModel.fit(sim.rating_features(shown, given))
    assert 70 <= model.ratings_before_turn <= 84
    assert agreement(model, sim.lists) < -0.8


def test_a_taste_that_stays_is_not_cut():
    for seed in range(5):
        assert fit_taste(sim.lists, 90, seed).ratings_before_turn == 0
        assert fit_taste(sim.shorter, 90, seed, wrong=0.2).ratings_before_turn == 0


@pytest.mark.parametrize("thumbs", [False, True])
def test_replies_that_please_are_no_turn(monkeypatch, thumbs):
    """The replies follow the taste after 42 ratings, so that nearly all have five stars. Their features no
    longer tell the stars apart."""
    shown = sim.texts(60, seed=3)
    given = sim.stars(sim.lists, shown)
    given[42:] = 5
    given[50] = 4
    ratings = sim.rating_features(shown, given)
    if thumbs:
        ratings = [replace(one, rating="up" if int(one.rating) > 3 else "down") for one in ratings]
    model = TasteModel.fit(ratings)
    assert model.ratings_before_turn == 0 and agreement(model, sim.lists) > 0.5
    monkeypatch.setattr(taste_fit, "PLEASED", 9.0)
    assert TasteModel.fit(ratings).ratings_before_turn > 30


def test_without_a_turn_the_order_of_ratings_does_not_matter():
    shown = sim.texts(60, seed=2)
    ratings = sim.rating_features(shown, sim.stars(sim.shorter, shown))
    mixed = [ratings[i] for i in np.random.default_rng(1).permutation(60)]
    one, other = (TasteModel.fit(r).predict(sim.features(UNSEEN)) for r in (ratings, mixed))
    np.testing.assert_allclose(one, other, atol=1e-3)


def test_the_model_is_a_function_of_its_ratings_bit_for_bit():
    """So an undo gives back the model from before the rating."""
    shown = sim.texts(50, seed=4)
    ratings = sim.rating_features(shown, sim.stars(sim.lists_for_how, shown))
    before = TasteModel.fit(ratings[:-1]).predict(sim.features(UNSEEN))
    TasteModel.fit(ratings)
    after = TasteModel.fit(ratings[:-1]).predict(sim.features(UNSEEN))
    np.testing.assert_array_equal(before, after)


def test_uncertainty_shrinks_with_ratings():
    _, few = fit_taste(sim.shorter, 10).predict(sim.features(UNSEEN))
    _, more = fit_taste(sim.shorter, 150).predict(sim.features(UNSEEN))
    assert more.mean() < few.mean()


def test_uncertainty_is_wide_far_from_the_ratings():
    """A page of shouted code, in a model that saw short English sentences."""
    model = fit_taste(sim.shorter, 60)
    strange = features_of("How?", "```\nx = {1: 2};\n```\n" * 40 + "RUN! RUN! RUN?! " * 30, False)
    usual = model.predict(sim.features(UNSEEN))[1].mean()
    assert model.predict([strange])[1][0] > 1.3 * usual


@pytest.mark.parametrize("ratings", [20, 60, 200])
def test_four_fifths_of_the_stars_lie_within_the_interval(ratings):
    inside = []
    for taste in TASTES:
        for seed in range(3):
            mean, sd = fit_taste(taste, ratings, seed).predict(sim.features(UNSEEN))
            inside.append(np.mean(abs(mean - sim.stars(taste, UNSEEN)) < 1.2816 * sd))
    assert 0.7 < np.mean(inside) < 0.97


@pytest.mark.parametrize(
    "taste, words",
    [
        (sim.shorter, "shorter replies"),
        (sim.lists, "lists"),
        (sim.to_the_reader, "more 'you'"),
        (sim.phrase, "example'"),
        (sim.lists_for_how, "lists in questions with 'how'"),
    ],
)
def test_the_sentence_names_the_taste(taste, words):
    shown = sim.texts(150, seed=6)
    assert words in said(sim.rating_features(shown, sim.stars(taste, shown)), shown)


def test_a_guess_needs_fewer_ratings_than_the_sentence_and_some_evidence():
    """Eight ratings by someone who likes short replies point there, also where they are not clear."""
    users = [given_by(sim.shorter, 8, seed) for seed in range(8)]
    unclear = [given for given in users if not said(given)]
    assert len(unclear) > 2 and {TasteModel.fit(given).guess() for given in unclear} == {"shorter replies"}
    assert TasteModel.fit([]).guess() == ""


def test_the_sentence_is_empty_without_evidence():
    """No ratings, one kind of rating, or dice: at most one in twenty says something."""
    assert said([]) == ""
    assert said(given_by(lambda question, text: 5, 60), sim.texts(60, 0)) == ""
    spoken = 0
    for seed in range(40):
        shown = sim.texts(30, seed)
        dice = np.random.default_rng(seed).integers(1, 6, 30)
        spoken += said(sim.rating_features(shown, dice), shown) != ""
    assert spoken <= 2


def test_a_fitted_model_is_not_larger_after_more_ratings():
    """The model of a server that runs for years has the weights, and no copy of the ratings."""
    few, more = (len(pickle.dumps(fit_taste(sim.shorter, ratings))) for ratings in (60, 600))
    assert more < 1.2 * few


def test_no_ratings_predict_the_middle_with_a_wide_interval():
    mean, sd = TasteModel.fit([]).predict(sim.features(UNSEEN[:3]))
    np.testing.assert_allclose(mean, 3)
    assert sd.min() > 1


def test_thumbs_and_stars_mix():
    shown = sim.texts(60, seed=8)
    given = sim.stars(sim.lists, shown)
    mixed = [
        RatedFeatures(r.features, ("up" if s > 3 else "down") if i % 2 else r.rating)
        for i, (r, s) in enumerate(zip(sim.rating_features(shown, given), given, strict=True))
    ]
    assert agreement(TasteModel.fit(mixed), sim.lists) > 0.9


def test_a_gain_is_the_difference_of_predictions_and_its_deviation_that_of_drawn_weights():
    model = fit_taste(sim.shorter, 30)
    after, before = sim.features(UNSEEN[:7]), sim.features(UNSEEN[40:])
    gain, deviation = model.predict_gain(after, before)
    assert gain == pytest.approx(model.predict(after)[0].mean() - model.predict(before)[0].mean())
    fit, rng = model.fitted, np.random.default_rng(5)
    weights = rng.multivariate_normal(fit.posterior.mean, fit.posterior.covariance, 20_000)
    rows = (design(of, fit.columns, fit.scale) for of in (after, before))
    drawn = np.subtract(*((row @ weights.T).mean(axis=0) for row in rows))
    assert deviation == pytest.approx(drawn.std(), rel=0.03) and gain == pytest.approx(drawn.mean(), abs=0.05)


def test_the_gain_of_shorter_replies_is_clear_after_30_ratings_but_seldom_after_ratings_by_dice():
    by_length = sorted(UNSEEN, key=lambda one: len(one[1]))
    shorter, longer = sim.features(by_length[:24]), sim.features(by_length[-24:])
    gain, deviation = fit_taste(sim.shorter, 30).predict_gain(shorter, longer)
    assert gain > 2 * deviation
    clear = 0
    for seed in range(20):
        shown = sim.texts(30, seed)
        model = TasteModel.fit(sim.rating_features(shown, np.random.default_rng(seed).integers(1, 6, 30)))
        gain, deviation = model.predict_gain(shorter, longer)
        clear += abs(gain) > deviation
    assert clear <= 10


def test_a_long_row_of_marks_is_measured_at_once():
    begun = time.process_time()
    measure_text("." * 16_000 + "x", True)
    assert time.process_time() - begun < 1
