"""Best of n through the Runtime: the replies are branches, and each can be rated like any other."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.chats import reply_writer
from ruvmlx.chats.learning import Learning
from ruvmlx.chats.reply_writer import FEWER
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona.judge import CandidateReply
from ruvmlx.sona.taste import TasteModel
from ruvmlx.sona.user_taste import UserTaste
from ruvmlx.store import Store

HOT = Sampling(1.5, seed=3)


def say(runtime, chat, text="hello", again=False, cancel_at=None, **how):
    cancel = threading.Event()
    known = {"sampling": HOT, "max_new_tokens": 12, "cancel": cancel, "best_of": 4}
    chats = runtime.chats
    for chunk in chats.again(chat, **known | how) if again else chats.say(chat, text, **known | how):
        if chunk.generated == cancel_at:
            cancel.set()
    return chunk.response


@pytest.fixture
def set_stars(monkeypatch):
    """A function that sets the stars which the judge gives to the replies, by their place."""

    class ByPlace:
        stars = (1.0, 2.0, 1.5, 1.2)

        def score(self, replies):
            return np.array(self.stars)

    judge = ByPlace()
    monkeypatch.setattr(Learning, "judge", lambda self, learner: judge)
    return lambda *stars: setattr(judge, "stars", stars)


def test_the_winner_is_shown_and_the_others_are_branches(open_tiny, set_stars):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        best = say(runtime, chat)
        shown = runtime.chats.turns(chat)[-1]
        assert shown.reply_id == best.request_id == runtime.writer.last_reply_id
        assert (shown.content, shown.branch, shown.branches) == (best.text, 4, 4)
        seen = set()
        for _ in range(4):
            runtime.chats.next_sibling(chat, 1)
            seen.add(runtime.chats.turns(chat)[-1].content)
        assert seen == {best.text, *(reply.text for reply in best.others)} and len(seen) == 4


@pytest.mark.parametrize("part", ["predict", "fit"])
@pytest.mark.parametrize("count", [3, "auto"])
def test_a_question_gets_a_reply_although_the_judge_fails(open_tiny, monkeypatch, part, count):
    """Its taste model cannot be fitted, or cannot predict. A line says that no reply is chosen."""

    def fail(*_):
        raise np.linalg.LinAlgError("singular matrix")

    monkeypatch.setattr(reply_writer, "affordable", lambda engine: 3)
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        alone = say(runtime, chat, best_of=1)
        runtime.rate("last", "up")
        if part == "fit":
            monkeypatch.setattr(UserTaste, "_fit", fail)
        else:
            monkeypatch.setattr(TasteModel, "predict", fail)
        how = {"sampling": HOT, "max_new_tokens": 12, "best_of": count}
        some = [*runtime.chats.say(runtime.chats.new_chat(), "hello", **how)]
        notes = [chunk.note for chunk in some if chunk.note]
        assert notes == ["The judge of the replies failed (LinAlgError), so no reply is chosen."]
        assert len(some[-1].response.token_ids) == len(alone.token_ids)
        assert len(some[-1].response.others) == 2


def test_the_setting_and_the_seed(open_tiny, set_stars):
    """The same seed, the same four replies; the judge's favourite is the second."""
    with open_tiny(best_of=4) as runtime:
        one, two = (say(runtime, runtime.chats.new_chat(), best_of=None) for _ in range(2))
        alone = say(runtime, runtime.chats.new_chat(), best_of=1)
    assert one.token_ids == two.token_ids and len(one.others) == 3
    assert [r.token_ids for r in one.others] == [r.token_ids for r in two.others]
    assert one.others[0].token_ids == alone.token_ids != one.token_ids and alone.others == ()


def test_each_of_them_can_be_rated_and_taken_back(open_tiny, set_stars):
    with open_tiny() as runtime:
        best = say(runtime, runtime.chats.new_chat())
        runtime.learning.settle()
        ids = [best.request_id, *(reply.request_id for reply in best.others)]
        before = runtime.learner.micro
        for reply_id, rating in zip(ids, ["up", "down", "4", "1"], strict=True):
            assert runtime.rate(reply_id, rating).applied
        assert runtime.status().ratings == 4
        for _ in ids:
            runtime.undo()
        runtime.learner.sync()
        assert np.array_equal(runtime.learner.micro.lora_b, before.lora_b)


def test_ratings_are_those_of_the_same_reply_alone(open_tiny, set_stars):
    """The trace of a reply of a batch moves the weights as the one that a single reply records."""
    moved = []
    for count in (1, 4):
        with open_tiny() as runtime:
            best = say(runtime, runtime.chats.new_chat(), best_of=count)
            reply_id = best.request_id if count == 1 else best.others[0].request_id
            runtime.rate(reply_id, "up")
            moved.append(runtime.learner.micro.lora_b.copy())
            runtime.undo()
    np.testing.assert_allclose(moved[0], moved[1], rtol=1e-3, atol=1e-6)
    assert np.abs(moved[0]).max() > 0


def test_replies_that_were_not_shown_say_nothing_of_the_taste(open_tiny, set_stars):
    """The taste model learns from shown replies without a rating, too, if a user presses only one thumb."""
    with open_tiny() as runtime:
        best = say(runtime, runtime.chats.new_chat())
        history = runtime.learner.history
        unrated = runtime.store.replies.unrated_replies(history.fingerprint, history.name, 10)
        assert [row.id for row in unrated] == [best.request_id]
        assert {runtime.store.replies.get(r.request_id).beside for r in best.others} == {best.request_id}


def test_again_and_the_next_turn(open_tiny, set_stars):
    """Again writes four more beside them; the next turn continues the one that is shown."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat)
        set_stars(9.0, 0.0, 0.0, 0.0)
        best = say(runtime, chat, again=True, sampling=replace(HOT, seed=4))
        assert runtime.chats.turns(chat)[-1].branches == 8
        held = runtime.engine.sessions.get(chat)
        assert held.tokens[best.prompt_tokens :] == best.token_ids[:-1]
        say(runtime, chat, "and then?")
        turns = runtime.chats.turns(chat)
        assert [turn.role for turn in turns] == ["user", "assistant"] * 2
        assert turns[1].reply_id == best.request_id


def test_stopping_keeps_the_best_so_far_alone(open_tiny, set_stars):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        best = say(runtime, chat, cancel_at=5, max_new_tokens=50)
        turn = runtime.chats.turns(chat)[-1]
        assert (turn.reply_id, turn.finish_reason, turn.branches) == (best.request_id, "cancelled", 1)
        assert runtime.rate("last", "down").applied


def test_dropped_replies_can_be_continued(open_tiny, set_stars):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        set_stars(0.0, 5.0, 0.0, 0.0)
        best = say(runtime, chat, max_new_tokens=50)
        assert [len(reply.token_ids) for reply in best.others] == [32, 32, 32]
        runtime.chats.next_sibling(chat, 1)
        cut = runtime.chats.turns(chat)[-1]
        assert cut.finish_reason == "cancelled"
        more = runtime.chats.continue_reply(chat, max_new_tokens=5, cancel=threading.Event())
        *_, last = more
        assert last.response.text.startswith(cut.content)


@pytest.mark.parametrize("how", [{"sampling": Sampling(0.0)}, {"untouched": True}, {"best_of": 1}])
def test_one_reply_where_several_make_no_sense(open_tiny, set_stars, how):
    with open_tiny(best_of=4) as runtime:
        assert say(runtime, runtime.chats.new_chat(), **{"best_of": None} | how).others == ()


@pytest.mark.parametrize(("pages", "room"), [(3, 1), (5, 2), (9, 4)])
def test_a_small_memory_has_room_for_fewer_replies(tiny, home, pages, room):
    """The setting refused every reply. A line says how many there are; with "auto", nothing was asked for."""
    backend, settings = NativeBackend(tiny, threads=1), Settings(best_of=4, kv="f16", kv_disk=None)
    backend.pool.budget = pages * backend.pool.sizes[-1]
    with Runtime(Store(home / "ruvmlx.db"), tiny, backend, settings) as runtime:
        how = {"prompt": "hi", "sampling": HOT, "max_new_tokens": 100, "ignore_eos": True}
        for best_of, told in ((None, room < 4), (4, room < 4), (1, False), ("auto", False)):
            some = [*runtime.writer.generate(GenerationRequest(**how, best_of=best_of))]
            assert len(some[-1].response.token_ids) == 100
            assert [chunk.note for chunk in some if chunk.note] == [FEWER.format(room, 4)] * told
            assert len(some[-1].response.others) == (room - 1 if best_of in (None, 4) else 0)


def test_before_the_first_rating_the_first_reply_is_shown(open_tiny):
    with open_tiny() as runtime:
        best = say(runtime, runtime.chats.new_chat())
        assert best.token_ids == say(runtime, runtime.chats.new_chat(), best_of=1).token_ids
        assert best.predicted_stars is None


def test_ratings_decide(open_tiny):
    """Someone who likes short words gets the reply that the taste model likes best."""
    with open_tiny() as runtime:
        for i in range(12):
            best = say(runtime, runtime.chats.new_chat(), f"question {i}", sampling=replace(HOT, seed=i))
            for reply in (best, *best.others):
                runtime.rate(reply.request_id, "5" if len(reply.text.split()) < 2 else "1")
        best = say(runtime, runtime.chats.new_chat(), "another", sampling=replace(HOT, seed=50))
        judge = runtime.learning.judge(runtime.learner)
        rows = [runtime.store.replies.get(r.request_id) for r in (best, *best.others)]
        stars = judge.score([CandidateReply(row.prompt, row.text, row.finish_reason) for row in rows])
        assert stars[0] == stars.max() and np.ptp(stars) > 0.1
        assert best.predicted_stars == pytest.approx(stars[0])


def test_outside_of_chats(open_tiny, set_stars):
    with open_tiny() as runtime:
        request = GenerationRequest(prompt="hi", sampling=HOT, max_new_tokens=8, best_of=3)
        set_stars(0.0, 0.0, 1.0)
        *_, last = runtime.writer.generate(request)
        assert runtime.store.replies.get("last").id == last.response.request_id
        assert len(last.response.others) == 2


def test_a_draft_is_the_leader_so_far(open_tiny, set_stars, monkeypatch):
    """The process is killed after the first replies were dropped."""
    monkeypatch.setattr("ruvmlx.chats.stored_replies.SAVE_EVERY", -1.0)
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        set_stars(0.0, 5.0, 0.0, 0.0)
        kept = []
        put = runtime.store.drafts.put
        monkeypatch.setattr(runtime.store.drafts, "put", lambda s, r, q: (kept.append(r), put(s, r, q)))
        best = say(runtime, chat, max_new_tokens=40)
    assert kept[-1].id == best.request_id and best.text.startswith(kept[-1].text)
    assert Settings().best_of == 1


def test_auto_asks_the_machine_once_there_is_a_taste(open_tiny, set_stars, monkeypatch):
    monkeypatch.setattr("ruvmlx.chats.reply_writer.affordable", lambda engine: 3)
    with open_tiny(best_of="auto") as runtime:
        set_stars(1.0, 2.0, 1.5)
        assert len(say(runtime, runtime.chats.new_chat(), best_of=None).others) == 2
        set_stars(1.0, 2.0)
        assert len(say(runtime, runtime.chats.new_chat(), best_of=2).others) == 1
        monkeypatch.setattr(Learning, "judge", lambda self, learner: None)
        assert say(runtime, runtime.chats.new_chat(), best_of="auto").others == ()
