"""The taste model of one adapter, from the store's ratings in force. No model runs."""

import numpy as np
import pytest

from ruvmlx.sona import user_taste
from ruvmlx.sona.adapter_history import AdapterHistory
from ruvmlx.sona.taste import RatedFeatures, TasteModel
from ruvmlx.sona.user_taste import UserTaste, reply_features
from ruvmlx.store import ReplyRow, Store
from tests.sona import simulated_tastes as sim


@pytest.fixture
def store(home):
    with_store = Store(home / "taste.db")
    yield with_store
    with_store.close()


@pytest.fixture
def history(store):
    return AdapterHistory(store, "model", "default")


def keep(store: Store, pairs: list[tuple[str, str]], stored: bool = True, first: int = 0) -> list[str]:
    """Commit replies; stored: with their features, as since format 5. Returns their ids."""
    ids = [f"r{first + i:04d}" for i in range(len(pairs))]
    for reply_id, (question, text) in zip(ids, pairs, strict=True):
        features = reply_features(question, text, "stop").data if stored else None
        store.replies.add(
            ReplyRow(
                reply_id, "tiny", "model", "default", 0, [1], [2], question, text, "stop", None,
                features=features,
            ),
            None,
        )  # fmt: skip
    return ids


def rate(history: AdapterHistory, reply_id: str, rating: str) -> None:
    history.commit(history.version(), [(reply_id, rating, "", 0.0)], b"state", 0.0, 0.0)


def rate_all(history: AdapterHistory, ids: list[str], given) -> None:
    for reply_id, stars in zip(ids, given, strict=True):
        rate(history, reply_id, str(int(stars)))


@pytest.mark.parametrize("stored", [True, False], ids=["with features", "from before"])
def test_the_ratings_in_force_make_the_model(store, history, stored):
    """Replies of an older store have no features: they are computed from the text."""
    shown = sim.texts(40, seed=1)
    given = sim.stars(sim.lists, shown)
    rate_all(history, keep(store, shown, stored), given)
    expected = TasteModel.fit(sim.rating_features(shown, given)).predict(sim.features(shown))
    taste = UserTaste(history)
    np.testing.assert_array_equal(taste.model.predict(sim.features(shown)), expected)
    assert taste.status.ratings == 40 and taste.status.sentence.startswith("lists")


def test_a_word_gets_its_name_from_the_rated_texts(store, history):
    shown = sim.texts(120, seed=2)
    rate_all(history, keep(store, shown), sim.stars(sim.phrase, shown))
    assert "example'" in UserTaste(history).status.sentence


def test_an_undo_gives_back_the_model_of_before(store, history):
    shown = sim.texts(30, seed=3)
    ids, given = keep(store, shown), sim.stars(sim.shorter, shown)
    taste = UserTaste(history)
    rate_all(history, ids[:-1], given[:-1])
    before = taste.model.predict(sim.features(shown))
    rate(history, ids[-1], "1")
    assert taste.status.ratings == 30
    history.undo()
    assert taste.status.ratings == 29
    np.testing.assert_array_equal(taste.model.predict(sim.features(shown)), before)
    history.rollback(0)
    assert taste.status.ratings == 0 and taste.status.sentence == ""


def test_the_model_is_fitted_when_asked_and_then_kept(store, history, monkeypatch):
    fitted = []
    fit = TasteModel.fit
    monkeypatch.setattr(TasteModel, "fit", lambda *args: fitted.append(1) or fit(*args))
    taste = UserTaste(history)
    rate_all(history, keep(store, sim.texts(5, seed=4)), [1, 5, 1, 5, 1])
    assert not fitted
    assert taste.status.ratings == taste.model.ratings == 5
    assert len(fitted) == 1


def test_one_thumb_is_compared_with_the_replies_without_one(store, history):
    shown = sim.texts(90, seed=5)
    liked = sim.stars(sim.to_the_reader, shown) >= 4
    for reply_id, up in zip(keep(store, shown), liked, strict=True):
        if up:
            rate(history, reply_id, "up")
    assert "more 'you'" in UserTaste(history).status.sentence


def test_only_the_newest_unrated_replies_of_this_adapter_are_the_background(store, history):
    ids = keep(store, sim.texts(12, seed=6))
    rate(history, ids[0], "up")
    other = AdapterHistory(store, "model", "other")
    rate(other, ids[1], "up")  # of another adapter: here it is unrated
    found = [row.id for row in history.unrated_words(5)]
    assert found == ids[:-6:-1]
    assert ids[1] in [row.id for row in history.unrated_words(99)] and other.unrated_words(9) == []


def test_a_deleted_reply_no_longer_counts(store, history):
    shown = sim.texts(12, seed=7)
    ids = keep(store, shown)
    rate_all(history, ids, sim.stars(sim.lists, shown))
    with store.transaction():
        store.replies.erase(ids[0])
    assert store.replies.get(ids[0]).features is None
    assert UserTaste(history).status.ratings == 11


def test_features_are_of_the_answer_without_its_thought():
    thought = reply_features("How?", "<think>you you you!</think>Go home.", "stop")
    alone = reply_features("How?", "Go home.", "stop")
    assert thought == alone
    assert reply_features("How?", "Go home.", "length") != alone


def test_damaged_features_are_computed_again(store, history):
    (reply_id,) = keep(store, [("How?", "- Go home.")])
    with store.transaction():
        store.db.execute("UPDATE replies SET features = x'00'")
    rate(history, reply_id, "5")
    assert UserTaste(history).status.ratings == 1


def test_the_background_is_bounded(store, history, monkeypatch):
    monkeypatch.setattr(user_taste, "BACKGROUND", 3)
    ids = keep(store, sim.texts(9, seed=8))
    rate(history, ids[0], "up")
    seen = []
    fit = TasteModel.fit

    def count_and_fit(ratings: list[RatedFeatures], background: list[RatedFeatures]) -> TasteModel:
        seen.append(len(background))
        return fit(ratings, background)

    monkeypatch.setattr(TasteModel, "fit", count_and_fit)
    assert UserTaste(history).model.ratings == 1 and seen == [3]


def test_the_features_of_old_unrated_replies_are_forgotten(store, history, monkeypatch):
    """Only good ratings: the newest unrated replies are evidence, too. A server writes thousands of them."""
    monkeypatch.setattr(user_taste, "BACKGROUND", 3)
    taste = UserTaste(history)
    for first in range(0, 40, 4):
        ids = keep(store, sim.texts(4, seed=first), first=first)
        rate(history, ids[0], "up")
        assert len(taste.evidence()[1]) == 3
    assert len(taste._features) == 10


def test_the_likings_are_computed_only_for_the_status(store, history, monkeypatch):
    """Each rating needs the model, and the search of the likings takes as long as the fit of the model."""
    searches, preferences = [], TasteModel.preferences
    monkeypatch.setattr(TasteModel, "preferences", lambda *given: searches.append(1) or preferences(*given))
    taste, ids = UserTaste(history), keep(store, sim.texts(12, seed=1))
    for reply_id in ids[:11]:
        rate(history, reply_id, "up")
    assert taste.model.ratings == 11 and not searches
    assert taste.status.ratings == taste.status.ratings == 11 and len(searches) == 1
    rate(history, ids[11], "down")
    assert taste.status.ratings == 12 and len(searches) == 2


def test_the_model_with_a_new_reason_is_the_model_of_the_store_after_the_rating(store, history):
    """Also at the first rating, at which unrated replies become evidence."""
    shown = sim.texts(30, seed=4)
    ids = keep(store, shown)
    reply = store.replies.get(ids[-1])
    after = UserTaste(history).model_after([(reply, "down", "too long")])
    history.commit(history.version(), [(ids[-1], "down", "too long", 0.0)], b"state", 0.0, 0.0)
    stored = UserTaste(history).model
    np.testing.assert_array_equal(after.predict(sim.features(shown)), stored.predict(sim.features(shown)))


def test_a_fit_reads_the_words_of_new_ratings_alone(store, history, monkeypatch):
    """Before, each rating read the texts of all rated replies from the store again."""
    ids = keep(store, sim.texts(4, seed=2))
    rate_all(history, ids[:3], [5, 1, 4])
    taste, read = UserTaste(history), list[set[str]]()
    whole = history.words
    monkeypatch.setattr(history, "words", lambda ids: read.append(set(ids)) or whole(ids))
    assert taste.model.ratings == 3
    rate(history, ids[3], "2")
    assert taste.model.ratings == 4
    assert read == [set(ids[:3]), {ids[3]}]
