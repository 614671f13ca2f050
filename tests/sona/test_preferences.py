"""Preferences between two replies change the model, survive restarts, and can be taken back."""

import threading

import numpy as np
import pytest

from ruvmlx.chats.chat_file import as_json
from ruvmlx.errors import AdapterMismatch, NotFound, StoreBusy, UsageError
from ruvmlx.sona import objective
from ruvmlx.sona.adapter_history import MINIMUM
from ruvmlx.sona.evidence import update_by
from ruvmlx.sona.export_examples import rows
from ruvmlx.store.audit import disagreement

from ..test_runtime import say
from .feedback import again, chat_with_reply, reply, weights

# -- what it does to the weights -----------------------------------------------------------------------------


def test_a_preference_moves_both_replies_apart(open_tiny):
    with open_tiny() as runtime:
        better, worse = reply(runtime, seed=1), reply(runtime, seed=2)
        result = runtime.choices.prefer(better, worse)
        assert result.applied and result.margin_after > result.margin_before
        assert 0 < result.kl <= result.kl_cap and result.adapter_version == 1
        status = runtime.status()
        assert (status.ratings, status.preferences, status.updates, status.pending) == (0, 1, 1, 1)


def test_the_other_way_round_moves_them_the_other_way(open_tiny):
    with open_tiny() as runtime:
        one, other = reply(runtime, seed=1), reply(runtime, seed=2)
        result = runtime.choices.prefer(other, one)
        assert result.margin_after > result.margin_before
        gained = result.margin_after - result.margin_before
        runtime.undo()
        back = runtime.choices.prefer(one, other)
        assert back.margin_before == pytest.approx(-result.margin_before, abs=1e-6)
        assert gained > 0 and back.margin_after - back.margin_before > 0


def test_a_weaker_preference_is_less_evidence(open_tiny):
    """In proportion; the tiny model's weights themselves are at the limit of one rating."""
    with open_tiny() as runtime:
        one, other = reply(runtime, seed=1), reply(runtime, seed=2)
        evidence, weights = [], []
        for strength in (1.0, 0.3):
            result = runtime.learner.prefer(one, other, "regenerated", strength)
            assert result.margin_after > result.margin_before
            evidence.append(runtime.learner.micro.evidence[0])
            weights.append(runtime.store.db.value("SELECT weight FROM preferences ORDER BY id DESC"))
            runtime.undo()
    assert weights == pytest.approx([2.0, 0.6])
    assert np.linalg.norm(evidence[1]) == pytest.approx(0.3 * np.linalg.norm(evidence[0]), rel=0.02)


def test_a_preference_is_one_piece_of_evidence(open_tiny):
    """G and L are those of a rating up and a rating down; S is the square of the difference, in which what
    both replies share cancels."""
    with open_tiny() as runtime:
        better, worse = reply(runtime, seed=1), reply(runtime, seed=2)
        learner, base = runtime.learner, runtime.learner.state
        traces = [learner.traces.of(runtime.store.replies.get(i), base) for i in (better, worse)]
        pushes = [learner._push(trace, weight) for trace, weight in zip(traces, (1.0, -1.0), strict=True)]
        given = (pushes, pushes[:1], pushes[1:])
        both, up, down = (update_by(base.micro, [p], learner.probe).adapter.evidence for p in given)
        np.testing.assert_allclose(both[0], up[0] + down[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(both[1], (up[0] + down[0]) ** 2, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(both[2], up[2] + down[2], rtol=1e-4, atol=1e-5)


def test_a_reply_is_no_better_than_itself(open_tiny):
    """The same text on both sides cancels: a preference learns from differences alone."""
    with open_tiny() as runtime:
        learner, base = runtime.learner, runtime.learner.state
        trace = learner.traces.of(runtime.store.replies.get(reply(runtime)), base)
        pushes = [learner._push(trace, weight) for weight in (1.0, -1.0)]
        update = update_by(base.micro, [pushes], learner.probe)
        np.testing.assert_allclose(update.adapter.lora_b, 0, atol=1e-6)


@pytest.mark.parametrize("ratios,expected", [
    ((0.0, 0.0), (1.0, -1.0)), ((2.0, 0.0), (0.5, -1.0)), ((5.0, 0.0), (0.0, -1.0)),
    ((0.0, -2.0), (1.0, -0.5)), ((-1.0, 1.0), (1.0, -1.0)),
])  # fmt: skip
def test_the_push_vanishes_as_the_replies_move(ratios, expected):
    assert objective.pair_weights(1.0, *ratios) == expected


def test_without_learning_a_preference_is_kept_and_changes_nothing(open_tiny):
    with open_tiny(learn=False) as runtime:
        before = weights(runtime)
        result = runtime.choices.prefer(reply(runtime, seed=1), reply(runtime, seed=2))
        assert not result.applied and weights(runtime) == before
        assert runtime.status().preferences == 1 and runtime.status().updates == 0


# -- undo, replacing, other processes ------------------------------------------------------------------------


def test_undo_takes_the_newest_feedback_back_bit_for_bit(open_tiny):
    """Ratings and preferences in turn: each undo takes the newer of them."""
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(4)]
        states = [weights(runtime)]
        given = [
            lambda: runtime.rate(ids[0], "up"),
            lambda: runtime.choices.prefer(ids[1], ids[2]),
            lambda: runtime.rate(ids[3], "down"),
            lambda: runtime.choices.prefer(ids[3], ids[0]),
        ]
        for give in given:
            give()
            states.append(weights(runtime))
        assert len(set(states)) == 5
        undone = []
        for expected in reversed(states[:-1]):
            undone.append(runtime.undo().undone)
            assert weights(runtime) == expected
        assert undone == ["preference", "rating", "preference", "rating"]
        with pytest.raises(NotFound, match="no rating"):
            runtime.undo()
        assert disagreement(runtime.store) == ""


def test_a_rollback_puts_the_preferences_of_that_version_in_force(open_tiny):
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(3)]
        runtime.choices.prefer(ids[0], ids[1])
        runtime.choices.prefer(ids[1], ids[2])
        assert runtime.rollback(1).preferences == 1
        assert [p.better for p in runtime.learner.history.pairs.in_force()] == [ids[0]]
        assert runtime.rollback(2).preferences == 2 and runtime.rollback(0).preferences == 0


def test_changing_ones_mind_is_the_last_word_alone(open_tiny):
    """a over b, then b over a, is the same as b over a alone; an undo gives the first back."""
    with open_tiny() as runtime:
        a, b = reply(runtime, seed=1), reply(runtime, seed=2)
        runtime.choices.prefer(b, a)
        only = runtime.learner.micro
        runtime.undo()
        runtime.choices.prefer(a, b)
        first = weights(runtime)
        runtime.choices.prefer(b, a)
        np.testing.assert_array_equal(runtime.learner.micro.lora_b, only.lora_b)
        assert runtime.status().preferences == 1
        runtime.undo()
        assert weights(runtime) == first and runtime.status().preferences == 1


def test_a_preference_survives_a_restart_and_another_processes_rating(open_tiny, monkeypatch):
    with open_tiny() as one, open_tiny() as two:
        ids = [reply(one, seed=i) for i in range(3)]
        weigh, calls = objective.pair_weights, []

        def weigh_slowly(*args):
            if not calls:
                two.rate(ids[2], "up")
            calls.append(args)
            return weigh(*args)

        monkeypatch.setattr(objective, "pair_weights", weigh_slowly)
        assert one.choices.prefer(ids[0], ids[1]).adapter_version == 2 and len(calls) == 2
        expected = weights(one)
    with open_tiny() as runtime:
        assert weights(runtime) == expected
        assert (runtime.status().ratings, runtime.status().preferences) == (1, 1)


def test_a_failed_commit_leaves_all_as_it_was(open_tiny, monkeypatch):
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(2)]
        before = weights(runtime)

        def fail(*_):
            raise StoreBusy("locked")

        monkeypatch.setattr(runtime.store.preferences, "add", fail)
        with pytest.raises(StoreBusy):
            runtime.choices.prefer(*ids)
        assert weights(runtime) == before and runtime.status().adapter_version == 0
        assert runtime.store.traces.get(ids[0]) is not None


# -- what is refused -----------------------------------------------------------------------------------------


def test_only_two_replies_of_this_model_to_one_question_can_be_compared(open_tiny):
    with open_tiny() as runtime:
        a, b = reply(runtime, seed=1), reply(runtime, "another question", seed=2)
        with pytest.raises(UsageError, match="two replies"):
            runtime.choices.prefer(a, a)
        with pytest.raises(UsageError, match="one question"):
            runtime.choices.prefer(a, b)
        with pytest.raises(NotFound):
            runtime.choices.prefer(a, "nothing")
        with runtime.store.transaction():
            runtime.store.db.execute("UPDATE replies SET fingerprint = 'other' WHERE id = ?", a)
        with pytest.raises(AdapterMismatch):
            runtime.choices.prefer(a, reply(runtime, seed=3))
        with pytest.raises(AdapterMismatch):
            runtime.choices.edit(a, "mine")
        assert runtime.status().preferences == 0


# -- regenerated replies -------------------------------------------------------------------------------------


def test_going_on_after_a_regenerated_reply_prefers_it_weakly(open_tiny):
    with open_tiny() as runtime:
        chat, _ = chat_with_reply(runtime)
        left = runtime.chats.turns(chat)[-1].reply_id
        again(runtime, chat)
        mine = runtime.chats.turns(chat)[-1].reply_id
        assert runtime.status().preferences == 0  # pressing the key says nothing yet
        say(runtime, chat, "go on")
        (found,) = runtime.learner.history.pairs.in_force()
        assert (found.better, found.worse, found.strength) == (mine, left, 0.3)
        say(runtime, chat, "and on")
        assert runtime.status().preferences == 1


def test_an_edited_question_does_not_bring_back_what_undo_took(open_tiny):
    with open_tiny() as runtime:
        chat, _ = chat_with_reply(runtime)
        again(runtime, chat)
        say(runtime, chat, "go on")
        runtime.undo()
        edited = {"instead_of": runtime.chats.turns(chat)[-2].id}
        for _ in runtime.chats.say(chat, "go on!", max_new_tokens=4, cancel=threading.Event(), **edited):
            pass
        assert runtime.chats.turns(chat)[-2].content == "go on!" and runtime.status().preferences == 0


def test_going_on_after_a_comparison_without_a_choice_says_nothing(open_tiny):
    """A comparison writes one of its two replies by the untouched model."""
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        for untouched in (True, False):
            chat, _ = chat_with_reply(runtime)
            again(runtime, chat, untouched=untouched)
            say(runtime, chat, "go on")
            assert runtime.status().preferences == (0 if untouched else 1)


def test_going_on_after_the_older_one_prefers_that(open_tiny):
    with open_tiny() as runtime:
        chat, _ = chat_with_reply(runtime)
        again(runtime, chat)
        newer = runtime.chats.turns(chat)[-1].reply_id
        runtime.chats.next_sibling(chat, -1)
        older = runtime.chats.turns(chat)[-1].reply_id
        say(runtime, chat, "go on")
        (found,) = runtime.learner.history.pairs.in_force()
        assert (found.better, found.worse) == (older, newer)


def test_going_on_says_nothing_where_it_is_known_or_cannot_be(open_tiny, monkeypatch):
    """Both are rated; the other was stopped; the update fails: the chat goes on, and nothing is learned."""
    with open_tiny() as runtime:
        chat, _ = chat_with_reply(runtime)
        runtime.rate(runtime.chats.turns(chat)[-1].reply_id, "down")
        again(runtime, chat)
        runtime.rate(runtime.chats.turns(chat)[-1].reply_id, "up")
        say(runtime, chat, "go on")
        chat, _ = chat_with_reply(runtime)
        with runtime.store.transaction():
            stopped = runtime.chats.turns(chat)[-1].reply_id
            runtime.store.db.execute("UPDATE replies SET finish_reason = 'cancelled' WHERE id = ?", stopped)
        again(runtime, chat)
        say(runtime, chat, "go on")
        chat, _ = chat_with_reply(runtime)
        again(runtime, chat)

        def fail(*_):
            raise StoreBusy("locked")

        monkeypatch.setattr(runtime.learner, "commit_preference", fail)
        say(runtime, chat, "go on")
        assert runtime.status().preferences == 0 and len(runtime.chats.turns(chat)) == 4


# -- deleting, copying, exporting ----------------------------------------------------------------------------


def test_deleting_a_chat_deletes_its_words_and_keeps_what_was_learned(open_tiny):
    with open_tiny() as runtime:
        chat, message = chat_with_reply(runtime, "a secret question")
        edited = runtime.chats.edit_reply(chat, message, "a secret answer")
        kept = weights(runtime)
        runtime.store.chats.delete(chat)
        row = runtime.store.replies.get(edited.reply_id)
        assert (row.text, row.prompt, row.sampled_ids, row.features) == ("", "", [], None)
        assert weights(runtime) == kept and runtime.status().preferences == 1
        assert runtime.learner.history.pairs.texts() == [] and runtime.learner.history.rated_replies(9) == []
        runtime.undo()
        assert runtime.status().preferences == 0 and disagreement(runtime.store) == ""


def test_preferences_without_words_do_not_wait_for_a_training(open_tiny):
    """Before, the loop was due again and again. It said that it needs 10 preferences and has 10."""
    with open_tiny() as runtime:
        for i in range(MINIMUM):
            chat, _ = chat_with_reply(runtime, f"question {i}")
            again(runtime, chat)
            first, second = (row.reply_id for row in runtime.store.messages.all(chat)[1:])
            runtime.choices.prefer(second, first)
            assert runtime.status().pending == 1
            runtime.erase_chat(chat)
        status = runtime.status()
        assert (status.preferences, status.pending) == (MINIMUM, 0) and not runtime.learning.is_due()
        assert runtime.learning.consolidate()["reason"].endswith("there are 0")


def test_a_saved_adapter_has_its_preferences_and_a_removed_one_has_none(open_tiny):
    with open_tiny() as runtime:
        runtime.choices.prefer(reply(runtime, seed=1), reply(runtime, seed=2))
        key = runtime.model.fingerprint
        runtime.store.adapters.copy(key, "default", "saved")
        assert len(runtime.store.preferences.in_force(key, "saved")) == 1
        assert disagreement(runtime.store) == ""
        runtime.learning.use("saved")
        assert runtime.undo().preferences == 0
        runtime.learning.use("default")
        runtime.store.adapters.delete(key, "saved")
        assert runtime.store.preferences.in_force(key, "saved") == [] and runtime.status().preferences == 1


def test_preferences_are_exported_with_the_chat_and_as_training_data(open_tiny):
    with open_tiny() as runtime:
        chat, message = chat_with_reply(runtime)
        original = runtime.chats.turns(chat)[-1].content
        edited = runtime.chats.edit_reply(chat, message, "hello, short")
        data = as_json(runtime.store, chat)
        assert data["preferences"] == [{"better": edited.message, "worse": message, "kind": "edit"}]
        runtime.store.adapters.copy(runtime.model.fingerprint, runtime.learner.history.name, "copy")
        assert len(as_json(runtime.store, chat)["preferences"]) == 1  # the copy's is the same one
        runtime.store.adapters.delete(runtime.model.fingerprint, "copy")
        history = runtime.learner.history
        assert list(rows(history, "dpo")) == [
            {"prompt": "hello", "chosen": "hello, short", "rejected": original}
        ]
        assert [row["label"] for row in rows(history, "kto")] == [True, False]
        (liked,) = rows(history, "sft")
        assert liked["messages"][1]["content"] == "hello, short"
        runtime.undo()
        assert as_json(runtime.store, chat)["preferences"] == [] and list(rows(history, "dpo")) == []
