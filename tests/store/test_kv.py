"""The tables of KV measurements are bounded; rows about a reply are deleted with its chat."""

import pytest

from ruvmlx.store import KVChoiceRow, KVMeasured, KVObservation, Store, kv
from ruvmlx.store.audit import disagreement

from .test_store import a_reply


@pytest.fixture
def store(home):
    return Store(home / "ruvmlx.db")


def observation(reply_id, hot=256, backend="native") -> KVObservation:
    return KVObservation(reply_id, "f", backend, (hot, 2048), 77, (100, 200, 300), 1234.5, 0.25, 1)


def test_observations_come_back_and_the_oldest_go(store, monkeypatch):
    monkeypatch.setattr(kv, "KEEP_OBSERVATIONS", 3)
    for i in range(5):
        store.replies.add(a_reply(f"r{i}"), None, observation(f"r{i}"))
    assert store.kv.observations("f", "native", 9) == [
        observation("r4"),
        observation("r3"),
        observation("r2"),
    ]
    assert store.kv.observations("f", "native", 1) == [observation("r4")]
    assert not store.kv.observations("f", "mlx", 9) and not store.kv.observations("g", "native", 9)


def test_they_go_with_their_chat(store):
    chat = store.chats.new("m")
    store.replies.add(a_reply("r1"), chat, observation("r1"))
    store.chats.delete(chat)
    assert store.kv.observations("f", "native", 9) == []


def test_a_reply_and_its_observation_are_one_commit(store):
    """A row that cannot be written takes the reply with it."""
    with pytest.raises(Exception, match="NOT NULL"):
        store.replies.add(a_reply("r1"), None, observation("r1", hot=None))
    assert store.db.value("SELECT count(*) FROM replies") == 0


def test_another_policy_than_before_is_witnessed(store):
    """By backend: two backends in turn are no change."""
    for i, (hot, backend) in enumerate([(256, "native"), (64, "mlx"), (256, "native"), (64, "native")]):
        store.replies.add(a_reply(f"r{i}"), None, observation(f"r{i}", hot, backend))
    (row,) = store.witness.rows("kv_used")
    assert (row.body["reply"], row.body["hot"], row.body["before"]) == ("r3", 64, [256, 2048])


def test_long_replies_come_newest_first_with_token_counts(store):
    """The newest first, of this model, the prompt's and the reply's tokens together."""
    for i, n in enumerate([8, 9, 3, 12]):
        store.replies.add(a_reply(f"r{i}", prompt_ids=list(range(n)), sampled_ids=[70000]), None)
    store.replies.add(a_reply("other", fingerprint="g", prompt_ids=[1] * 99), None)
    assert store.kv.long_replies("f", 10) == ["r3", "r1"]
    assert store.replies.tokens("r1") == [*range(9), 70000] and store.replies.tokens("none") == []


def row(reply_id, warm=512) -> KVMeasured:
    return KVMeasured(reply_id, (64, warm), 8, 0.01, 0.0001, 4000.5, 5000.25)


def test_measured_replies_are_bounded(store, monkeypatch):
    """All policies of a reply go at once; a pair measured again is replaced."""
    monkeypatch.setattr(kv, "KEEP_MEASURED", 2)
    for reply_id in ("a", "b", "c"):
        store.kv.add_measured("f", "native", row(reply_id))
        store.kv.add_measured("f", "native", row(reply_id, 1024))
    store.kv.add_measured("f", "native", row("c"))
    store.kv.add_measured("f", "mlx", row("a"))
    kept = store.kv.measurements("f", "native")
    assert {(r.reply_id, r.lengths[1]) for r in kept} == {(i, w) for i in "bc" for w in (512, 1024)}
    assert len(kept) == 4 and kept[0] == row("b") and store.kv.measurements("f", "mlx") == [row("a")]


def test_measurements_of_the_newest_32_replies_are_kept(store):
    for i in range(40):
        store.kv.add_measured("f", "native", row(f"{i:02}"))
    assert [r.reply_id for r in store.kv.measurements("f", "native")] == [f"{i:02}" for i in range(8, 40)]


def test_a_choice_is_witnessed_when_it_changes(store):
    for hot, context in ((64, 1), (64, 2), (256, 2)):
        report = {"reason": "a test", "context": context}
        store.kv.put_choice("f", "native", KVChoiceRow((hot, 512), report, 5.0))
    assert store.kv.choice("f", "native") == KVChoiceRow((256, 512), report, 5.0)
    rows = store.witness.rows("kv_choice")
    assert [(r.body["hot"], r.body["before"]) for r in rows] == [(64, None), (256, [64, 512])]
    assert disagreement(store) == "" and store.kv.choice("f", "mlx") is None


def test_a_policy_changed_behind_the_log_is_seen(store):
    store.kv.put_choice("f", "native", KVChoiceRow((64, 512), {"reason": "a test"}, 5.0))
    store.db.execute("UPDATE kv_choices SET warm = 64")
    assert "KV policy of the native backend" in disagreement(store)
