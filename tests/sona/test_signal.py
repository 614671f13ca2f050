"""Signals: their reward, where they are stored, and that implicit ones stay weak."""

import random
import threading

import numpy as np
import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.errors import NotFound, StoreBusy, UsageError
from ruvmlx.sona import signal
from ruvmlx.sona.adapter_history import signal_groups
from ruvmlx.store import SignalGroup, SignalRow
from ruvmlx.store import signals as store_module
from ruvmlx.store.signals import Signals
from tests.oracles.objective import reward_ref


def reply(runtime, text="hello there", seed=1) -> str:
    request = GenerationRequest(prompt=text, max_new_tokens=9, sampling=Sampling(seed=seed), ignore_eos=True)
    for _ in runtime.writer.generate(request):
        pass
    runtime.learning.settle()
    return request.request_id


def label_counts(history) -> np.ndarray:
    return np.bincount([signal.INDEX[label] for label in history], minlength=len(signal.LABELS))


def test_a_labels_worth_from_counts_is_that_from_the_whole_history():
    rng = random.Random(5)
    for _ in range(50):
        history = rng.choices(signal.RATINGS, k=rng.randrange(30))
        for rating in signal.RATINGS:
            assert signal.reward_of(rating, label_counts(history)) == pytest.approx(
                reward_ref(rating, history)
            )


def test_the_reward_halves_when_a_reply_takes_half_as_long_again():
    counts = np.zeros(len(signal.LABELS))
    usual, slow, hopeless = (signal.extract("r", "up", counts, latency_ratio=x) for x in (1, 1.5, 7))
    assert (usual.quality, usual.reward, slow.reward, hopeless.reward) == (1, 1, 0.5, 0)
    assert signal.extract("r", "down", counts).reward == 0
    assert usual.kind == "explicit" and usual.weight == 1


@pytest.mark.parametrize("label", signal.IMPLICIT)
def test_a_weak_signal_weighs_a_fifth_of_a_rating_at_most(label):
    found = signal.extract("r", label, np.zeros(len(signal.LABELS)))
    assert found.kind == "implicit" and 0 < found.weight <= 0.2 and 0 <= found.quality <= 1


def test_pace_compares_with_the_median_of_earlier_replies():
    pace = signal.Pace(keep=3)
    assert pace.ratio(100, 10) == 1
    assert pace.ratio(200, 10) == 2
    assert pace.ratio(150, 10) == 1
    assert pace.ratio(300, 10) == 2
    assert pace.ratio(150, 10) == 0.75  # of 20, 15 and 30: the first is forgotten
    assert pace.ratio(5, 0) == 1


def test_tiers_grow_with_the_model():
    assert [signal.size_class(n) for n in (135e6, 1.1e9, 3e9, 7e9, 70e9)] == [0, 1, 2, 3, 4]


def test_a_rating_leaves_a_signal(open_tiny):
    with open_tiny() as runtime:
        reply_id = reply(runtime)
        runtime.rate(reply_id, "4")
    with open_tiny() as runtime:  # written when the first one closed
        (row,) = runtime.store.signals.all(runtime.model.fingerprint)
        ids = runtime.store.replies.get(reply_id)
    assert (row.reply_id, row.kind, row.label) == (reply_id, "explicit", "4")
    assert row.reward == pytest.approx(row.quality * max(0, 2 - row.latency_ratio))
    assert row.context_tokens == len(ids.prompt_ids) + len(ids.sampled_ids)


def test_a_rating_and_its_signal_are_stored_together(open_tiny, monkeypatch):
    """After a crash or with a full disk, the store has both the rating and its signal, or neither."""
    with open_tiny() as runtime:
        reply_id = reply(runtime)
        with monkeypatch.context() as patch:
            patch.setattr(Signals, "add", fail_as_busy)
            with pytest.raises(StoreBusy):
                runtime.rate(reply_id, "up")
        assert runtime.status().adapter_version == 0 and not runtime.learner.rating_index.bank.labels()
        runtime.rate(reply_id, "up")
        assert runtime.store.signals.count() == 1  # before any `settle`


def test_feedback_that_the_store_cannot_take_is_lost(open_tiny, monkeypatch):
    """The user only copied a reply. If the store cannot take this feedback, the copy still succeeds."""
    with open_tiny(implicit_feedback=True) as runtime:
        reply_id = reply(runtime)
        with monkeypatch.context() as patch:
            patch.setattr(Signals, "add", fail_as_busy)
            assert not runtime.learning.notice(reply_id, "copied")
        assert runtime.learning.notice(reply_id, "copied") and runtime.store.signals.count() == 1


def fail_as_busy(*_):
    raise StoreBusy("locked")


def test_a_changed_rating_is_not_ranked_against_itself(open_tiny):
    """The same rating of the same reply has the same quality."""
    with open_tiny() as runtime:
        reply_id = reply(runtime)
        for rating in ("5", "5", "1", "1"):
            runtime.rate(reply_id, rating)
        runtime.learning.settle()
        found = runtime.store.signals.all(runtime.model.fingerprint)
        assert [one.quality for one in found] == [1.0, 1.0, 0.0, 0.0]
        assert signal_groups(runtime.learner.history)[0].quality == 0.0


def test_what_is_done_with_a_reply_is_not_recorded_unless_asked_for(open_tiny):
    with open_tiny() as runtime:
        assert runtime.learning.notice(reply(runtime), "copied") is False
        chat(runtime, "one", "two")
        assert runtime.store.signals.all(runtime.model.fingerprint) == []
        with pytest.raises(UsageError, match="copied"):
            runtime.learning.notice("last", "smiled")
        with pytest.raises(NotFound):
            runtime.learning.notice("nope", "copied")


def chat(runtime, *texts):
    session = runtime.chats.new_chat()
    for text in texts:
        given = {"sampling": Sampling(seed=1), "max_new_tokens": 4, "cancel": threading.Event()}
        list(runtime.chats.say(session, text, **given))  # seeded: an empty reply would say nothing
        runtime.learning.settle()
    return session


def test_weak_signals_count_a_little_until_there_is_a_rating(open_tiny):
    with open_tiny(implicit_feedback=True) as runtime:
        bank, memory = runtime.learner.rating_index.bank, runtime.learner.rating_index
        reply_id = reply(runtime)
        assert runtime.learning.notice(reply_id, "copied") and runtime.learning.notice(reply_id, "continued")
        memory.sync()
        assert bank.labels() == {reply_id: "copied"}  # the stronger one
        liked = bank.value(None)
        assert 0 < liked < 0.1
        assert bank.liked_replies(memory.query(runtime.store.replies.get(reply_id))) == []  # never an example
        runtime.rate(reply_id, "down")
        runtime.learning.notice(reply_id, "copied")
        memory.sync()
        assert bank.labels() == {reply_id: "down"} and bank.value(None) == pytest.approx(-0.2)
        runtime.undo()
        memory.sync()
        assert bank.labels() == {reply_id: "copied"}


def test_going_on_and_stopping_are_noticed_where_wanted(open_tiny):
    with open_tiny(implicit_feedback=True) as runtime:
        session = chat(runtime, "one", "two")
        first, second = [t.reply_id for t in runtime.chats.turns(session) if t.reply_id]
        request = GenerationRequest(prompt="and this", max_new_tokens=40, ignore_eos=True)
        for chunk in runtime.writer.generate(request):
            if chunk.generated == 2:
                request.cancel.set()
        runtime.learning.settle()
        found = {s.reply_id: s.label for s in runtime.store.signals.all(runtime.model.fingerprint)}
        assert found == {first: "continued", request.request_id: "stopped"} and second not in found


def test_the_buffer_is_bounded_and_says_what_it_dropped(open_tiny, monkeypatch):
    monkeypatch.setattr(store_module, "KEEP_SIGNALS", 5)
    with open_tiny() as runtime:
        store, reply_id = runtime.store, reply(runtime)
        for i in range(4):
            rows = [SignalRow(reply_id, "implicit", "copied", i, 0, 1, 0, n) for n in range(3)]
            store.signals.add(rows)
        kept = store.signals.all(runtime.model.fingerprint)
        assert [(s.quality, s.context_tokens) for s in kept] == [(2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]
        assert store.signals.dropped_count() == 7 and runtime.learner.rating_index.status().dropped == 7


def test_a_deleted_chat_takes_its_signals_along(open_tiny):
    with open_tiny(implicit_feedback=True) as runtime:
        session = chat(runtime, "one", "two")
        assert runtime.store.signals.count() == 1
        runtime.store.chats.delete(session)
        assert runtime.store.signals.count() == 0 and runtime.store.signals.dropped_count() == 0
        runtime.store.signals.add([SignalRow("gone", "implicit", "copied", 1, 1, 1, 0, 5)])
        assert runtime.store.signals.count() == 0


def test_signals_are_summed_up_by_kind_and_context(open_tiny):
    """The groups have the mean of every column. A changed rating counts once. Replies of other models do not
    count. Ratings that were taken back do not count."""
    with open_tiny() as runtime:
        ids = [reply(runtime) for _ in range(5)]
        model, signals = runtime.model.fingerprint, runtime.store.signals
        for id_, rating in ((ids[0], "up"), (ids[1], "up"), (ids[4], "up"), (ids[2], "down")):
            runtime.rate(id_, rating)
        signals.add(
            [
                SignalRow(ids[0], "explicit", "down", 0.0, 0.0, 1.0, 2, 511),
                SignalRow(ids[0], "explicit", "up", 1.0, 1.0, 1.0, 2, 511),
                SignalRow(ids[1], "explicit", "up", 1.0, 0.5, 1.5, 2, 100),
                SignalRow(ids[2], "explicit", "down", 0.0, 0.0, 1.2, 2, 512),
                SignalRow(ids[3], "implicit", "copied", 0.9, 0.9, 1.0, 2, 2048),
                SignalRow(ids[4], "explicit", "up", 1.0, 1.0, 1.0, 2, 100),
            ]
        )
        with runtime.store.transaction():
            runtime.store.db.execute("UPDATE replies SET fingerprint = 'other' WHERE id = ?", ids[4])
        assert signals.groups(model) == [
            SignalGroup("explicit", 2, "under 512", 2, 1.0, 0.75, 1.25),
            SignalGroup("explicit", 2, "512 to 2047", 1, 0.0, 0.0, 1.2),
            SignalGroup("implicit", 2, "2048 and more", 1, 0.9, 0.9, 1.0),
        ]
        assert signals.groups("none") == []
        assert signal_groups(runtime.learner.history) == signals.groups(model)
        runtime.undo()
        assert [(group.kind, group.count) for group in signals.groups(model)] == [
            ("explicit", 2),
            ("implicit", 1),
        ]
