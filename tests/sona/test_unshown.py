"""Unshown replies to the rated questions: how they are measured, and what the taste model makes of them."""

import threading

import numpy as np
import pytest

from ruvmlx.pausing import Stopped
from ruvmlx.sona import unshown, user_taste
from ruvmlx.sona.taste import RatedFeatures, TasteModel, features_within_question
from ruvmlx.sona.taste_features import features_of
from ruvmlx.sona.taste_measures import MEASURES
from ruvmlx.sona.user_taste import UserTaste
from ruvmlx.store.unshown import NAME
from tests.sona import simulated_tastes as sim

from .training_runs import answer

LENGTH = [measure.more for measure in MEASURES].index("longer replies")


def people(seed: int, compares: bool, count: int = 30) -> list[RatedFeatures]:
    """Ratings of someone who wants short replies. The questions differ much in the length that they need.

    compares: the stars count from the usual reply to the same question."""
    rng, found = np.random.default_rng(seed), []
    for question in sim.questions(count):
        needed = rng.normal(0, 3)
        replies = [features_of(question, sim.reply(rng), True) for _ in range(1 + unshown.REPLIES)]
        for i, reply in enumerate(replies):
            measures = reply.measures.copy()
            measures[LENGTH] = needed + rng.normal()
            replies[i] = reply.with_measures(measures)
        usual = np.mean([reply.measures for reply in replies[1:]], axis=0)
        wish = -replies[0].measures[LENGTH] + compares * needed
        stars = int(np.clip(np.round(3 + wish * (1 if compares else 0.5)), 1, 5))
        found.append(RatedFeatures(replies[0], str(stars), usual))
    return found


def agreement(model: TasteModel, compares: bool) -> float:
    unseen = people(900, compares, 60)
    predicted = model.predict_rated(unseen)[0]
    return float(np.corrcoef(predicted, [int(one.rating) for one in unseen])[0, 1])


def test_the_evidence_knows_who_compares():
    """The form with the larger evidence predicts unseen ratings better than the first form alone."""
    gains = []
    for seed in range(6):
        for compares in (True, False):
            given = people(seed, compares)
            alone = TasteModel.fit([RatedFeatures(one.features, one.rating) for one in given])
            model = TasteModel.fit(given)
            assert (model.share > 0.5) == compares and not alone.share
            assert agreement(model, compares) > 0.5
            gains.append((agreement(model, compares) - agreement(alone, compares), compares))
    assert np.mean([gain for gain, compares in gains if compares]) > 0.1
    assert min(gain for gain, compares in gains if not compares) == pytest.approx(0, abs=1e-3)


def test_features_within_a_question():
    rated = people(1, True, 1)[0]
    alone = RatedFeatures(rated.features, "5")
    within, unchanged = features_within_question([rated, alone], 1.0).measures
    assert within == pytest.approx(rated.features.measures - rated.usual)
    assert (unchanged == alone.features.measures).all()


@pytest.fixture
def runtime(open_tiny, monkeypatch):
    monkeypatch.setattr(unshown, "MAX_REPLY_TOKENS", 6)
    with open_tiny() as opened:
        for i in range(3):
            opened.rate(answer(opened, i), "up")
        yield opened


def complete(runtime, pause=lambda: None) -> int:
    history = runtime.learner.history
    rated = [reply_id for reply_id, *_ in history.labels()]
    return history.unshown.complete(runtime.model, runtime.backend, rated, pause)


def stored_measures(runtime) -> dict[str, np.ndarray]:
    return runtime.learner.history.unshown.load()


def test_each_rated_reply_is_measured_once(runtime):
    """The taste model uses the measures; a deleted reply has none; the weights in use come back."""
    learner, base = runtime.learner, runtime.backend.lora
    assert complete(runtime) == 3
    found = stored_measures(runtime)
    assert [*found] == [
        reply_id for reply_id, *_ in learner.history.labels()
    ] and runtime.backend.lora is base
    assert all(one.shape == (unshown.REPLIES, len(MEASURES)) for one in found.values())
    learner.taste = UserTaste(learner.history)
    given, _ = learner.taste.evidence()
    assert [one.usual.tolist() for one in given] == [one.mean(axis=0).tolist() for one in found.values()]
    assert complete(runtime, pytest.fail) == 0
    fourth = answer(runtime, 3)
    runtime.rate(fourth, "down")
    assert complete(runtime) == 1
    assert [*stored_measures(runtime)] == [*found, fourth]


def test_questions_together_have_the_replies_that_they_have_alone(runtime, monkeypatch):
    complete(runtime)
    together = stored_measures(runtime)
    runtime.store.checkpoints.put_measurement(runtime.model.fingerprint, NAME, b"nonsense")
    monkeypatch.setattr(unshown, "TOGETHER", 1)
    assert complete(runtime) == 3
    alone = stored_measures(runtime)
    assert [*alone] == [*together] and all((alone[id_] == together[id_]).all() for id_ in alone)


def test_a_stop_keeps_what_is_finished(runtime, monkeypatch):
    monkeypatch.setattr(unshown, "TOGETHER", 1)
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 9:  # at most six tokens a reply: in the second question
            raise Stopped

    with pytest.raises(Stopped):
        complete(runtime, stop)
    first = stored_measures(runtime)
    assert len(first) == 1 and runtime.backend.lora is runtime.learner.base
    assert complete(runtime) == 2
    again = stored_measures(runtime)
    assert len(again) == 3 and all((again[id_] == one).all() for id_, one in first.items())


def test_the_measures_are_deleted_with_the_chat(runtime, monkeypatch):
    """If idle work began before the deletion, this work does not store the deleted measures again."""
    store = runtime.store
    chat = runtime.chats.new_chat()
    for _ in runtime.chats.say(chat, "hello", max_new_tokens=6):
        pass
    reply_id = store.messages.branch(chat)[-1].reply_id
    runtime.rate(reply_id, "up")
    assert complete(runtime) == 4
    before = stored_measures(runtime)
    runtime.erase_chat(chat)
    assert [*stored_measures(runtime)] == [id_ for id_ in before if id_ != reply_id]
    runtime.learner.history.unshown._save(before)
    assert reply_id not in stored_measures(runtime) and len(stored_measures(runtime)) == 3
    store.replies.forget([*before])
    assert store.checkpoints.measurement(runtime.model.fingerprint, NAME) is None


def test_a_stop_ends_the_reading_of_a_long_question(runtime, monkeypatch):
    """A rating or a key that comes in this time does not wait until the model has read the question."""
    read, prefill = [], runtime.backend.prefill

    def note_end(*args, **options):
        step = prefill(*args, **options)
        read.append(args[0])
        return step

    def stop():
        raise Stopped

    monkeypatch.setattr(runtime.backend, "prefill", note_end)
    with pytest.raises(Stopped):
        complete(runtime, stop)
    assert not read and runtime.backend.lora is runtime.learner.base


def test_damaged_measures_are_measured_again(runtime):
    runtime.store.checkpoints.put_measurement(runtime.model.fingerprint, NAME, b"nonsense")
    assert stored_measures(runtime) == {}
    assert complete(runtime) == 3
    assert len(stored_measures(runtime)) == 3


def test_idle_time_measures_them_and_a_call_that_cannot_be_stopped_does_not(runtime):
    runtime.learning.settle()
    assert not stored_measures(runtime)
    runtime.learning.settle(threading.Event())
    assert len(stored_measures(runtime)) == 3
    assert all(one.usual is not None for one in runtime.learner.taste.evidence()[0])


def test_idle_time_does_not_look_again_at_what_it_cannot_compare(runtime, monkeypatch):
    """Only the newest ratings count, a question that is too long is tried once."""
    taste, asked = runtime.learner.taste, []
    monkeypatch.setattr(user_taste, "COMPARED", 2)
    complete = runtime.learner.history.unshown.complete
    monkeypatch.setattr(
        runtime.learner.history.unshown, "complete", lambda *args: asked.append(args[2]) or complete(*args)
    )
    monkeypatch.setattr(unshown, "MAX_PROMPT_TOKENS", 0)
    taste.compare(runtime.model, runtime.backend, lambda: None)
    taste.compare(runtime.model, runtime.backend, lambda: None)
    assert [len(ids) for ids in asked] == [2] and not stored_measures(runtime)


def test_a_reply_that_another_process_deleted_is_passed_over(open_tiny):
    with open_tiny() as runtime:
        kept, gone = runtime.learner.history.unshown, "aaaaaaaaaaaa"
        assert kept.complete(runtime.model, runtime.backend, [gone], lambda: None) == 0
