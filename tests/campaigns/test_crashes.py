"""A small sample of the campaign; crashes.py is the whole. Needs Linux and gcc."""

import errno
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import zlib
from pathlib import Path

import click
import pytest
from ruvmlx.apps.cli import cli

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.tiers import PAGE

from .crash_images import Disk, Op, Replay
from .crash_pages import KEPT, read_pages, write_pages, write_replies
from .crash_promises import BEGAN_DELETING, DELETED, RATED, STORED, broken_promises, tell
from .crash_sample import sample_calls
from .crash_trial import TrialResult
from .crash_verb_trials import error_text
from .crash_verbs import READS, WRITES, Verb

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("gcc"), reason="the shim needs Linux and gcc"
)
ROOT = Path(__file__).resolve().parents[2]
# Verbs of few calls, whose every call is tried; and of the others one after the other.
SHORT = ["connect", "completion", "serve, a", "serve --install", "chat, /as save", "config set, first"]


def campaign(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.campaigns.crashes", *words],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> list[str]:
    if isinstance(command, click.Group):
        return [name for key, inner in command.commands.items() for name in leaves(inner, (*path, key))]
    return [" ".join(path)]


def test_each_verb_of_the_command_line_is_in_one_of_the_tables():
    """A new verb that writes needs a row in WRITES."""
    with_rows = {name for verb in WRITES for name in (verb.name, " ".join(verb.words))}
    for name in leaves(cli):
        writes = any(row == name or row.startswith((f"{name} ", f"{name},")) for row in with_rows)
        assert writes != (name in READS), f"{name}: in WRITES {writes}, in READS {name in READS}"


def test_no_crash_leaves_a_short_verb_between_two_states(full):
    extent = ["--full"] if full else ["--kills", "99", "--faults", "3", "--images", "12"]
    done = campaign(*SHORT, *extent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_disk_without_locks_and_a_read_only_one_are_named():
    """The error names the folder and the remedy. Before, the error said "locked by another process" or
    "disk I/O error". `doctor` names them in its report."""
    verbs = ("a store of an older format", "doctor")
    done = campaign(*verbs, "--kills", "0", "--faults", "0", "--images", "0")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_report_counts_as_an_error_only_of_a_verb_that_writes_one():
    ended = TrialResult(1, "FAIL store  Read-only file system", "ruvmlx: 1 check failed", 0)
    assert "Read-only" in error_text(Verb("doctor", has_report=True), ended)
    assert error_text(Verb("rate"), ended) == "ruvmlx: 1 check failed"
    assert [verb.name for verb in WRITES if verb.has_report] == ["doctor"]


def test_a_stop_leaves_what_a_kill_leaves():
    """Slow verbs are stopped at each call of one run; the slow twin of a stop is a run that ends there."""
    done = campaign("sessions rename", "--compare", "--kills", "0", "--faults", "0", "--images", "0")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_no_crash_leaves_a_verb_between_two_states():
    done = campaign("--kills", "5", "--faults", "3", "--images", "5")
    assert done.returncode == 0, done.stdout + done.stderr


PLANTS = {
    "a lost fsync": ("os.fsync(handle)", "pass"),
    "a rename before the write": (
        '        with open(fresh, "wb") as file:\n            yield file\n',
        '        os.replace(fresh, path)\n        with open(path, "wb") as file:\n            yield file\n',
    ),
    "an unfinished file": ("    remove_abandoned(path.parent, path.name)\n", ""),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "a lost fsync" else pytest.mark.full) for n in PLANTS]
)
def test_a_planted_mistake_is_found(name, tmp_path):
    """The mistake is in a copy of the tree's one file that writes new files."""
    wrong, right = PLANTS[name][1], PLANTS[name][0]
    source = (ROOT / "ruvmlx/platform/files.py").read_text()
    assert right in source
    (tmp_path / "planted.py").write_text(source.replace(right, wrong))
    done = campaign("completion install", "--kills", "99", "--faults", "0", "--images", "40",
                    RUVMLX_PLANTED=str(tmp_path / "planted.py"))  # fmt: skip
    words = {"a lost fsync": "the verb was done, but", "an unfinished file": "left behind"}
    assert done.returncode == 1 and words.get(name, "neither the old nor the new") in done.stdout


# -- the sample of calls ------------------------------------------------------------------------------


@pytest.mark.parametrize(("calls", "count"), [(7, 7), (101, 40), (101, 9), (13, 1), (5, 99), (11, 0)])
def test_a_sample_has_the_calls_that_matter_and_few_others(calls, count):
    """The slow twin of the choice: what must be in it, by counting."""
    ops = [op("WSWWRWU"[i % 7]) for i in range(calls)]
    chosen = sample_calls(random.Random(3), ops, calls, count)
    weighty = {i for i in range(calls) if "WSWWRWU"[i % 7] in "SRU"}
    assert chosen == sorted(set(chosen)) and len(chosen) == min(count, calls)
    assert weighty <= set(chosen) if count >= len(weighty) else set(chosen) <= weighty


def test_a_sample_of_a_run_whose_calls_are_not_known_is_spread_evenly():
    chosen = sample_calls(random.Random(3), [op("S")], 100, 10)
    assert chosen == list(range(chosen[0], 100, 10)) and len(chosen) == 10


# -- the promises to a client ------------------------------------------------------------------------


def test_a_promise_that_the_store_does_not_keep_is_found(home, capfd):
    """The store has the responses a and b and a rating of a; the client was told more than that."""
    from ruvmlx.store import Store

    path = home / "ruvmlx.db"
    Store(path).close()
    db = sqlite3.connect(path)
    db.executemany("INSERT INTO responses VALUES (?, NULL, '', 1, 1, '', '', '')", [("a",), ("b",)])
    db.execute("INSERT INTO ratings VALUES (1, '', 'default', 1, 'a', 'up', '', 1, 1, 1)")
    db.commit()
    db.close()
    for what, name in [
        (STORED, "a"),
        (RATED, "a"),
        (BEGAN_DELETING, "b"),
        (STORED, "c"),
        (BEGAN_DELETING, "c"),
    ]:
        tell(what, name)
    assert broken_promises(capfd.readouterr().out, path) == []
    for what, name in [(STORED, "d"), (RATED, "b"), (BEGAN_DELETING, "a"), (DELETED, "a")]:
        tell(what, name)
    found = broken_promises(capfd.readouterr().out, path)
    assert [line.split()[5:8:2] for line in found] == [["d", "stored,"], ["b", "rated,"], ["a", "deleted,"]]
    assert broken_promises("told nothing", home / "missing.db") == []


# -- the page store ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_backend(tiny):
    return NativeBackend(tiny, threads=1)


def test_a_wrong_page_of_the_page_store_is_found(open_tiny, home):
    """The next start reads the pages. A page with other numbers and a right checksum changes the reply."""
    write_pages(open_tiny)
    cached, _ = write_replies(KEPT, open_tiny)
    assert min(cached) >= 2 * PAGE and read_pages(open_tiny) == []
    write_pages(open_tiny)  # the reading without a page store has removed it
    for file in (home / "kv").glob("*.hot"):
        data = bytearray(file.read_bytes()[:-4])
        data[-4000::2] = bytes(2000)
        file.write_bytes(data + zlib.crc32(data).to_bytes(4, "little"))
    assert len(read_pages(open_tiny)) == 2


# -- the images --------------------------------------------------------------------------------------


def op(kind: str, inode: int = 0, path: str = "", other: str = "", data: bytes = b"", offset: int = 0) -> Op:
    return Op(kind.encode(), inode, offset, path, other, data)


def images_of(ops: list[Op], count: int = 400) -> set[tuple[bool, str]]:
    base = Disk({"a": 0}, {0: bytearray(b"old")})
    made = Replay(base, {1: 0}, ops).images(count, seed=0)
    return {
        (
            done,
            json.dumps({name: bytes(disk.contents.get(n, b"")).decode() for name, n in disk.names.items()}),
        )
        for done, disk in made
    }


def test_images_of_a_file_that_is_replaced_with_all_its_fsyncs():
    """The old file or the new one under the name; after the end only the new one."""
    ops = [
        op("C", 2, "b"), op("W", 2, "b", data=b"new"), op("S", 2, "b"),
        op("R", 2, "b", "a"), op("S", 9, ""),
    ]  # fmt: skip
    found = images_of(ops)
    assert {json.loads(text)["a"] for _, text in found} == {"old", "new"}
    assert {text for done, text in found if done} == {'{"a": "new"}'}


def test_images_of_a_file_that_is_replaced_before_its_data_are_there():
    ops = [op("C", 2, "b"), op("W", 2, "b", data=b"new"), op("R", 2, "b", "a"), op("S", 9, "")]
    assert {json.loads(text)["a"] for _, text in images_of(ops)} >= {"old", "new", "", "n"}


def test_images_of_writes_without_an_fsync_between():
    """Any subset: the later write without the earlier one, too."""
    ops = [op("W", 1, "a", data=b"X"), op("W", 1, "a", data=b"YZ", offset=3), op("s", 1, "a")]
    found = {json.loads(text)["a"] for _, text in images_of(ops)}
    assert found == {"old", "Xld", "oldY", "oldYZ", "XldY", "XldYZ"}


def test_images_of_exchanged_folders_and_lost_ones():
    ops = [
        op("M", 5, "d"), op("C", 2, "d/b"), op("W", 2, "d/b", data=b"in"), op("S", 2, "d/b"), op("S", 5, "d"),
        op("R", 5, "d", "e"), op("S", 9, ""),
    ]  # fmt: skip
    names = {tuple(json.loads(text)) for done, text in images_of(ops) if done}
    assert names == {("a", "e", "e/b")}


# -- what the campaign found -------------------------------------------------------------------------


def test_a_new_file_never_has_two_names(tmp_path, monkeypatch):
    """A kill between the link and the unlink left the temporary name for good."""
    from ruvmlx.platform import files

    monkeypatch.setattr(os, "link", lambda *a: pytest.fail("two names"))
    with files.file_beside(tmp_path / "a") as fresh:
        fresh.write_text("words")
        files.publish(fresh, tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(FileExistsError), files.file_beside(tmp_path / "a") as fresh:
        files.publish(fresh, tmp_path / "a")
    assert (tmp_path / "a").read_text() == "words" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_file_where_a_rename_always_replaces(tmp_path, monkeypatch, has_links):
    from ruvmlx.platform import files

    def refuse(*paths):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(files, "_rename", lambda *a: errno.EINVAL)
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    with files.file_beside(tmp_path / "a") as fresh:
        fresh.write_text("words")
        files.publish(fresh, tmp_path / "a")
    with pytest.raises(FileExistsError), files.file_beside(tmp_path / "a") as fresh:
        files.publish(fresh, tmp_path / "a")
    assert (tmp_path / "a").read_text() == "words" and os.listdir(tmp_path) == ["a"]


def test_undo_of_a_client_file_goes_on_after_a_kill(tmp_path):
    """The file was put back, its record was still there: the undo complained of a changed file."""
    from ruvmlx.apps.cli.written_files import put_back, write_over

    file, record = tmp_path / "client.json", tmp_path / "record.json"
    file.write_text("mine")
    write_over(file, "ours", record)
    kept = record.read_text()
    put_back(record)
    record.write_text(kept)
    assert put_back(record) == file
    assert file.read_text() == "mine" and not record.exists()


def test_the_next_start_removes_unfinished_files_in_all_folders(tmp_path, home):
    """Roles, client files and pages of a killed process stayed."""
    from ruvmlx.chats import soft_delete
    from ruvmlx.kv.disk import CacheFolder
    from ruvmlx.store import Store

    ended = subprocess.Popen(["true"])
    ended.wait()
    for name in ("roles", "connected", "kv"):
        (home / name).mkdir(parents=True)
    names = ("roles/.cook.md.{}.abcdefgh.new", "connected/.c.json.{}.abcdefgh.new", "kv/00.page.{}.new")
    left = [home / name.format(ended.pid) for name in names]
    own = home / f"kv/00.page.{os.getpid()}.new"
    for path in (*left, own):
        path.touch()
    store = Store(home / "ruvmlx.db")
    soft_delete.tidy(store, CacheFolder.of_store(store.path, 1 << 20))
    store.close()
    assert [path.name for path in (*left, own) if path.exists()] == [own.name]


def test_a_folder_inside_a_new_data_folder_leaves_both_private(tmp_path):
    """`connect --write` and /as, as the first things of all, left the data folder open to others."""
    from ruvmlx.platform.files import make_folder

    make_folder(tmp_path / "home" / "roles")
    make_folder(tmp_path / "home" / "roles")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "home", tmp_path / "home" / "roles")] == [
        0o700
    ] * 2


def test_a_journal_that_a_killed_restore_left_is_removed(home):
    from ruvmlx.store import Store

    Store(home / "ruvmlx.db").close()
    (home / "ruvmlx.db-journal").write_bytes(bytes(512))
    Store(home / "ruvmlx.db").close()
    assert os.listdir(home) == ["ruvmlx.db"]
