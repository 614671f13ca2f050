"""`--model auto` on two tiny random models: a model is chosen for each question, and the chat is kept."""

import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx import auto_runtime
from ruvmlx.auto_runtime import AutoRuntime, open_auto
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.errors import CorruptFile
from ruvmlx.memory import candidates
from ruvmlx.memory.candidates import AutoModels, find_candidates, fitting, single_model
from ruvmlx.memory.load_plan import PROGRAM
from ruvmlx.models.config.model import Message
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.sona.optional import selector as selector_module
from ruvmlx.store.audit import disagreement

from .models.make_models import make_safetensors_model

SMALL, LARGE = "first/small", "second/large"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Settings for two tiny models in a cache; the machine has no other models."""
    hub = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("ruvmlx.models.find.local.starter_path", lambda: None)
    monkeypatch.setattr(selector_module, "UNSURE_LOGPROB", None)  # a random model is always unsure
    for name, shape in ((SMALL, {"hidden_size": 32}), (LARGE, {"seed": 1, "hidden_size": 64})):
        repo = hub / f"models--{name.replace('/', '--')}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text("abc123")
        make_safetensors_model(repo / "snapshots" / "abc123", max_context=512, **shape)
    return Settings(model="auto", backend="native", threads=1, kv_disk=0)


@pytest.fixture
def prefer(monkeypatch):
    """Let the selector choose the model of this name from now on."""

    def use(name):
        def choose(self, turns, arms, seed=None):
            self.sync()
            number = next(n for n, model in enumerate(self.models) if model.name == name)
            return self.arms[number], dict.fromkeys(self.arms, 0.5)

        monkeypatch.setattr(selector_module.ModelSelector, "draw", choose)
        monkeypatch.setattr(selector_module.ModelSelector, "has_ratings", True)

    return use


def say(runtime, chat, text):
    """Send a message; return the chunks' notes and the response."""
    how = {"sampling": Sampling(seed=1), "max_new_tokens": 6, "cancel": threading.Event()}
    chunks = list(runtime.chats.say(chat, text, **how))
    return [chunk.note for chunk in chunks if chunk.note], chunks[-1].response


# -- which models ------------------------------------------------------------------------------------------


def test_the_models_are_the_smallest_and_larger_ones_that_fit_together(settings, monkeypatch):
    found = find_candidates(settings)
    assert [c.name for c in found.models] == [SMALL, LARGE] and found.best.name == LARGE and not found.note
    assert single_model(settings).model == LARGE and single_model(Settings(model="x")).model == "x"
    small, large = found.models
    both = PROGRAM + small.own_bytes + large.own_bytes
    assert fitting([small, large], both) == [small, large]
    assert fitting([small, large], both - 1) == [small]
    assert fitting([large, small], both - 1) == [large]


def test_with_one_model_a_line_says_so_and_the_model_answers(settings, monkeypatch):
    _, large = find_candidates(settings).models
    only = AutoModels([large], PROGRAM + large.own_bytes, [SMALL])
    monkeypatch.setattr("ruvmlx.auto_runtime.find_candidates", lambda *_: only)
    with open_auto(settings) as runtime:
        assert type(runtime) is Runtime and runtime.model.name == LARGE
        assert f"there is no memory for {SMALL}" in runtime.backend.caveat
        assert f"{LARGE} answers every question" in runtime.backend.caveat
    asked = replace(settings, auto_models=f"{LARGE}, {SMALL}")
    real = candidates.MachineMemory.now
    monkeypatch.setattr(
        candidates.MachineMemory, "now", lambda b, _: replace(real(b), limit=PROGRAM + large.own_bytes)
    )
    found = find_candidates(asked)
    assert [c.name for c in found.models] == [LARGE] and list(found.left_out) == [SMALL]


def test_the_default_model_is_a_candidate_and_a_line_says_why_there_is_no_other(
    settings, tmp_path, monkeypatch
):
    large = tmp_path / "my-model"
    make_safetensors_model(large, max_context=512, seed=1, hidden_size=64)
    shutil.rmtree(tmp_path / "hub" / f"models--{LARGE.replace('/', '--')}")
    alone = "auto: no other model is known; name some in the setting auto_models; " + SMALL
    assert find_candidates(settings).note == f"{alone} answers every question"
    assert find_candidates(replace(settings, auto_models=SMALL)).note.startswith(alone)
    monkeypatch.setenv("RUVMLX_MODEL", str(large))
    found = find_candidates(settings)
    assert [c.name for c in found.models] == [SMALL, str(large)] and not found.note
    small = PROGRAM + found.models[0].own_bytes
    real = candidates.MachineMemory.now
    monkeypatch.setattr(candidates.MachineMemory, "now", lambda b, _: replace(real(b), limit=small))
    assert "auto: no other model on this machine is clearly larger and fits" in find_candidates(settings).note
    (large / "config.json").write_text("{")
    assert find_candidates(settings).note.startswith(alone)


# -- in a chat ---------------------------------------------------------------------------------------------


def test_the_chat_goes_on_when_the_model_changes_and_nothing_is_read_twice(settings, prefer):
    with open_auto(settings) as runtime:
        assert isinstance(runtime, AutoRuntime) and runtime.model.name == SMALL
        chat = runtime.chats.new_chat()
        notes, first = say(runtime, chat, "Hello there, who are you?")
        assert notes == [f"Opening {LARGE} ...", f"{LARGE}: it is the largest, and no reply is rated yet"]
        assert first.choice.model.name == LARGE == runtime.model.name
        prefer(SMALL)
        notes, second = say(runtime, chat, "And what do you like?")
        assert notes == [f"{SMALL}: it answers such questions better, 50% sure"] and second.cached_tokens == 0
        prefer(LARGE)
        _, third = say(runtime, chat, "Why is that?")
        assert third.cached_tokens >= first.prompt_tokens  # its own KV cache: only the new messages are read
        prefer(SMALL)
        _, fourth = say(runtime, chat, "And now?")
        assert fourth.cached_tokens >= second.prompt_tokens > second.cached_tokens
        turns = runtime.chats.turns(chat)
        assert [turn.role for turn in turns] == ["user", "assistant"] * 4
        wrote = [runtime.store.replies.get(turn.reply_id).model for turn in turns[1::2]]
        assert wrote == [LARGE, SMALL, LARGE, SMALL]
        choices = [row.body for row in runtime.store.witness.rows("model")]
        assert [body["reply"] for body in choices] == [turn.reply_id for turn in turns[1::2]]
        assert disagreement(runtime.store) == ""


def test_a_rating_goes_to_the_model_that_wrote_and_undo_takes_the_newest_back(settings, prefer):
    with open_auto(settings) as runtime:
        chat = runtime.chats.new_chat()
        replies = {}
        for name in (SMALL, LARGE):
            prefer(name)
            replies[name] = say(runtime, chat, "Tell me more.")[1].request_id
        state = lambda: b"".join(arm.precision.tobytes() + arm.moment.tobytes() for arm in arms(runtime))  # noqa: E731
        nothing = state()
        runtime.rate(replies[SMALL], "down")
        assert runtime.model.name == SMALL and runtime.status().ratings == 1
        one = state()
        runtime.rate(replies[LARGE], "up")
        assert runtime.model.name == LARGE and len({nothing, one, state()}) == 3
        runtime.rate(replies[SMALL], "up")
        assert runtime.newest_feedback() == replies[SMALL]
        runtime.undo()
        assert runtime.model.name == SMALL and runtime.newest_feedback() == replies[LARGE]
        runtime.undo()
        assert runtime.model.name == LARGE and state() == one
        runtime.unrate(replies[SMALL])
        assert state() == nothing
        runtime.store.db.execute("UPDATE model_choices SET probability = 0.1")
        assert "choice of the model" in disagreement(runtime.store)


def arms(runtime):
    runtime.selector.sync()
    return runtime.selector._arms


def test_a_deleted_chat_takes_its_choices_along(settings):
    with open_auto(settings) as runtime:
        chat = runtime.chats.new_chat()
        runtime.rate(say(runtime, chat, "One")[1].request_id, "up")
        assert runtime.selector.has_ratings
        runtime.store.chats.delete(chat)
        assert not runtime.selector.has_ratings
        assert runtime.store.db.rows("SELECT * FROM model_choices") == []


def test_an_erased_chat_leaves_no_kv_cache_of_any_model(settings, prefer, home):
    with open_auto(replace(settings, kv_disk=10)) as runtime:
        chats = [runtime.chats.new_chat() for _ in range(2)]
        for name in (SMALL, LARGE):
            prefer(name)
            for chat in chats:
                say(runtime, chat, "hello " * 12)
        runtime.erase_chat(chats[0])
        for one in runtime._open.values():
            assert {kept.owner for kept in one.engine.sessions._sessions.values()} == {chats[1]}
        assert not runtime._states
    assert {file.stem for file in (home / "kv").glob("*.uses")} == {chats[1]}


def test_a_reply_without_a_chat_is_chosen_too_and_the_same_seed_chooses_the_same(settings):
    with open_auto(settings) as runtime:
        asked = [Message("user", "Name three rivers.")]

        def write(chosen):
            return chosen.writer.generate(GenerationRequest(messages=asked, max_new_tokens=4))

        response = list(runtime.reply_chunks(asked, write))[-1].response
        runtime.rate(response.request_id, "down")
        found = [list(runtime.reply_chunks(asked, write, seed=seed))[-1] for seed in (1, 1, 2)]
        seeds = [chunk.response.choice for chunk in found]
        assert seeds[0].model == seeds[1].model and np.array_equal(seeds[0].turns, seeds[1].turns)
        assert seeds[0].facts["model"] in (SMALL, LARGE) and 0 < seeds[0].facts["confidence"] < 1


def test_a_model_that_cannot_be_opened_is_told_and_left_out(settings, monkeypatch):
    opened = Runtime.open

    def refuse(settings, learn=True, watch=None):
        if settings.model == LARGE:
            raise CorruptFile("the file ends early.")
        return opened(settings, learn, watch)

    monkeypatch.setattr(Runtime, "open", refuse)
    with open_auto(settings) as runtime:
        notes, response = say(runtime, runtime.chats.new_chat(), "Hello")
        assert notes[1] == f"{LARGE} stays closed: the file ends early."
        assert response.choice.model.name == SMALL and "no other model" in notes[2]


def test_a_model_that_could_not_be_opened_is_tried_again(settings, monkeypatch):
    """A failure can pass: another program has taken the memory, or a file is still copied."""

    def refuse(*_, **__):
        raise CorruptFile("the file ends early.")

    def draw(self, turns, arms, seed=None):
        self.sync()
        return arms[-1], dict.fromkeys(arms, 0.5)  # the largest model of those on offer

    monkeypatch.setattr(selector_module.ModelSelector, "draw", draw)
    with open_auto(settings) as runtime:
        chat, small = runtime.chats.new_chat(), runtime.selector.models[0].fingerprint
        with monkeypatch.context() as m:
            m.setattr(Runtime, "open", refuse)
            say(runtime, chat, "Hello")
        assert runtime._fitting([Message("user", "Hello")]) == (small,)
        monkeypatch.setattr(auto_runtime, "RETRY_AFTER", 0.0)
        assert say(runtime, chat, "Hello")[1].choice.model.name == LARGE


def test_an_error_at_the_start_closes_the_first_model(settings, monkeypatch):
    closed, close = [], Runtime.close
    monkeypatch.setattr(Runtime, "close", lambda self: closed.append(self.model.name) or close(self))
    monkeypatch.setattr(
        auto_runtime, "ModelSelector", lambda *_: (_ for _ in ()).throw(CorruptFile("a store"))
    )
    with pytest.raises(CorruptFile, match="a store"):
        open_auto(settings)
    assert closed == [SMALL]


def test_without_a_model_that_can_be_loaded_the_error_is_that_of_the_largest(settings, monkeypatch):
    def refuse(name):
        raise CorruptFile(f"{name} ends early.")

    monkeypatch.setattr(auto_runtime, "load_model", refuse)
    with pytest.raises(CorruptFile, match=f"{LARGE} ends early"):
        open_auto(settings)


def test_a_question_goes_only_to_models_with_room_for_it(settings, monkeypatch):
    with open_auto(settings) as runtime:
        small = runtime.selector.models[0]
        runtime.selector.models[1] = replace(runtime.selector.models[1], context=10)
        assert runtime._fitting([Message("user", "a" * 31)]) == (small.fingerprint,)
        assert len(runtime._fitting([Message("user", "a" * 29)])) == 2
        assert runtime._fitting([Message("user", "a" * 9999)]) == (small.fingerprint,)


def test_an_unsure_small_model_hands_its_question_on(settings, prefer, monkeypatch):
    monkeypatch.setattr(selector_module, "UNSURE_LOGPROB", -0.5)
    with open_auto(settings) as runtime:
        chat = runtime.chats.new_chat()
        prefer(SMALL)
        notes, response = say(runtime, chat, "Hello there")
        assert notes[-1] == f"{LARGE}: {SMALL} was unsure of its answer"
        assert response.choice.model.name == LARGE and len(runtime.chats.turns(chat)) == 2
        monkeypatch.setattr(selector_module, "UNSURE_LOGPROB", -99.0)
        notes, response = say(runtime, chat, "Hello again")
        assert response.choice.model.name == SMALL
        monkeypatch.setattr(selector_module, "UNSURE_LOGPROB", -0.5)
        monkeypatch.setattr(selector_module, "SURE", 0.5)  # the selector is sure of the small model
        assert say(runtime, chat, "And again")[1].choice.model.name == SMALL


def test_all_caches_together_keep_to_the_memory_plan(settings, prefer):
    with open_auto(settings) as runtime:
        runtime._limit = PROGRAM + sum(c.own_bytes for c in runtime._candidates.values()) + (8 << 20)
        prefer(LARGE)
        say(runtime, runtime.chats.new_chat(), "Hello")
        budgets = [opened.backend.pool.budget for opened in runtime._open.values()]
        needs = [runtime._candidates[key].need.cache for key in runtime._open]
        assert len(budgets) == 2 and budgets == [need + (4 << 20) for need in needs]


def test_the_memory_of_each_purpose_is_that_of_all_models(settings, prefer):
    """The plan of the weights was that of the model in use, beside the bytes of all models."""
    with open_auto(settings) as runtime:
        chat = runtime.chats.new_chat()
        for name in (SMALL, LARGE):
            prefer(name)
            say(runtime, chat, "hello")
        rows = {row.name: row for row in runtime.memory_purposes()}
        used = runtime.memory_use()
    weights = [one.planned.weights for one in runtime._open.values()]
    assert rows["weights"].planned == sum(weights) and len(weights) == 2
    assert 0 < rows["weights"].used <= used.model
    assert (rows["kv"].used, rows["kv"].limit) == (used.kv, used.kv_budget)
