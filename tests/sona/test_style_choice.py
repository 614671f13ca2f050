"""From ratings to coefficients: their direction, their confidence, and whether ratings agree with them."""

import re

import numpy as np
import pytest

from ruvmlx.sona.optional.style_basis import StyleBasis
from ruvmlx.sona.optional.style_choice import StyleChoice, agreement
from ruvmlx.sona.taste import PreferredFeatures, RatedFeatures, TasteModel
from ruvmlx.sona.taste_features import features_of
from ruvmlx.sona.taste_fit import M
from ruvmlx.sona.taste_measures import MEASURES

LENGTH = next(k for k, m in enumerate(MEASURES) if m.more == "longer replies")
WORDS = re.findall(
    r"\S+", "you may try bread or soup with herbs and a little salt, then wait for the pot to boil"
)


@pytest.fixture
def basis():
    """Each direction moves its own measure, on a model of two layers."""
    return StyleBasis(
        np.ones((2, 5, 2), np.float32), np.ones((M, 2, 2, 4), np.float32), np.eye(M), 0.3 * np.eye(M), (0, 1)
    )


def replies(count, seed=0):
    """Replies of different lengths."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, int(n))).capitalize() + "." for n in rng.integers(8, 120, count)]
    return [(features_of("How do I cook?", text, True), len(text)) for text in texts]


def stars(length):
    """Of someone who likes short replies."""
    return str(int(np.clip(5 - length // 110, 1, 5)))


def rated_replies(count, seed=0, shuffled=False):
    found = replies(count, seed)
    given = [stars(length) for _, length in found]
    if shuffled:
        np.random.default_rng(seed).shuffle(given)
    return [RatedFeatures(features, one) for (features, _), one in zip(found, given, strict=True)]


def test_a_clear_taste_points_to_its_measure_with_confidence(basis):
    choice = StyleChoice.of(TasteModel.fit(rated_replies(30)), basis)
    assert choice.coefficients[LENGTH] < 0 and choice.confidence > 0.5


def test_confidence_grows_with_ratings(basis):
    few, many = (StyleChoice.of(TasteModel.fit(rated_replies(n)), basis).confidence for n in (6, 60))
    assert 0 <= few < many <= 1


def test_stars_of_other_replies_give_little_confidence(basis):
    clear = StyleChoice.of(TasteModel.fit(rated_replies(30)), basis).confidence
    random = [
        StyleChoice.of(TasteModel.fit(rated_replies(30, seed, shuffled=True)), basis).confidence
        for seed in range(8)
    ]
    assert np.mean(random) < 0.5 * clear


def test_without_ratings_nothing_moves(basis):
    assert StyleChoice.of(TasteModel.fit([]), basis).confidence == 0


def test_a_direction_that_moves_the_wrong_way_gives_no_confidence(basis):
    """The response, measured on other questions, has the last word."""
    turned = StyleBasis(basis.lora_a, basis.directions, basis.information, -basis.response, basis.layers)
    assert StyleChoice.of(TasteModel.fit(rated_replies(30)), turned).confidence == 0


def test_a_style_does_not_make_replies_less_complete(basis):
    """The direction of shorter replies is said to end fewer of them. The direction of complete replies makes
    up for this, unless the user likes long replies."""
    complete = next(k for k, m in enumerate(MEASURES) if m.more == "complete replies")
    response = basis.response.copy()
    response[complete, LENGTH] = 0.6  # so a wish for shorter replies lowers this measure
    taste = TasteModel.fit(rated_replies(30))
    crossed = StyleBasis(basis.lora_a, basis.directions, basis.information, response, basis.layers)
    before = response @ taste.token_weights().mean[:M]
    after = response @ StyleChoice.of(taste, crossed).coefficients
    assert before[complete] < -0.01 and after[complete] == pytest.approx(0, abs=1e-9)
    np.testing.assert_allclose(np.delete(after, complete), np.delete(before, complete))
    longer = TasteModel.fit([RatedFeatures(r.features, str(6 - int(r.rating))) for r in rated_replies(30)])
    np.testing.assert_array_equal(
        StyleChoice.of(longer, crossed).coefficients, longer.token_weights().mean[:M]
    )


def test_a_style_changes_only_the_length_that_end_of_reply_tokens_leave(basis):
    taste = TasteModel.fit(rated_replies(30))
    alone, half, whole, above = (
        StyleChoice.of(taste, basis, ends).coefficients for ends in (0.0, 0.5, 1.0, 1.7)
    )
    assert half[LENGTH] == 0.5 * alone[LENGTH] < 0 and whole[LENGTH] == above[LENGTH] == 0
    for other in (half, whole, above):
        np.testing.assert_array_equal(np.delete(other, LENGTH), np.delete(alone, LENGTH))


def test_ratings_that_were_left_out_agree_with_a_taste_and_not_with_chance():
    assert agreement(rated_replies(30), ()) > 3
    chance = [agreement(rated_replies(30, seed, shuffled=True), ()) for seed in range(8)]
    assert abs(np.mean(chance)) < 1 and min(chance) < 0


def test_ratings_without_a_taste_do_not_disagree_by_their_mean():
    """A constant model predicts less for the ratings that are higher than the others: no disagreement."""
    few = [agreement(rated_replies(8, seed, shuffled=True), ()) for seed in range(12)]
    assert np.mean(few) > -1


def test_preferences_count_as_evidence():
    pairs = [
        PreferredFeatures(*((a, b) if n < m else (b, a)))
        for (a, n), (b, m) in zip(replies(20, 1), replies(20, 2), strict=True)
    ]
    assert agreement(pairs, ()) > 0
    assert agreement([PreferredFeatures(p.worse, p.better) for p in pairs], ()) > 0  # a taste as well


def test_one_thumb_is_compared_with_unrated_replies():
    """Only short replies are praised; long ones are passed over."""
    found = replies(60)
    ups = [RatedFeatures(features, "up") for features, length in found if length < 200]
    rest = [RatedFeatures(features, "") for features, length in found if length >= 200]
    assert agreement(ups, rest) > 0
