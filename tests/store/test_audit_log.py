"""The witness log: written in the transaction of each event, and every edit of it is detected."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from ruvmlx.apps.cli.doctor import _CHECKS

from ruvmlx.errors import RuvmlxError, StoreError
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement
from ruvmlx.store.audit_log import GENESIS, canonical

from .test_store import a_reply

COLUMNS = {"seq": 99, "time": 1, "kind": "rollback", "body": "{}", "previous": "ab", "hash": "cd"}
APPEND_FOREVER = """
import sys
from pathlib import Path
from ruvmlx.store import Store
store = Store(Path(sys.argv[1]))
for i in range(int(sys.argv[2])):
    with store.transaction():
        store.witness.record("test", {"by": sys.argv[3], "i": i})
    print(i, flush=True)
"""


@pytest.fixture
def path(home):
    return home / "ruvmlx.db"


@pytest.fixture
def store(path):
    return Store(path)


@pytest.fixture
def tamper(path):
    """Run SQL without the guards, as anyone with access to the file could."""

    def run(sql: str, *args) -> None:
        db = sqlite3.connect(path)
        guards = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in guards:
            db.execute(f"DROP TRIGGER {name}")
        db.execute(sql, args)
        for _, text in guards:
            db.execute(text)
        db.commit()
        db.close()

    return run


def fill(store, n=5):
    for i in range(n):
        with store.transaction():
            store.witness.record("test", {"i": i, "x": 0.1 * i})


def write_lessons(store) -> None:
    """Two ratings, an undo and a rollback."""
    store.replies.add(a_reply("r1"), None)
    for parent, state in enumerate((b"one", b"two")):
        with store.transaction():
            version = store.versions.add("f", "default", parent, state, 0.01, 0.5)
            store.ratings.add("f", "default", version, "r1", "up", "because of zanzibar77", 1.0)
    with store.transaction():
        store.versions.move_head("f", "default", 1, "undo")
    with store.transaction():
        store.versions.move_head("f", "default", 2)


def append(path, n, name) -> subprocess.Popen:
    command = [sys.executable, "-c", APPEND_FOREVER, str(path), str(n), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_new_log_is_whole(store):
    chain = store.witness.check()
    assert (chain.rows, chain.head, chain.broken) == (0, GENESIS, None)
    fill(store)
    chain = store.witness.check()
    assert (chain.rows, chain.broken) == (5, None) and chain.head == store.witness.rows()[-1].hash


def test_what_happens_to_the_weights_is_recorded_in_order_without_words(store):
    write_lessons(store)
    rows = store.witness.rows()
    assert [r.kind for r in rows] == ["reply", "version", "rating", "version", "rating", "undo", "rollback"]
    assert rows[2].body["rating"] == "up" and rows[2].body["version"] == 1
    assert (rows[5].body["version_before"], rows[5].body["version"]) == (2, 1)
    text = "".join(canonical(r.body) for r in rows)
    assert "zanzibar77" not in text and "yo" not in json.loads(canonical(rows[0].body)).values()
    assert store.witness.check().broken is None and disagreement(store) == ""


@pytest.mark.parametrize("row", [1, 3, 5])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_change_of_any_column_of_any_row_is_found(store, tamper, column, row):
    fill(store)
    tamper(f"UPDATE witness SET {column} = ? WHERE seq = ?", COLUMNS[column], row)
    chain = store.witness.check()
    assert chain.broken == row and chain.why


@pytest.mark.parametrize("row", [1, 3, 5])
def test_a_missing_row_is_found_at_the_end_too(store, tamper, row):
    fill(store)
    tamper("DELETE FROM witness WHERE seq = ?", row)
    assert store.witness.check().broken == row


def test_bytes_in_place_of_text_and_a_row_put_in_are_found(store, tamper):
    fill(store)
    tamper("UPDATE witness SET body = x'ff00' WHERE seq = 2")
    assert store.witness.check().broken == 2
    tamper("DELETE FROM witness")
    tamper("INSERT INTO witness SELECT 7, 1, 'a', '{}', ?, 'b'", GENESIS)
    assert store.witness.check().broken == 1


def test_two_rows_swapped_with_their_links_mended_are_found(store, tamper):
    """The hash holds the row's number, so rows cannot change places."""
    fill(store)
    tamper("UPDATE witness SET kind = 'other', hash = (SELECT hash FROM witness WHERE seq = 3) WHERE seq = 2")
    assert store.witness.check().broken == 2


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE witness SET body = '{}'",
        "DELETE FROM witness",
        "INSERT OR REPLACE INTO witness VALUES (2, 1, 'a', '{}', 'b', 'c')",
        "INSERT INTO witness VALUES (9, 1, 'a', '{}', 'b', 'c')",
    ],
)
def test_sqlite_itself_refuses_all_but_appending(store, sql):
    fill(store)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        store.db.execute(sql)
    assert store.witness.check() == store.witness.check() and store.witness.check().rows == 5


def test_lost_guards_are_said(store):
    fill(store)
    store.db.execute("DROP TRIGGER witness_no_delete")
    assert "triggers" in store.witness.check().why


def test_a_row_belongs_into_a_transaction_and_goes_with_it(store):
    with pytest.raises(RuntimeError):
        store.witness.record("test", {})
    with pytest.raises(StoreError), store.transaction():
        store.witness.record("test", {})
        raise StoreError("no")
    assert store.witness.check().rows == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_not_recorded(store, value):
    with pytest.raises(ValueError), store.transaction():
        store.witness.record("test", {"kl": value})


@pytest.mark.parametrize(
    "sql, found",
    [
        ("UPDATE adapters SET state = x'00' WHERE version = 1", "version 1 of adapter 'default'"),
        ("UPDATE adapters SET name = 'mine' WHERE version = 2", "version 2 of adapter 'mine'"),
        ("UPDATE ratings SET rating = 'down' WHERE id = 1", "rating 1"),
        ("UPDATE ratings SET weight = 0.5 WHERE id = 2", "rating 2"),
        ("UPDATE adapter_heads SET version = 1", "at version 1"),
    ],
)
def test_tables_that_were_edited_disagree_with_the_log(store, tamper, sql, found):
    write_lessons(store)
    tamper(sql)
    assert store.witness.check().broken is None and found in disagreement(store)


def test_two_processes_write_one_chain(path, store):
    children = [append(path, 40, name) for name in "ab"]
    fill(store, 40)
    for child in children:
        assert child.communicate()[1] == ""
    chain = store.witness.check()
    assert (chain.rows, chain.broken) == (120, None)
    for name in "ab":
        mine = [r.body["i"] for r in store.witness.rows() if r.body.get("by") == name]
        assert mine == list(range(40))


def test_a_check_while_another_process_writes_finds_nothing_wrong(path, store):
    child = append(path, 100_000, "a")
    child.stdout.readline()
    try:
        for _ in range(50):
            assert store.witness.check().broken is None and disagreement(store) == ""
    finally:
        child.kill()
        child.communicate()


def test_kill_9_leaves_a_whole_chain_with_every_acknowledged_row(path):
    rng, before = random.Random(0), 0
    for _ in range(4):
        child = append(path, 100_000, "a")
        lines = [child.stdout.readline() for _ in range(3)]
        time.sleep(rng.random() * 0.1)
        os.kill(child.pid, signal.SIGKILL)
        lines += child.stdout.read().splitlines()
        child.wait()
        acknowledged = before + int([x for x in lines if x.strip()][-1]) + 1
        chain = Store(path).witness.check()
        assert chain.broken is None and acknowledged <= chain.rows <= acknowledged + 1
        before = chain.rows


def test_doctor_checks_the_chain_and_says_where_it_breaks(store, tamper):
    write_lessons(store)
    assert _CHECKS["witness log"]().startswith("7 rows, unbroken")
    tamper("UPDATE witness SET time = 5 WHERE seq = 4")
    with pytest.raises(RuvmlxError, match="breaks at row 4"):
        _CHECKS["witness log"]()
