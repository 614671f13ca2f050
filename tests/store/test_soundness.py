"""What a backup from a stranger may hold, what a changed store may lack, and where a backup may go."""

import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from ruvmlx.errors import CorruptFile, NotFound, RuvmlxError, UsageError
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement
from ruvmlx.store.backup import back_up, restore

from .test_format import fill, prefer

FOREIGN = {
    "a trigger": "CREATE TRIGGER t AFTER UPDATE ON adapters BEGIN DELETE FROM ratings; END",
    "a trigger named like SQLite's": "CREATE TRIGGER sqliteXt AFTER INSERT ON witness BEGIN SELECT 1; END",
    "a view": "CREATE VIEW v AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT * FROM c",
    "a table": "CREATE TABLE t (x)",
    "an index over an expression": "CREATE INDEX i ON ratings(length(zeroblob(100000000)) + id)",
    "a column": "ALTER TABLE ratings ADD COLUMN more TEXT",
    "a computed column": "ALTER TABLE ratings ADD COLUMN more AS (length(zeroblob(100000000)))",
    "a table without its index": "DROP INDEX ratings_by_reply",
    "a log without its guards": "DROP TRIGGER witness_no_delete",
    "text in a number": "UPDATE sessions SET updated = 'yesterday'",
    "bytes in a text": "UPDATE messages SET content = x'00ff'",
    "a time beyond all calendars": "UPDATE sessions SET created = 1e18",
    "tokens of odd length": "UPDATE replies SET sampled_ids = x'0102'",
    "text that is not UTF-8": "UPDATE sessions SET title = CAST(x'ff41' AS TEXT)",
}
CHANGED = {
    "a version that is gone": "DELETE FROM adapters WHERE version = 1",
    "all versions gone": "DELETE FROM adapters",
    "a parent": "UPDATE adapters SET parent = parent + 1 WHERE version = 2",
    "a distance": "UPDATE adapters SET kl = kl + 1",
    "a norm": "UPDATE adapters SET norm = 0.125",
    "a time": "UPDATE adapters SET created = created - 1e6 WHERE version = 2",
    "the weights in use": "UPDATE adapters SET state = NULL WHERE (fingerprint, name, version) IN"
    " (SELECT fingerprint, name, version FROM adapter_heads)",
    "a rating that is gone": "DELETE FROM ratings WHERE id = 1",
    "all ratings gone": "DELETE FROM ratings",
    "a preference that is gone": "DELETE FROM preferences",
    "a base that is gone": "DELETE FROM bases",
    "the version in use unknown": "DELETE FROM adapter_heads",
    "a log row of another form": "",
}


@pytest.fixture
def path(tmp_path):
    store = Store(tmp_path / "home" / "ruvmlx.db")
    fill(store)
    prefer(store)
    store.close()
    return store.path


def execute(file: Path, sql: str) -> None:
    with sqlite3.connect(file, isolation_level=None) as db:
        db.execute(sql)
    db.close()


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_store_is_not_used(path, tmp_path, what):
    """Nothing of it runs, and it is not copied as if it were sound."""
    file = tmp_path / "b.db"
    back_up(path, file)
    execute(file, FOREIGN[what])
    with pytest.raises(CorruptFile) as error:
        restore(tmp_path / "other" / "ruvmlx.db", file)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert not (tmp_path / "other" / "ruvmlx.db").exists()
    execute(path, FOREIGN[what])
    with pytest.raises(CorruptFile):
        back_up(path, tmp_path / "c.db")


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_store_disagrees_with_its_log(path, tmp_path, what):
    file = tmp_path / "b.db"
    back_up(path, file)
    if CHANGED[what]:
        execute(file, CHANGED[what])
    else:
        _plant_a_row(file)
    with pytest.raises(CorruptFile, match="not as it was written"):
        restore(tmp_path / "other" / "ruvmlx.db", file)
    store = Store(file)
    assert disagreement(store)
    store.close()


def _plant_a_row(file: Path) -> None:
    store = Store(file)
    store.witness.note("version", {"deep": [[[]]]})
    store.close()


def test_what_may_be_gone_and_what_a_clock_may_do(path, monkeypatch):
    """An adapter that was removed and made anew, a copy, and a clock that was set back: the log agrees."""
    import time

    store = Store(path)
    model = store.adapters.all()[0].fingerprint
    name = store.adapters.all()[0].name
    now = time.time()
    store.adapters.copy(model, name, "copy")
    store.adapters.delete(model, name)
    for shift in (-1e6, 0.0, 3e5):
        monkeypatch.setattr(time, "time", lambda shift=shift: now + shift)
        monkeypatch.setattr(time, "time_ns", lambda shift=shift: int((now + shift) * 1e9))
        with store.transaction():
            store.versions.add(model, name, store.versions.head(model, name), b"weights", 0.0, 1.0)
    assert disagreement(store) == ""
    store.adapters.copy(model, name, "copy of it")
    assert disagreement(store) == ""
    store.close()


def test_the_version_before_a_time_is_one_before_all_that_was_made_since(path, monkeypatch):
    """Also if the clock was set back: in order of versions."""
    import time

    store, model = Store(path), "another model"
    for when in (1000.0, 2000.0, 3000.0, 500.0, 700.0):
        monkeypatch.setattr(time, "time", lambda when=when: when)
        monkeypatch.setattr(time, "time_ns", lambda when=when: int(when * 1e9))
        with store.transaction():
            store.versions.add(model, "a", store.versions.head(model, "a"), b"w", 0.0, 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: int(9000 * 1e9))
    store.adapters.copy(model, "a", "copy")
    for name in ("a", "copy"):  # the log has the copy's own changes only after the copy
        found = {when: store.versions.head_at(model, name, when) for when in (400, 1000, 1500, 2500, 5000)}
        assert found == {400: 0, 1000: 0, 1500: 1, 2500: 2, 5000: 5}
    store.adapters.delete(model, "copy")
    found = {when: store.versions.head_at(model, "a", when) for when in (400, 1000, 1500, 2500, 5000)}
    assert found == {400: 0, 1000: 0, 1500: 1, 2500: 2, 5000: 5}
    store.close()


def test_a_number_beyond_the_store(path):
    store = Store(path)
    for call in (
        lambda: store.versions.get("m", "a", 10**23),
        lambda: store.versions.move_head("m", "a", 10**23),
    ):
        with pytest.raises(NotFound, match="has no version"):
            call()
    with pytest.raises(UsageError, match="too large"):
        store.db.rows("SELECT ?", 10**23)
    store.close()


# -- where a backup may go ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "text", "link to a device", "dangling link"])
def test_replace_replaces_nothing_but_a_backup(path, tmp_path, kind):
    file = tmp_path / "target"
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "device":
            file = Path("/dev/null")
        case "folder":
            file.mkdir()
        case "text":
            file.write_text("a letter")
        case "link to a device":
            file.symlink_to("/dev/null")
        case "dangling link":
            file.symlink_to(tmp_path / "none")
    before = stat.S_IFMT(os.lstat(file).st_mode)
    for replace in (False, True):
        with pytest.raises(UsageError):
            back_up(path, file, replace)
    assert stat.S_IFMT(os.lstat(file).st_mode) == before


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
def test_no_backup_under_the_name_of_a_log(path, ending):
    with pytest.raises(UsageError, match="log of a store"):
        back_up(path, Path(f"{path}{ending}"), replace=True)


def test_many_backups_to_one_name(path, tmp_path):
    """One is first; the others say that the file exists, or replace it with a whole one."""
    file, said = tmp_path / "b.db", []

    def run(replace: bool) -> None:
        try:
            said.append(back_up(path, file, replace).messages)
        except RuvmlxError as error:
            said.append(str(error))

    for replace in (False, True):
        said.clear()
        threads = [threading.Thread(target=run, args=(replace,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        numbers = [one for one in said if isinstance(one, int)]
        assert len(numbers) == (6 if replace else 1) and len(said) == 6
        assert all("exists; choose another name" in one for one in said if isinstance(one, str))
    assert restore(tmp_path / "other" / "ruvmlx.db", file)[0].messages == numbers[0]
    assert [p.name for p in tmp_path.iterdir() if ".new" in p.name] == []


def test_what_a_killed_backup_left_is_gone_after_the_next(path, tmp_path):
    gone = 4194305  # a process number above any that exists
    for name in (f".b.db.{gone}.abc.new", f".b.db.{gone}.abc.new-wal"):
        (tmp_path / name).write_bytes(b"half")
    running = tmp_path / f".b.db.{os.getpid()}.abc.new"
    running.write_bytes(b"of a thread that is at work")
    back_up(path, tmp_path / "b.db")
    assert [p.name for p in tmp_path.iterdir() if ".new" in p.name] == [running.name]


def test_a_backup_of_a_disk_that_takes_nothing(path, tmp_path):
    """Shared memory cannot be made beside a log that holds rows, as on a disk that is full or read-only."""
    store = Store(path)
    store.messages.add_user(store.chats.new("tiny"), "in the log alone")
    folder = tmp_path / "disk"
    folder.mkdir()
    for ending in ("", "-wal"):
        (folder / f"ruvmlx.db{ending}").write_bytes(Path(f"{path}{ending}").read_bytes())
    rows = store.db.value("SELECT count(*) FROM messages")
    store.close()
    (folder / "ruvmlx.db-shm").mkdir()
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    assert back_up(folder / "ruvmlx.db", tmp_path / "b.db").messages == rows
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before


# -- disks that lack something ------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to see open files")
def test_a_large_sort_puts_no_words_into_the_folder_of_temporary_files(path):
    """With a full /tmp, the error was that the store's disk is full."""
    seen = set()

    def look(_):
        handles = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        seen.update(os.path.basename(os.path.realpath(handle)) for handle in handles)

    store = Store(path)
    store.db._connection.create_function("look", 1, look)
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9000)"
    sorted_rows = "SELECT i, zeroblob(1000) AS b FROM n ORDER BY b, i DESC"
    store.db.rows(f"{numbers} SELECT CASE WHEN i % 900 = 0 THEN look(i) END FROM ({sorted_rows})")
    assert path.name in seen and not [name for name in seen if name.startswith("etilqs")]
    store.close()


# -- others on this machine --------------------------------------------------------------------------


def test_files_that_others_could_read_are_made_private(path):
    store = Store(path)
    store.chats.new("tiny")
    for ending in ("", "-wal", "-shm"):
        os.chmod(f"{path}{ending}", 0o644)
    again = Store(path)
    modes = [stat.S_IMODE(os.stat(f"{path}{ending}").st_mode) for ending in ("", "-wal", "-shm")]
    assert modes == [0o600] * 3
    again.close()
    store.close()
