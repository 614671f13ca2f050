"""The format of the store: older files open with everything in them, and the log's bytes stay the same.

store_v3.db.gz was written by `fill` before the store was split into parts, store_v6.db.gz before there were
preferences, store_v7.db.gz to store_v10.db.gz by `fill` and `prefer`, store_v11.db.gz by `respond`, too, and
store_v12.db.gz has a pinned chat, store_v13.db.gz one with a summary in a folder, store_v14.db.gz to
store_v20.db.gz an adapter with 68 versions. The .json files are what was read from them then. A change of the
schema adds new files; these stay as they are.
"""

import gzip
import itertools
import json
import time
import uuid
from dataclasses import asdict, is_dataclass
from pathlib import Path

import numpy as np
import pytest

from ruvmlx.store import (
    KVChoiceRow,
    KVMeasured,
    KVObservation,
    PreferenceRow,
    ReplyRow,
    ResponseRow,
    RouteRow,
    SignalRow,
    Store,
    schema,
    weights,
)
from ruvmlx.store.audit import disagreement
from ruvmlx.store.schema import VERSION

DATA = Path(__file__).parents[1] / "data"
MODEL = "fingerprint"
GONE = "4194305:x"  # a process number above any that exists


@pytest.fixture
def clock(monkeypatch):
    """Call it to restart time and ids from the beginning, so that two runs write the same bytes."""
    return lambda: freeze(monkeypatch.setattr)


def freeze(setattr_) -> None:
    ticks, ids = itertools.count(1_700_000_000), itertools.count(1)
    setattr_(time, "time", lambda: float(next(ticks)))
    setattr_(time, "time_ns", lambda: next(ticks) * 10**9)
    setattr_(uuid, "uuid4", lambda: uuid.UUID(int=next(ids) << 80))


def reply(reply_id: str, **fields) -> ReplyRow:
    known = dict(
        id=reply_id, model="tiny", fingerprint=MODEL, adapter="default", adapter_version=0,
        prompt_ids=[1, 2, 70000], sampled_ids=[3, 4], prompt=f"question {reply_id}",
        text=f"answer {reply_id}",
        finish_reason="stop", query=np.array([0.5, -1, 2], np.float32), logprob=-1.5, examples=("a", "b"),
        latency_ratio=1.25,
    )  # fmt: skip
    return ReplyRow(**known | fields)


def fill(store) -> None:
    """Write at least one row to every table, through every method that writes."""
    chat, other = store.chats.new("tiny", "be brief"), store.chats.new("tiny", title="birds")
    write_chats(store, chat, other)
    rate(store)
    learn(store)
    store.model_data.put_reference_text(MODEL, b"neutral text")
    store.model_data.put_whitening(MODEL, b"whitening")
    report = {"reason": "a test", "context": 1}
    store.kv.put_choice(MODEL, "native", KVChoiceRow((64, 512), report, 5.0))
    store.kv.add_measured(MODEL, "native", KVMeasured("r1", (64, 512), 8, 0.5, 0.25, 4000.5, 5000.25))
    store.routes.put_cell(MODEL, "default", b"cell", {"loss": 0.5})
    store.witness.note("policy", {"cap": 0.01})


def write_chats(store, chat: str, other: str) -> None:
    """Branches, a fork, a soft-deleted chat, a deleted one, and a reply that a crash cut off."""
    turns = np.arange(6, dtype=np.float32).reshape(2, 3)
    for reply_id, hot in (("r1", 256), ("r2", 64)):
        store.messages.add_user(chat, f"question {reply_id}")
        seen = KVObservation(reply_id, MODEL, "native", (hot, 2048), 77, (100, 200, 300), 1234.5, 0.25, 1)
        route = RouteRow(reply_id, MODEL, "default", "plain", 0.75, turns, {"plain": 0.75, "examples": 0.25})
        store.replies.add(reply(reply_id), chat, seen, route)
        store.traces.put(reply_id, reply_id.encode())
    store.messages.set_head(chat, store.messages.branch(chat)[2].id)
    store.replies.add(reply("r3", query=None, logprob=None, examples=()), chat)
    store.messages.next_sibling(chat, store.messages.branch(chat)[-1].id, 1)
    fork = store.chats.fork(chat, store.messages.branch(chat)[1].id)
    store.chats.soft_delete(fork)
    store.chats.set_title(other, "herons")
    store.chats.set_system(other, "sing")
    store.messages.add_user(other, "where do they nest?")
    store.drafts.put(other, reply("r4", text="half"))
    store.db.execute(f"UPDATE drafts SET process = '{GONE}'")
    deleted = store.chats.new("tiny")
    store.messages.add_user(deleted, "gone")
    store.replies.add(reply("r5"), deleted)
    store.chats.delete(deleted)
    store.replies.add(reply("r6", fingerprint="other", adapter=None), None)


def rate(store) -> None:
    """Five versions, of which the last is undone and one has a base; and signals."""
    for version, (reply_id, rating) in enumerate([("r1", "up"), ("r2", "2"), ("r1", "down")]):
        with store.transaction():
            made = store.versions.add(MODEL, "default", version, f"state {version}".encode(), 0.01, 0.5)
            store.ratings.add(MODEL, "default", made, reply_id, rating, "a note", 1.0)
    with store.transaction():
        base = store.bases.add(MODEL, "default", b"base", {"gain": 0.5})
        made = store.versions.add(MODEL, "default", 3, b"state 3", 0.02, 0.25, base)
        store.bases.add_attempt(MODEL, "default", 3, made, {"gain": 0.5})
        store.bases.add_attempt(MODEL, "default", made, None, {"gain": -0.5})
    with store.transaction():
        made = store.versions.add(MODEL, "default", 4, b"state 4", 0.03, 0.75)
        store.ratings.add(MODEL, "default", made, "r3", "up", "", 0.0)
    with store.transaction():
        store.versions.move_head(MODEL, "default", 4, "undo")
    signals = [("r1", "explicit", "up"), ("r2", "implicit", "copied"), ("missing", "implicit", "copied")]
    store.signals.add([SignalRow(*signal, 1.0, 0.75, 1.25, 1, 77) for signal in signals])


def prefer(store) -> None:
    """An edited reply and three preferences: one is replaced, and the newest is undone."""
    question = "question edited"
    store.replies.add(reply("r7", prompt=question), None)
    store.replies.add(reply("r8", prompt=question, edited="r7"), None)
    pairs = [("r8", "r7", "edit"), ("r7", "r8", "compare"), ("r1", "r3", "regenerated")]
    for better, worse, kind in pairs:
        head = store.versions.head(MODEL, "default")
        with store.transaction():
            made = store.versions.add(MODEL, "default", head, f"state of {kind}".encode(), 0.01, 0.5)
            row = PreferenceRow(better, worse, kind, 0.5, 0.75)
            store.preferences.add(MODEL, "default", made, row)
    with store.transaction():
        store.versions.move_head(MODEL, "default", head, "undo")
    store.adapters.copy(MODEL, "default", "preferring")


def preference_results(store) -> dict:
    """The results of every method that reads preferences, as JSON."""
    mine, sessions = (MODEL, "default"), store.chats.all()
    found = {
        "in_force": store.preferences.in_force(*mine),
        "copied": store.preferences.in_force(MODEL, "preferring"),
        "texts": store.preferences.texts(*mine),
        "words": store.replies.words(["r7", "r8"]),
        "replies": store.preferences.replies(*mine, 9),
        "steps": store.preferences.steps_of_pair(*mine, store.versions.head(*mine), "r7", "r8"),
        "last": store.preferences.last_version(*mine, store.versions.head(*mine)),
        "chats": [store.preferences.of_chat(row.id) for row in sessions],
        "edited": [store.replies.get(reply_id).edited for reply_id in ("r7", "r8")],
    }
    return json.loads(json.dumps(found, default=as_plain))


def respond(store) -> None:
    """Two responses of one tenant; the second went on from the first."""
    for reply_id, previous in (("r9", None), ("r10", "r9")):
        store.replies.add(reply(reply_id, tenant="a tenant"), None)
        sent, answer = f"input {reply_id}".encode(), f"answer {reply_id}".encode()
        store.responses.add(ResponseRow(reply_id, previous, "a tenant", sent, answer))


def response_results(store) -> dict:
    """The results of every method that reads responses, as JSON."""
    found = {
        "rows": [store.responses.get(reply_id, "a tenant") for reply_id in ("r9", "r10")],
        "conversation": store.responses.conversation("r10", "a tenant", 99),
    }
    return json.loads(json.dumps(found, default=as_plain))


def rate_often(store) -> None:
    """68 versions of one adapter: format 14 compressed the weights of the first four."""
    for version in range(68):
        state = (np.arange(1, 16, dtype="<f4").repeat(6) * np.float32(version + 1)).tobytes()
        with store.transaction():
            store.versions.add(MODEL, "often", version, state, 0.01, 0.5)


def rated_often(store) -> dict:
    """All weights of the adapter of `rate_often`, as JSON."""
    states = [store.versions.get(MODEL, "often", version).state for version in range(1, 69)]
    return json.loads(json.dumps({"weights": states}, default=as_plain))


def learn(store) -> None:
    """Anchors (two of three are merged), deep runs, checkpoints, a copied and a removed adapter."""
    for i in range(3):
        with store.transaction():
            store.anchors.add(MODEL, "default", 4, 1, f"fisher {i}".encode(), 2, lambda a, b: a + b" + " + b)
    with store.transaction():
        store.deep_runs.add(MODEL, "default", 4, {"tasks": 2}, {"r2": "2", "missing": "up"})
    store.checkpoints.put_training(MODEL, "default", b"training")
    store.checkpoints.put_measurement(MODEL, "default", b"measurement")
    store.adapters.copy(MODEL, "default", "saved")
    store.adapters.add(MODEL, "taken", b"elsewhere", b"its base", 0.5, 0.25)
    store.adapters.add(MODEL, "removed", b"elsewhere", None, 0.5, 0.25)
    store.adapters.delete(MODEL, "removed")
    store.replies.set_query("r3", np.array([1, 2, 3], np.float32))


def everything(store) -> dict:
    """The results of every method that reads, as JSON."""
    store.drafts.recover()
    found = {"chain": store.witness.check(), "log": store.witness.rows(), "integrity": store.integrity()}
    found |= chats(store) | rating_results(store) | measured_results(store)
    for name in ("default", "saved", "taken", "removed"):
        found[name] = learned_results(store, name)
    return json.loads(json.dumps(found, default=as_plain))


def by_name(row) -> dict:
    """A row of the KV tables with its values by the names of the tiers, as the file has them."""
    if row is None:
        return None
    tiers = {"lengths": ("hot", "warm"), "tier_bytes": ("cold_bytes", "warm_bytes", "hot_bytes")}
    values = dict(vars(row))
    for field in tiers.keys() & values.keys():
        values |= zip(tiers[field], values.pop(field), strict=True)
    return values


def chats(store) -> dict:
    rows = store.chats.all() + store.chats.soft_deleted()
    return {
        "sessions": rows,
        "shown": [store.messages.branch(row.id) for row in rows],
        "messages": [store.messages.all(row.id) for row in rows],
        "questions": [store.replies.questions(row.id) for row in rows],
        "hits": [
            store.search.find(words) for words in ("question r1", "nest", "herons", "sing", "gone", "r2")
        ],
        "said": store.messages.user_texts(),
    }


def rating_results(store) -> dict:
    ids = [f"r{i}" for i in (1, 2, 3, 4, 6)]
    return {
        "replies": [store.replies.get(reply_id) for reply_id in ids],
        "traces": [store.traces.get(reply_id) for reply_id in ids],
        "queries": [store.replies.query(reply_id) for reply_id in ids],
        "examples": store.replies.examples_used(MODEL),
        "signals": store.signals.all(MODEL),
        "implicit": store.signals.all(MODEL, "implicit"),
        "signal_count": [store.signals.count(), store.signals.dropped_count()],
        "named": store.adapters.all(),
    }


def measured_results(store) -> dict:
    return {
        "neutral": store.model_data.reference_text(MODEL),
        "whitening": store.model_data.whitening(MODEL),
        "observations": [by_name(row) for row in store.kv.observations(MODEL, "native", 9)],
        "measured": [by_name(row) for row in store.kv.measurements(MODEL, "native")],
        "choice": by_name(store.kv.choice(MODEL, "native")),
        "long": store.kv.long_replies(MODEL, 5),
        "tokens": store.replies.tokens("r1"),
    }


def learned_results(store, name: str) -> dict:
    mine = (MODEL, name)
    head, versions = store.versions.head(*mine), store.versions.kept_versions(*mine)
    bases = {store.versions.base_of(*mine, version) for version in versions} - {0}
    return {
        "head": head,
        "versions": [store.versions.get(*mine, version) for version in versions],
        "bases": [store.bases.get(*mine, base) for base in sorted(bases)],
        "ratings": store.ratings.in_force(*mine),
        "labels": [row[:2] for row in store.ratings.labels(*mine)],
        "texts": store.ratings.texts(*mine),
        "rated_replies": store.ratings.replies(*mine, 9),
        "steps": store.ratings.steps_of_reply(*mine, head, "r1"),
        "marks": [
            store.ratings.last_version(*mine, head),
            store.ratings.first_time(*mine),
            store.versions.promotions(*mine, head),
        ],
        "attempts": store.bases.attempts(*mine),
        "anchors": store.anchors.in_use(*mine),
        "deep_run": store.deep_runs.newest(*mine),
        "pruned": store.deep_runs.pruned_ratings(*mine),
        "training": store.checkpoints.training(*mine),
        "measurement": store.checkpoints.measurement(*mine),
        "routes": [
            store.routes.rated_routes(*mine, 9),
            store.routes.newest(*mine, 9),
            store.routes.counts(*mine),
        ],
        "router": [store.routes.rated_mark(*mine), store.routes.cell(*mine)],
    }


def as_plain(value):
    if is_dataclass(value):
        return asdict(value)
    return value.tolist() if isinstance(value, np.ndarray) else value.hex()


def known_results(version: int = 3) -> dict:
    return json.loads((DATA / f"store_v{version}.json").read_text())


def as_then(found, then):
    """`found` without the fields that a later format added to rows, and with two values of `then`. `turns`:
    then, the store counted the messages of all branches; now, it counts those of the branch in use
    (test_branches.py). `query` of a rated reply: the row no longer has this field, and the tests compare it
    in "queries"."""
    if isinstance(then, dict) and isinstance(found, dict):
        found = found | ({"turns": then["turns"]} if "turns" in found and "turns" in then else {})
        found = found | ({"query": then["query"]} if "query" in then and "query" not in found else {})
        return {name: as_then(found.get(name), value) for name, value in then.items()}
    if isinstance(then, list) and isinstance(found, list) and len(then) == len(found):
        return [as_then(*pair) for pair in zip(found, then, strict=True)]
    return found


def written_by(version: int, folder: Path) -> Store:
    """A store of that format, opened and so brought to the newest one."""
    path = folder / "ruvmlx.db"
    path.write_bytes(gzip.decompress((DATA / f"store_v{version}.db.gz").read_bytes()))
    return Store(path)


PARTS = {
    "preferred": preference_results,
    "responded": response_results,
    "rated_often": rated_often,
}  # what files of later formats have besides


@pytest.mark.parametrize("version", [3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20])
def test_a_file_written_before_opens_with_everything_in_it(tmp_path, clock, version):
    store, then = written_by(version, tmp_path), known_results(version)
    assert disagreement(store) == ""
    clock()
    found = everything(store) | {name: read(store) for name, read in PARTS.items() if name in then}
    assert as_then(found, then) == then
    assert disagreement(store) == ""


def test_a_new_store_has_every_step(tmp_path):
    """A new store has the newest format. An older store gets the newest format when it opens."""
    for store in (Store(tmp_path / "new.db"), written_by(17, tmp_path)):
        assert VERSION == len(schema._STEPS) == store.db.value("PRAGMA user_version")
        names = {row["name"] for row in store.db.rows("SELECT name FROM sqlite_schema")}
        assert {
            "replies_by_tenant",
            "replies_by_adapter",
            "removed_adapters",
            "known_models",
        } <= names and store.integrity() == "ok"
        store.close()


def test_versions_go_on_from_a_file_written_before(tmp_path, monkeypatch):
    """Format 14 has whole weights alone. New versions are differences from them, old ones become compressed,
    and all read as they were written."""
    monkeypatch.setattr(weights, "PACKED_AT_ONCE", 4)
    store, then = written_by(14, tmp_path), known_results(14)["rated_often"]["weights"]
    assert [row["packed"] for row in packed_often(store)] == [1] * 4 + [0] * 64
    for version in range(68, 84):
        with store.transaction():
            store.versions.add(MODEL, "often", version, bytes.fromhex(then[version - 68]), 0.01, 0.5)
    rows = packed_often(store)
    assert [row["packed"] for row in rows] == [1] * 84
    assert [row["source"] for row in rows] == [0] * 68 + list(range(68, 84))
    states = [store.versions.get(MODEL, "often", version).state.hex() for version in range(1, 85)]
    assert states == then + then[:16]
    assert disagreement(store) == ""


def packed_often(store) -> list:
    sql = "SELECT packed, source FROM adapters WHERE fingerprint = ? AND name = 'often' ORDER BY version"
    return store.db.rows(sql, MODEL)


def test_preferences_can_be_added_to_a_file_written_before(tmp_path):
    """The file of format 6 has none; after the same calls it has those of format 7's file."""
    store = written_by(6, tmp_path)
    assert store.preferences.in_force(MODEL, "default") == []
    prefer(store)
    then = known_results(7)["preferred"]
    found = preference_results(store)
    assert as_then(found, then) == then and [p["better"] for p in then["in_force"]] == ["r7"]
    assert disagreement(store) == ""


@pytest.mark.parametrize(
    "column,value", [("better", "r1"), ("strength", 1.0), ("kind", "edit"), ("weight", 2)]
)
def test_a_changed_preference_disagrees_with_the_log(tmp_path, column, value):
    store = written_by(7, tmp_path)
    store.db.execute(f"UPDATE preferences SET {column} = ? WHERE id = 2", value)
    assert disagreement(store) == "preference 2 is not what was written"


def test_the_same_calls_write_the_same_log_and_read_the_same_rows(tmp_path, clock):
    """Every hash of the chain depends on all bytes before it."""
    clock()
    store = Store(tmp_path / "ruvmlx.db")
    fill(store)
    clock()
    found = everything(store)
    assert found["chain"] == known_results()["chain"]
    assert as_then(found, known_results()) == known_results()


def test_a_new_column_in_any_table_needs_no_other_change(tmp_path, clock):
    """Statements name their columns, so reading and writing ignore columns that they do not name."""
    clock()
    store = Store(tmp_path / "ruvmlx.db")
    tables = store.db.rows("SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE '%VIRTUAL%'")
    names = [row["name"] for row in tables if not row["name"].startswith(("sqlite_", "messages_text"))]
    for name in names:
        store.db.execute(f"ALTER TABLE {name} ADD COLUMN later TEXT")
    fill(store)
    clock()
    found = as_then(everything(store), known_results())
    assert (
        found.pop("integrity") == f"table 'sessions' is not that of format {VERSION}"
    )  # doctor notices it, no more
    assert len(names) > 20 and found == {
        key: value for key, value in known_results().items() if key != "integrity"
    }
