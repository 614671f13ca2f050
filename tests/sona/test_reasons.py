"""Reasons for bad ratings: stored with the rating, taken back with it, read by the taste model."""

import numpy as np
import pytest

from ruvmlx.errors import UsageError
from ruvmlx.ratings import reason_of, with_reason
from ruvmlx.sona import instant
from ruvmlx.sona.learner import Learner
from ruvmlx.sona.replay import load
from ruvmlx.sona.taste import MAX_SHORTER, RatedFeatures, TasteModel
from ruvmlx.sona.taste_features import features_of
from ruvmlx.sona.taste_measures import MEASURES
from ruvmlx.sona.taste_push import TokenEffects
from ruvmlx.sona.taste_reasons import asked_for
from ruvmlx.sona.user_taste import UserTaste
from tests.sona import simulated_tastes as sim

from .feedback import reply, weights
from .test_instant import ended_reply, probe, readings, trace, update_once  # noqa: F401 - fixtures
from .test_user_taste import history, keep, store  # noqa: F401 - fixtures

SENTENCE = "Water the garden early in the day, because the soil stays moist for longer. "
SHORT, MIDDLE, LONG = (features_of("how do I garden", SENTENCE * n, True) for n in (1, 4, 16))
FORMAL = features_of(
    "how do I garden", "One may perhaps consider the possibly beneficial irrigation. " * 4, True
)


def learned_model(reason: str, count: int = 4) -> TasteModel:
    """Of someone who rated replies of the middle length down."""
    given = [RatedFeatures(MIDDLE, "down")] * count
    asked = [one for one in [asked_for(MIDDLE, reason)] * count if one is not None]
    return TasteModel.fit([*given, *asked])


def stars(model: TasteModel, *replies) -> list[float]:
    return model.predict(replies)[0].tolist()


def test_a_note_gives_the_reason_of_a_bad_rating_alone():
    assert reason_of("down", "too long") == "long" and reason_of("2", "wrong facts: it is 1789") == "facts"
    assert reason_of("up", "too long") == reason_of("down", "not too long") == reason_of("down", "") == ""


@pytest.mark.parametrize(
    ("note", "expected"),
    [("", "too long"), ("a list!", "too long: a list!"), ("wrong tone", "too long"),
     ("wrong tone: so stiff", "too long: wrong tone: so stiff"), ("too long: a list!", "too long: a list!"),
     ("wrong tone: too long: so stiff", "too long: wrong tone: so stiff")],
)  # fmt: skip
def test_a_reason_keeps_the_words_of_the_note_and_replaces_an_earlier_reason_without_words(note, expected):
    """The words can be about the earlier reason. The reason that counts is the first."""
    assert with_reason(note, "long") == expected and reason_of("down", expected) == "long"


def test_too_long_speaks_for_fewer_words_and_too_short_for_more():
    """Four thumbs down alone say little of the length."""
    for reason, sign in (("", 0), ("long", 1), ("short", -1)):
        short, long = stars(learned_model(reason), SHORT, LONG)
        assert abs(short - long) < 0.6 if not sign else sign * (short - long) > 3


def test_a_wrong_tone_says_nothing_of_the_length():
    given = [RatedFeatures(FORMAL, "down")] * 4
    said = TasteModel.fit([*given, *[asked_for(FORMAL, "tone")] * 4])  # type: ignore[list-item]
    alone = TasteModel.fit(given)
    assert stars(said, MIDDLE)[0] - stars(said, FORMAL)[0] > stars(alone, MIDDLE)[0] - stars(alone, FORMAL)[0]
    short, long = stars(said, SHORT, LONG)
    assert abs(short - long) < 0.5 * abs(np.subtract(*stars(learned_model("long"), SHORT, LONG)))


def test_a_reason_is_no_feedback_of_its_own():
    """A model of four ratings with their reasons has learned from four."""
    assert learned_model("long").ratings == learned_model("").ratings == 4


def test_reasons_push_the_end_of_replies(tiny):
    """What the weights get: an end earns stars for someone who finds replies too long."""
    effects = TokenEffects.of(tiny.tokenizer, np.arange(8))
    ends = {reason: effects.end_stars(learned_model(reason, 8)) for reason in ("", "long", "short")}
    assert ends["long"] > ends[""] + 0.1 and ends["short"] < ends[""] - 0.1


def test_each_stated_length_counts_and_a_later_one_is_felt():
    """One "too short" has an effect after many "too long"."""
    long, short = asked_for(MIDDLE, "long"), asked_for(MIDDLE, "short")
    down, tone = RatedFeatures(MIDDLE, "down"), asked_for(MIDDLE, "tone")
    counts = [
        TasteModel.fit([down, tone, *each]).shorter
        for each in ([], [long], [short], [long] * 9, [long] * 9 + [short])
    ]
    assert counts == [0, 1, -1, MAX_SHORTER, MAX_SHORTER - 1]


def test_the_tone_has_names():
    """Every measure that a reason names exists."""
    features = asked_for(FORMAL, "tone")
    assert features is not None
    moved = np.flatnonzero(features.better.measures != features.worse.measures)
    assert {MEASURES[place].more for place in moved} >= {"more caution", "longer words"}


def test_a_reason_says_how_bad_the_end_is(trace, probe, tiny_backend, monkeypatch):  # noqa: F811
    """A short reply that is too long ended too late. A reply that is too short moves no end token. The other
    reasons leave the rule of the length."""
    reply = ended_reply(trace, probe, tiny_backend)

    def end_push(reason, short):
        monkeypatch.setattr(instant, "SHORT", short)
        judged = instant.judge_end(reply, reason, probe)
        b = update_once(reply.adapter, judged, -1.0, probe, stats=judged.stats).adapter.lora_b
        return float(np.mean(readings(reply) @ b[:, probe.eos[0]]))

    spared, blamed = (end_push("", short) for short in (3, 99))
    assert end_push("long", 99) > 0 > blamed and end_push("tone", 99) == blamed
    assert end_push("short", 3) == end_push("short", 99) == 0 and end_push("tone", 3) == spared
    assert reply.stats is None


# -- in the store ------------------------------------------------------------------------------------------


def test_a_reason_counts_while_its_rating_is_in_force(history, store):  # noqa: F811
    ids = keep(store, sim.texts(6, seed=1))
    for reply_id in ids:
        history.commit(history.version(), [(reply_id, "down", "too long", 0.0)], b"state", 0.0, 0.0)
    taste = UserTaste(history)
    assert taste.status.ratings == 6 and len(taste.evidence()[0]) == 12
    with_reasons = stars(taste.model, SHORT, LONG)
    history.undo()
    assert len(taste.evidence()[0]) == 10 and stars(taste.model, SHORT, LONG) != with_reasons


def test_wrong_facts_teach_nothing(open_tiny):
    """The rating is kept, with its reason; weights, taste, training and similar questions do without it."""
    with open_tiny() as runtime:
        before, reply_id = weights(runtime), reply(runtime)
        runtime.rate(reply_id, "down")
        assert weights(runtime) != before
        result = runtime.choices.give_reason(reply_id, "facts")
        assert (result.applied, result.reason) == (False, "facts") and weights(runtime) == before
        learner: Learner = runtime.learner
        assert learner.history.status().ratings == 1 and learner.history.reasons.in_force()[0][1] == "facts"
        learner.rating_index.sync()
        assert learner.taste.evidence()[0] == [] and learner.rating_index.bank.labels() == {}
        found = load(learner.history, learner.rating_index, runtime.model.tokenizer, 512)
        assert not found.train and not found.held_out


@pytest.mark.parametrize("note", [" wrong facts", "wrong facts ", "wrong facts\n", "wrong facts : 1789"])
def test_spaces_around_the_words_of_a_reason_change_nothing(history, store, note):  # noqa: F811
    [reply_id] = keep(store, sim.texts(1, seed=1))
    history.commit(history.version(), [(reply_id, "down", note, 0.0)], b"state", 0.0, 0.0)
    assert history.reasons.in_force() == [(reply_id, "facts", 1)]
    assert history.labels() == [] and UserTaste(history).evidence()[0] == []


@pytest.mark.parametrize("reason", ["long", "facts"])
def test_one_undo_takes_a_rating_back_with_its_reason(open_tiny, reason):
    with open_tiny() as runtime:
        runtime.rate(reply(runtime, seed=2), "up")
        before, reply_id = weights(runtime), reply(runtime)
        runtime.rate(reply_id, "down", "so many words")
        rated = weights(runtime)
        runtime.choices.give_reason(reply_id, reason)
        assert weights(runtime) != rated
        row = runtime.learner.history.reasons.rating_of(reply_id)
        assert row is not None and row[1].endswith(": so many words")
        runtime.undo()
        assert weights(runtime) == before and runtime.learner.history.reasons.rating_of(reply_id) is None


def test_the_first_reason_changes_the_next_reply(open_tiny):
    """A reason about the length changes the push of the end at once. The next rating keeps the push, and an
    undo takes it back."""
    with open_tiny() as runtime:
        ends = runtime.learner.probe.coordinates.ends

        def push():
            runtime.learner.sync()
            return runtime.learner.micro.taste[ends].sum() if runtime.learner.micro.taste.size else 0.0

        reply_id = reply(runtime)
        runtime.rate(reply_id, "down")
        assert push() == 0
        for reason, sign in (("long", 1), ("short", -1), ("tone", 0), ("facts", 0), ("long", 1)):
            runtime.choices.give_reason(reply_id, reason)
            assert np.sign(push()) == sign, reason
        once = push()
        runtime.rate(reply(runtime, seed=3), "up")
        assert push() == pytest.approx(once, rel=0.2)
        runtime.rate(reply(runtime, seed=4), "down", "too long")
        assert push() > once
        for _ in range(3):
            runtime.undo()
        assert push() == 0


def test_another_rating_of_the_reply_takes_its_reason_back(open_tiny):
    with open_tiny() as runtime:
        reply_id = reply(runtime)
        runtime.rate(reply_id, "down", "too long")
        assert runtime.learner.micro.taste.any()
        runtime.rate(reply_id, "up")
        assert not runtime.learner.micro.taste.any()


def test_wrong_facts_take_an_earlier_reason_back(open_tiny):
    """Also if newer ratings came after the rating with the earlier reason."""
    with open_tiny() as runtime:
        first, second = reply(runtime, seed=1), reply(runtime, seed=2)
        runtime.rate(first, "down", "too long")
        runtime.rate(second, "up")
        assert runtime.learner.micro.taste.any()
        runtime.choices.give_reason(first, "facts")
        assert not runtime.learner.micro.taste.any()


def test_a_reason_for_an_earlier_reply_leaves_later_ratings(open_tiny):
    with open_tiny() as runtime:
        first, second = reply(runtime, seed=1), reply(runtime, seed=2)
        runtime.rate(first, "down")
        runtime.rate(second, "up")
        runtime.choices.give_reason(first, "short")
        assert {row[0] for row in runtime.learner.history.labels()} == {first, second}
        assert runtime.learner.history.reasons.in_force()[0][:2] == (first, "short")


def test_a_reason_needs_a_bad_rating(open_tiny):
    with open_tiny() as runtime:
        reply_id = reply(runtime)
        for rating in (None, "up", "3"):
            if rating:
                runtime.rate(reply_id, rating)
            with pytest.raises(UsageError, match="goes with a bad rating"):
                runtime.choices.give_reason(reply_id, "long")
        with pytest.raises(UsageError, match="a reason is long, short, tone, facts"):
            runtime.choices.give_reason(reply_id, "boring")
