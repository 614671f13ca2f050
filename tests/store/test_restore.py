"""A restore gives exactly what the backup holds, whatever a killed process has left beside the store."""

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from ruvmlx.errors import RuvmlxError, StoreBusy, StoreError
from ruvmlx.store import Store
from ruvmlx.store import backup as module
from ruvmlx.store.audit import disagreement
from ruvmlx.store.backup import back_up, restore

from .test_backup import content
from .test_format import fill

ROWS = 400


@pytest.fixture
def backup_file(tmp_path):
    """A backup of a small store."""
    store = Store(tmp_path / "first" / "ruvmlx.db")
    fill(store)
    store.close()
    back_up(store.path, tmp_path / "backup.db")
    return tmp_path / "backup.db"


@pytest.fixture
def killed_store(backup_file, tmp_path):
    """A store that was killed under load: the rows since the backup are in its log alone."""
    folder = tmp_path / "home"
    folder.mkdir(exist_ok=True)
    shutil.copy(backup_file, tmp_path / "live.db")
    store = Store(tmp_path / "live.db")
    chat = store.chats.new("tiny", title="since the backup")
    for i in range(ROWS):
        store.messages.add_user(chat, f"message {i} " * 20)
    for ending in ("", "-wal", "-shm"):
        shutil.copy(tmp_path / f"live.db{ending}", folder / f"ruvmlx.db{ending}")
    store.close()
    assert (folder / "ruvmlx.db-wal").stat().st_size > 100_000
    return folder / "ruvmlx.db"


def _with(path: Path, change) -> None:
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data) or data)


def _link_elsewhere(path: Path) -> None:
    """The store is a link, and only the link's own name has the old log."""
    target = path.parent / "elsewhere.db"
    shutil.copy(path.parent.parent / "backup.db", target)
    path.unlink()
    path.symlink_to(target)


def _link_with_its_log(path: Path) -> None:
    target = path.parent / "elsewhere.db"
    for ending in ("", "-wal", "-shm"):
        os.rename(f"{path}{ending}", f"{target}{ending}")
    path.symlink_to(target)


def _link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "elsewhere.db")
    os.rename(f"{path}-wal", path.parent / "elsewhere.db-wal")


def _journal(path: Path) -> None:
    """A rollback journal of another database, that was not ended."""
    other = path.parent.parent / "other.db"
    with sqlite3.connect(other, isolation_level=None) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("CREATE TABLE t (x)")
        db.execute("INSERT INTO t VALUES (zeroblob(400000))")
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN")
        db.execute("UPDATE t SET x = randomblob(400000)")
        shutil.copy(f"{other}-journal", f"{path}-journal")
        db.execute("ROLLBACK")
    for ending in ("", "-wal", "-shm"):
        Path(f"{path}{ending}").unlink()


LEFT_BEHIND = {
    "as it was": lambda path: None,
    "moved away, as was advised": lambda path: path.rename(path.with_name("moved.db")),
    "removed with shared memory": lambda path: (path.unlink(), Path(f"{path}-shm").unlink()),
    "without shared memory": lambda path: Path(f"{path}-shm").unlink(),
    "truncated to half": lambda path: _with(path, lambda data: data[: len(data) // 2]),
    "truncated to a page": lambda path: _with(path, lambda data: data[:4096]),
    "empty": lambda path: path.write_bytes(b""),
    "another page size": lambda path: _with(path, lambda data: data.__setitem__(slice(16, 18), b"\x02\x00")),
    "an odd page size": lambda path: _with(path, lambda data: data.__setitem__(slice(16, 18), b"\x03\x07")),
    "no database": lambda path: path.write_bytes(b"garbage" * 1000),
    "a damaged page": lambda path: _with(path, lambda data: data.__setitem__(slice(5000, 9000), b"x" * 4000)),
    "a link": _link_elsewhere,
    "a link, with its log": _link_with_its_log,
    "a link to nothing": _link_to_nothing,
    "a rollback journal alone": _journal,
    "a rollback journal beside garbage": lambda path: (_journal(path), path.write_bytes(b"garbage" * 1000)),
}


@pytest.mark.parametrize("case", LEFT_BEHIND)
def test_no_old_log_is_replayed_into_what_is_restored(backup_file, killed_store, case):
    expected, log = content(backup_file), Path(f"{killed_store}-wal").read_bytes()
    LEFT_BEHIND[case](killed_store)
    was_there = killed_store.exists()
    _, kept = restore(killed_store, backup_file)
    assert content(killed_store) == expected
    store = Store(killed_store)
    assert store.integrity() == "ok" and disagreement(store) == "" and store.witness.check().broken is None
    store.close()
    if case == "as it was":  # SQLite has moved the log into it
        restore(killed_store, kept)
        assert f"message {ROWS - 1} " in content(killed_store)
    elif "moved" in case or "removed" in case:
        assert kept.read_bytes() == log and kept.name == "ruvmlx.db.before-restore-1-wal"
    else:
        assert kept.exists() and kept.name.endswith("-1") == was_there


def test_a_failure_after_the_logs_are_gone_brings_them_back(backup_file, killed_store, monkeypatch):
    """The store is elsewhere; with its log, somebody may recover chats."""
    killed_store.unlink()
    before = {
        path.name: path.read_bytes() for path in killed_store.parent.iterdir() if "shm" not in path.name
    }

    def failing(*_args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "publish", failing)
        with pytest.raises(RuvmlxError, match="No space left on device"):
            restore(killed_store, backup_file)
    assert {path.name: path.read_bytes() for path in killed_store.parent.iterdir()} == before


def test_a_store_that_appears_meanwhile_is_not_replaced(backup_file, tmp_path, monkeypatch):
    """Another process makes a store between the look and the new name."""
    path, publish = tmp_path / "fresh" / "ruvmlx.db", module.publish

    def late(fresh, name):
        Store(name).close()
        publish(fresh, name)

    monkeypatch.setattr(module, "publish", late)
    with pytest.raises(StoreBusy, match="in use by another"):
        restore(path, backup_file)
    assert Store(path).chats.ids() == set()


def test_the_cache_of_the_store_before_is_gone_first(backup_file, tmp_path, monkeypatch):
    """A crash after the exchange must leave no page of a version that a later one may be numbered like."""
    path = tmp_path / "home" / "ruvmlx.db"
    Store(path).close()
    (path.parent / "kv" / "folder").mkdir(parents=True)
    (path.parent / "kv" / "folder" / "page").write_bytes(b"x")
    seen = []
    replace = os.replace

    def replace_and_note(old, new):
        seen.append(list((path.parent / "kv").iterdir()))
        replace(old, new)

    monkeypatch.setattr(module.os, "replace", replace_and_note)
    restore(path, backup_file)
    assert seen == [[]]


def test_a_relative_path(backup_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts, kept = restore(Path("here") / "ruvmlx.db", Path("backup.db"))
    assert kept is None and facts.messages
    assert back_up(Path("here") / "ruvmlx.db", Path("again.db")).messages == facts.messages


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_store_that_is_no_file(backup_file, tmp_path, kind):
    """Nothing waits for a pipe."""
    path = tmp_path / "home" / "ruvmlx.db"
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    for call in (
        lambda: back_up(path, tmp_path / "b.db"),
        lambda: restore(path, backup_file),
        lambda: Store(path),
        lambda: Store(path, reading=True),
    ):
        with pytest.raises(StoreError, match="not an ordinary file"):
            call()


def test_a_folder_that_cannot_be_written_is_one_line_with_a_remedy(backup_file, tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(module, "file_beside", refuse)
    with pytest.raises(StoreError, match=r"Read-only file system\. Set RUVMLX_HOME to a folder you can"):
        restore(tmp_path / "home" / "ruvmlx.db", backup_file)
    with pytest.raises(StoreError, match=r"Read-only file system\. Give a file in another folder"):
        back_up(backup_file, tmp_path / "copy.ruvmlx")
