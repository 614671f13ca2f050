"""Adapters under a byte budget, and the swap in the middle of a chat."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile, NotFound, StoreBusy, UsageError
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.lora.residency import Residency
from ruvmlx.sona.import_adapter import import_adapter
from ruvmlx.store.traces import Traces


def residency(budget, loads=None):
    """Adapters are strings whose size is the number after the dash."""
    loads = [] if loads is None else loads
    return Residency(lambda name: loads.append(name) or name, lambda x: int(x.split("-")[1]), budget)


def test_those_not_used_for_longest_leave_first_and_come_back():
    loads: list[str] = []
    held = residency(10, loads)
    for name in ("a-4", "b-4", "a-4", "c-4"):
        held.get(name)
    assert held.loaded_adapters() == ["a-4", "c-4"] and loads == ["a-4", "b-4", "c-4"]
    assert [(r.name, r.tier) for r in held.tiers()] == [("c-4", "hot"), ("a-4", "warm"), ("b-4", "cold")]
    held.get("b-4")
    assert loads[-1] == "b-4" and held.loaded_adapters() == ["c-4", "b-4"]
    counts = {r.name: (r.accesses, r.loads, r.bytes) for r in held.tiers()}
    assert counts == {"b-4": (2, 2, 4), "c-4": (1, 1, 4), "a-4": (2, 1, 0)}


def test_the_hot_one_stays_whatever_its_size():
    held = residency(10)
    held.get("a-4")
    assert held.get("big-99") == "big-99" and held.loaded_adapters() == ["big-99"]
    held.forget("big-99")
    assert held.loaded_adapters() == [] and [r.name for r in held.tiers()] == ["a-4"]


def test_a_failed_load_changes_nothing():
    def load(name):
        if name == "bad":
            raise CorruptFile("damaged")
        return name

    held = Residency(load, len, 10)
    held.get("good")
    with pytest.raises(CorruptFile):
        held.get("bad")
    assert held.loaded_adapters() == ["good"] and [r.name for r in held.tiers()] == ["good"]


# the swap, in a runtime ---------------------------------------------------------------------------------


def say(runtime, chat, text):
    greedy = runtime.writer.sampling(temperature=0.0)
    chunks = runtime.chats.say(chat, text, sampling=greedy, max_new_tokens=6, cancel=threading.Event())
    return list(chunks)[-1].response


def with_two_adapters(open_tiny, tiny, base=None):
    """A runtime with a rated adapter "default" and another one, "other", from elsewhere."""
    runtime = open_tiny()
    rng = np.random.default_rng(0)
    size = runtime.learner.micro.lora_b.shape
    head = 0.5 * rng.standard_normal((64, 2)), 0.5 * rng.standard_normal(size)
    pairs = {("lm_head", 0): tuple(w.astype(np.float32) for w in head)} | (base or {})
    import_adapter(runtime.store, runtime.learner, BaseLoRA(pairs, 1.0), "other")
    return runtime


def a_base():
    rng = np.random.default_rng(1)
    return {
        ("q_proj", 1): tuple(0.5 * rng.standard_normal(s).astype(np.float32) for s in ((64, 2), (2, 128)))
    }


def test_the_chat_goes_on_with_its_cache_when_only_the_head_differs(open_tiny, tiny):
    runtime = with_two_adapters(open_tiny, tiny)
    chat = runtime.chats.new_chat()
    first = say(runtime, chat, "hello there")
    assert runtime.learning.label == "default@0"
    runtime.learning.use("other")
    second = say(runtime, chat, "and now?")
    assert runtime.learning.label == "other@1"
    assert second.cached_tokens >= first.prompt_tokens  # nothing that was read is read again
    runtime.engine.sessions.clear()
    turns = runtime.chats.turns(chat)
    again = runtime.chats.new_chat()
    runtime.store.messages.add_user(again, turns[0].content)
    runtime.store.replies.add(replace(runtime.store.replies.get(turns[1].reply_id), id="copy"), again)
    uncached = say(runtime, again, "and now?")
    assert uncached.cached_tokens == 0 and uncached.token_ids == second.token_ids


def test_under_another_base_the_chat_is_read_again(open_tiny, tiny):
    runtime = with_two_adapters(open_tiny, tiny, a_base())
    chat = runtime.chats.new_chat()
    say(runtime, chat, "hello there")
    runtime.learning.use("other")
    assert say(runtime, chat, "and now?").cached_tokens == 0
    assert say(runtime, chat, "and then?").cached_tokens > 0
    runtime.learning.use("default")
    back = say(runtime, chat, "and back?")
    assert 0 < back.cached_tokens < back.prompt_tokens / 2  # the first turn, read under this base
    assert runtime.backend.lora is None


def test_a_swap_back_loads_nothing_and_finds_what_was_learned(open_tiny, tiny):
    runtime = with_two_adapters(open_tiny, tiny)
    chat = runtime.chats.new_chat()
    reply = say(runtime, chat, "hello there").request_id
    runtime.learning.use("other")
    runtime.learning.use("default")
    assert runtime.rate(reply, "up").applied and runtime.learning.label == "default@1"
    runtime.learning.use("other")
    assert runtime.learning.label == "other@1"
    runtime.learning.use("default")
    assert runtime.learning.label == "default@1"
    found = {r.name: (r.tier, r.accesses, r.loads) for r in runtime.learning.residency.tiers()}
    assert found == {"default": ("hot", 3, 1), "other": ("warm", 2, 1)}
    assert {r.name for r in runtime.adapters()} == {"default", "other"}


def test_the_label_has_the_version_after_an_undo(open_tiny, tiny):
    runtime = with_two_adapters(open_tiny, tiny)
    chat = runtime.chats.new_chat()
    assert runtime.rate(say(runtime, chat, "hello there").request_id, "up").applied
    assert runtime.learning.label == "default@1"
    runtime.undo()
    assert runtime.learning.label == "default@0"
    runtime.rollback(1)
    assert runtime.learning.label == "default@1"


def test_a_switch_that_fails_leaves_the_adapter_in_use(open_tiny, tiny):
    """The new adapter was in use already, with the weights that it had in memory, and nobody was told."""
    runtime = with_two_adapters(open_tiny, tiny, a_base())
    chat = runtime.chats.new_chat()
    reply = say(runtime, chat, "hello there")
    runtime.learning.use("other")
    runtime.learning.use("default")
    fingerprint = runtime.model.fingerprint
    with runtime.store.transaction():  # another process moves on to a version that cannot be loaded
        runtime.store.db.execute(
            "UPDATE adapter_heads SET version = 9 WHERE fingerprint = ? AND name = 'other'", fingerprint
        )
    with pytest.raises(NotFound):
        runtime.learning.use("other")
    assert runtime.learning.label == "default@0" and runtime.rate(reply.request_id, "up").applied
    assert runtime.learning.label == "default@1"
    again = say(runtime, runtime.chats.new_chat(), "and now?")
    assert runtime.backend.lora is None
    assert runtime.store.replies.get(again.request_id).adapter == "default"


def test_the_adapter_in_use_is_saved_although_it_was_evicted(open_tiny, tiny):
    """The adapter in use works on after its eviction, so the memory has traces that the store lacks."""
    with with_two_adapters(open_tiny, tiny) as runtime:
        runtime.learning.residency.budget = 1
        assert runtime.learning.of("other") is not None
        reply = say(runtime, runtime.chats.new_chat(), "hello there").request_id
        assert runtime.store.traces.get(reply) is None
    with open_tiny() as runtime:
        assert runtime.store.traces.get(reply) is not None


def test_the_adapter_in_use_forgets_deleted_words_although_it_was_evicted(open_tiny, tiny):
    """Before, it kept the question, the trace and the features until the program ended."""
    with with_two_adapters(open_tiny, tiny) as runtime:
        runtime.learning.residency.budget = 1
        assert runtime.learning.of("other") is not None
        chat = runtime.chats.new_chat()
        reply, learner = say(runtime, chat, "hello there").request_id, runtime.learner
        runtime.rate(reply, "up")
        assert reply in learner.traces.held and learner.taste.model.ratings == 1
        runtime.erase_chat(chat)
        assert reply not in learner.traces.held and learner.rating_index.known_state("hello there") is None
        assert learner.taste.model.ratings == 0


def test_the_traces_of_an_adapter_count(open_tiny, tiny):
    """Both adapters fit into the budget, but not with the traces of a long reply; the store gets these."""
    runtime = with_two_adapters(open_tiny, tiny)
    learning = runtime.learning
    assert learning.of("other") is not None
    learning.residency.budget = sum(adapter.bytes for adapter in learning.residency.tiers())
    reply = say(runtime, runtime.chats.new_chat(), "hello there").request_id
    assert learning.learner.traces.nbytes > 0
    learning.of("other")
    tiers = {adapter.name: adapter.tier for adapter in learning.residency.tiers()}
    assert tiers == {"default": "cold", "other": "hot"}
    assert runtime.store.traces.get(reply) is not None


def test_without_an_adapter_and_back(open_tiny, tiny):
    runtime = with_two_adapters(open_tiny, tiny, a_base())
    runtime.learning.use("other")
    chat = runtime.chats.new_chat()
    say(runtime, chat, "hello there")
    runtime.learning.use(None)
    assert runtime.backend.lora is None and runtime.learning.label is None
    plain = say(runtime, chat, "and now?").token_ids
    runtime.learning.use("other")
    assert runtime.backend.lora is not None and len(plain) == 6
    with pytest.raises(UsageError):
        runtime.learning.use("a b")
    with pytest.raises(UsageError):
        runtime.learning.use("none")
    assert runtime.learning.label == "other@1"


def test_the_end_stores_no_trace_of_deleted_words(open_tiny):
    """A rated reply keeps its row in the store, so the store could take a trace, which has the words."""
    runtime, beside = open_tiny(), open_tiny()
    chat = runtime.chats.new_chat()
    reply = say(runtime, chat, "hello there").request_id
    beside.rate(reply, "up")
    beside.erase_chat(chat)
    beside.close()
    assert runtime.learner.traces.held.keys() == {reply}
    runtime.close()
    with open_tiny() as runtime:
        assert runtime.store.replies.get(reply).sampled_ids == []
        assert runtime.store.traces.get(reply) is None


def test_the_work_after_a_reply_stores_no_vector_of_a_deleted_question(open_tiny):
    """A rated reply keeps its row. The question is still in memory, because nothing prepared the rating."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        reply = say(runtime, chat, "hello there").request_id
        runtime.rate(reply, "up")
        runtime.erase_chat(chat)
        runtime.learning.settle()
        assert runtime.store.replies.query(reply) is None


def test_a_locked_store_is_no_error_of_the_end(open_tiny, monkeypatch):
    """The replies are stored; only a later rating takes longer."""
    runtime = open_tiny()
    say(runtime, runtime.chats.new_chat(), "hello there")

    def fail(*_):
        raise StoreBusy("locked")

    monkeypatch.setattr(Traces, "put", fail)
    runtime.close()
