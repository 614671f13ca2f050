"""A backup is whole while others write, is read back before it gets its name, and a restore loses nothing."""

import gzip
import json
import multiprocessing
import os
import sqlite3
import stat
import tracemalloc
import zlib

import pytest

from ruvmlx.errors import CorruptFile, NotFound, RuvmlxError, StoreBusy, UsageError
from ruvmlx.store import Store
from ruvmlx.store import backup as module
from ruvmlx.store.audit import disagreement
from ruvmlx.store.backup import back_up, restore

from .test_format import DATA, MODEL, as_plain, everything, fill, prefer


def content(path) -> str:
    store = Store(path)
    try:
        return json.dumps(everything(store), default=as_plain, sort_keys=True)
    finally:
        store.close()


@pytest.fixture
def path(tmp_path):
    """A store with rows in every table, closed."""
    store = Store(tmp_path / "home" / "ruvmlx.db")
    fill(store)
    store.close()
    return store.path


def test_there_and_back(path, tmp_path):
    """What was added since is kept under another name, and can be brought back itself."""
    before, file = content(path), tmp_path / "backup.db"
    facts = back_up(path, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and facts.bytes == file.stat().st_size
    assert (facts.chats, facts.adapters) == (2, 3) and facts.ratings == 2
    store = Store(path)
    prefer(store)
    store.close()
    after = content(path)
    assert after != before
    (path.parent / "kv").mkdir()
    (path.parent / "kv" / "page").write_bytes(b"of a version that is gone")
    found, kept = restore(path, file)
    assert found == facts and content(path) == before and kept.name == "ruvmlx.db.before-restore-1"
    assert not list((path.parent / "kv").iterdir())
    _, again = restore(path, kept)
    assert content(path) == after and again.name == "ruvmlx.db.before-restore-2"
    assert sorted(p.name for p in path.parent.iterdir() if "new" in p.name or "-wal" in p.name) == []


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("replace", [False, True])
def test_a_log_beside_the_backup_is_no_part_of_it(path, tmp_path, ending, replace):
    """SQLite would replay the log of another database into the backup when somebody restores the backup."""
    file = tmp_path / "backup.db"
    if replace:
        back_up(path, file)
    log = tmp_path / f"backup.db{ending}"
    log.write_bytes(b"of another database")
    with pytest.raises(UsageError, match=f"^backup.db{ending} is beside the backup; [^\n]*$"):
        back_up(path, file, replace)
    assert log.exists() and file.exists() == replace


def test_the_store_before_a_restore_is_private(path, tmp_path):
    back_up(path, tmp_path / "backup.db")
    path.chmod(0o644)
    _, kept = restore(path, tmp_path / "backup.db")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_weights_that_grow_without_end_are_damaged(path, tmp_path):
    """A few bytes of a backup would become many in memory."""
    file = tmp_path / "backup.db"
    back_up(path, file)
    with sqlite3.connect(file) as db:
        bomb = zlib.compress(bytes(256 << 20), 1)
        db.execute("UPDATE adapters SET state = ?, packed = 1, source = 0", (bomb,))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile):
            restore(path, file)
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


def test_it_counts_what_the_user_sees_and_uses(path, tmp_path):
    """Not chats that were deleted or have no message, and not ratings or preferences that were taken back."""
    store = Store(path)
    prefer(store)
    with store.transaction():
        store.db.execute("UPDATE ratings SET in_force = 0 WHERE id = (SELECT max(id) FROM ratings)")
        store.db.execute("UPDATE preferences SET in_force = 0 WHERE id = (SELECT max(id) FROM preferences)")
    store.chats.new("m")
    hidden = store.chats.new("m")
    store.messages.add_user(hidden, "hello")
    store.chats.soft_delete(hidden)
    chats = len(store.chats.all())
    given = {name: store.db.value(f"SELECT count(*) FROM {name}") for name in ("ratings", "preferences")}
    rows = {name: store.db.rows(f"SELECT * FROM {name} WHERE in_force") for name in given}
    used = {
        "ratings": len({row["reply_id"] for row in rows["ratings"]}),
        "preferences": len({(row["better"], row["worse"]) for row in rows["preferences"]}),
    }
    assert used["ratings"] < len(rows["ratings"])  # those of a saved copy of an adapter count once
    assert all(used[name] < given[name] for name in given)
    assert chats < store.db.value("SELECT count(*) FROM sessions")
    store.close()
    facts = back_up(path, tmp_path / "backup.db")
    assert facts.chats == chats and {name: getattr(facts, name) for name in used} == used


def test_into_an_empty_folder_and_from_an_older_format(path, tmp_path):
    old = tmp_path / "old.db"
    old.write_bytes(gzip.decompress((DATA / "store_v3.db.gz").read_bytes()))
    bytes_before = old.read_bytes()
    fresh = tmp_path / "other" / "ruvmlx.db"
    facts, kept = restore(fresh, old)
    assert kept is None and facts.ratings and old.read_bytes() == bytes_before
    store = Store(fresh)
    assert disagreement(store) == "" and store.replies.get("r1").text == "answer r1"
    store.close()


def writing(path, ready, stop) -> None:
    store, n = Store(path), 0
    chat = store.chats.new("tiny")
    while not stop.is_set():
        store.messages.add_user(chat, f"message {n}" * 50)
        n += 1
        ready.set()
    store.close()


def test_while_another_process_writes(path, tmp_path):
    """Each copy is of one moment: it passes every check, and later copies hold more."""
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=writing, args=(path, ready, stop))
    process.start()
    try:
        assert ready.wait(60)
        counts = [back_up(path, tmp_path / "b.db", replace=True).messages for _ in range(20)]
        assert counts == sorted(counts) and counts[-1] > counts[0]
        with pytest.raises(StoreBusy, match="in use by another ruvmlx"):
            restore(path, tmp_path / "b.db")
    finally:
        stop.set()
        process.join(60)
    total = json.loads(content(path))
    assert total and restore(path, tmp_path / "b.db")[0].messages == counts[-1]


def test_what_cannot_be_done_is_one_line(path, tmp_path):
    file = tmp_path / "b.db"
    back_up(path, file)
    text, other, newer = tmp_path / "text", tmp_path / "other.db", tmp_path / "newer.db"
    text.write_text("no database " * 100)
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    newer.write_bytes(file.read_bytes())
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    before = content(path)
    refused = [
        (UsageError, lambda: back_up(path, file)),
        (UsageError, lambda: back_up(path, path, replace=True)),
        (UsageError, lambda: back_up(path, tmp_path / "none" / "b.db")),
        (NotFound, lambda: back_up(tmp_path / "none.db", tmp_path / "c.db")),
        (NotFound, lambda: restore(path, tmp_path / "none.db")),
        (UsageError, lambda: restore(path, path)),
        (CorruptFile, lambda: restore(path, text)),
        (CorruptFile, lambda: restore(path, other)),
        (CorruptFile, lambda: restore(path, newer)),
    ]
    for kind, call in refused:
        with pytest.raises(kind) as error:
            call()
        assert "\n" not in str(error.value)
    assert content(path) == before
    assert sorted(p.name for p in tmp_path.iterdir() if ".new" in p.name) == []


@pytest.mark.parametrize("damage", ["page", "rating", "short"])
def test_a_damaged_backup_is_not_used(path, tmp_path, damage):
    file = tmp_path / "b.db"
    back_up(path, file)
    data = bytearray(file.read_bytes())
    if damage == "page":
        data[len(data) // 2 : len(data) // 2 + 4096] = os.urandom(4096)
    file.write_bytes(data[: len(data) // 2] if damage == "short" else data)
    if damage == "rating":
        with sqlite3.connect(file) as db:
            db.execute("UPDATE ratings SET rating = 'up', weight = 9")
    before = content(path)
    with pytest.raises(CorruptFile):
        restore(path, file)
    assert content(path) == before


@pytest.mark.parametrize(
    ("work", "call"),
    [
        ("back up", "open"),
        ("back up", "replace"),
        ("restore", "open"),
        ("restore", "link"),
        ("restore", "replace"),
    ],
)
def test_a_failing_disk_leaves_both_as_they_were(path, tmp_path, monkeypatch, work, call):
    file = tmp_path / "b.db"
    back_up(path, file)
    store = Store(path)
    store.messages.add_user(store.chats.new("tiny"), "more")
    store.close()
    before, saved = content(path), file.read_bytes()

    def failing(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module.os, call, failing)
        with pytest.raises(RuvmlxError, match="No space left on device"):
            back_up(path, file, replace=True) if work == "back up" else restore(path, file)
    assert content(path) == before and file.read_bytes() == saved
    folders = path.parent, tmp_path
    assert {p.name for folder in folders for p in folder.iterdir()} == {"b.db", "home", "ruvmlx.db"}


def test_a_damaged_store_can_be_replaced(path, tmp_path):
    """The reason for most restores: the damaged file is kept, too."""
    file = tmp_path / "b.db"
    before = content(path)
    back_up(path, file)
    path.write_bytes(b"garbage" * 1000)
    _, kept = restore(path, file)
    assert kept.read_bytes() == b"garbage" * 1000 and content(path) == before


def test_a_version_in_the_backup_is_checked_against_the_log(path, tmp_path):
    with sqlite3.connect(path) as db:
        db.execute("UPDATE adapters SET state = x'00' WHERE fingerprint = ?", (MODEL,))
    with pytest.raises(CorruptFile, match="not as it was written"):
        back_up(path, tmp_path / "b.db")
    assert not (tmp_path / "b.db").exists()


def test_a_name_in_the_schema_that_is_no_text_is_one_line(path, tmp_path):
    """SQLite's message quotes it, and Python cannot decode that message. Found by tests/campaigns/fuzz.py."""
    back_up(path, tmp_path / "b.db")
    row = b"tablerepliesreplies"
    data = (tmp_path / "b.db").read_bytes().replace(row, b"table\xffepliesreplies")
    damaged = data.replace(b"CREATE TABLE replies", b"CREATE XABLE replies")
    assert damaged.count(b"XABLE") == data.count(b"\xffepliesreplies") == 1
    (tmp_path / "damaged.db").write_bytes(damaged)
    for use in (lambda: restore(tmp_path / "h" / "ruvmlx.db", tmp_path / "damaged.db"),
                lambda: Store(tmp_path / "damaged.db")):  # fmt: skip
        with pytest.raises(CorruptFile) as refused:
            use()
        assert "\n" not in str(refused.value)
