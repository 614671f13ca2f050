"""A copy of the store that is whole, even while other processes write; and the way back.

SQLite's backup copies the state of one moment. The copy is checked before it gets its name: the whole file,
and every version, rating and preference against the witness log.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptFile, NotFound, RuvmlxError, StoreBusy, UsageError
from ..platform.files import synced_folder
from .audit import disagreement
from .schema import VERSION
from .store import Store

_FILES = ("", "-wal", "-shm", "-journal")  # of one database


@dataclass(frozen=True)
class BackupFacts:
    """What a copy of the store holds. bytes: of the file."""

    file: str
    bytes: int
    chats: int
    messages: int
    replies: int
    ratings: int
    preferences: int
    adapters: int


def back_up(store: Path, file: Path, replace: bool = False) -> BackupFacts:
    """Copy the store to a new file, or in place of an existing one. A failure leaves that as it was.

    NotFound without a store, UsageError if the file is there, CorruptFile if the copy is damaged.
    """
    if not store.exists():
        raise NotFound(f"there is nothing to back up: {store} does not exist.")
    if file.exists() and not replace:
        raise UsageError(f"{file} exists; choose another name, or give --replace.")
    if file.exists() and file.samefile(store):
        raise UsageError(f"{file} is the store itself; choose another name.")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}; make it first.")
    with _fresh(file) as fresh:
        facts = _copied(store, fresh)
        os.replace(fresh, file)
        synced_folder(file.parent)
    return BackupFacts(str(file), file.stat().st_size, **facts)


def restore(store: Path, file: Path) -> tuple[BackupFacts, Path | None]:
    """Use a backup as the store. Returns what it holds, and where the store of before is now.

    The data folder must not be in use. A failure leaves the store as it was. NotFound if there is no such
    file, CorruptFile if it is no sound backup, StoreBusy while another process uses the store.
    """
    if not file.is_file():
        raise NotFound(f"there is no file {file}.")
    if store.exists() and file.samefile(store):
        raise UsageError(f"{file} is the store itself; choose a backup.")
    store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _fresh(store) as fresh:
        facts = _copied(file, fresh)
        with _alone(store) as in_use:
            kept = _put_aside(store) if in_use else None
            try:
                os.replace(fresh, store)
            except OSError:
                if kept:
                    kept.unlink()
                raise
            synced_folder(store.parent)
        for cached in (store.parent / "kv").glob("*"):  # of versions that a later one may be numbered like
            cached.unlink(missing_ok=True)
    return BackupFacts(str(file), store.stat().st_size, **facts), kept


@contextmanager
def _fresh(file: Path) -> Iterator[Path]:
    """A name beside the file, for a database that is made there; nothing is left of it afterwards."""
    fresh = file.with_name(f".{file.name}.new")
    try:
        _remove(fresh)
        os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield fresh
    except OSError as error:
        raise RuvmlxError(f"cannot write {file}: {error.strerror}.") from None
    finally:
        _remove(fresh)


def _remove(file: Path) -> None:
    for ending in _FILES:
        Path(f"{file}{ending}").unlink(missing_ok=True)


def _copied(source: Path, target: Path) -> dict[str, int]:
    """Copy one database to another, check the copy, and count what is in it."""
    try:
        with _opened(f"{source.resolve().as_uri()}?mode=ro") as old, _opened(target.as_uri()) as new:
            version = old.execute("PRAGMA user_version").fetchone()[0]
            if not 0 < version <= VERSION:
                raise CorruptFile(f"{source} is not a store of this ruvmlx (format {version}).")
            old.backup(new)
            new.execute("PRAGMA journal_mode = DELETE")  # one file
            damage = new.execute("PRAGMA integrity_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise StoreBusy(f"{source} is locked by another process; try again.") from None
        raise CorruptFile(f"{source} cannot be copied as a store: {error}.") from None
    if damage != "ok":
        raise CorruptFile(f"{source} is damaged: {damage}. Nothing was written.")
    return _checked(target, source)


def _checked(copy: Path, source: Path) -> dict[str, int]:
    """Compare the copy, brought to the newest format, with its witness log."""
    store = Store(copy)
    try:
        chain = store.witness.check()
        if wrong := chain.why or disagreement(store):
            raise CorruptFile(
                f"{source} is not as it was written: {wrong}. `ruvmlx doctor` checks the store."
            )
        counts = {
            "chats": "sessions WHERE deleted IS NULL", "messages": "messages", "replies": "replies",
            "ratings": "ratings", "preferences": "preferences", "adapters": "adapter_heads",
        }  # fmt: skip
        found = {name: store.db.value(f"SELECT count(*) FROM {table}") for name, table in counts.items()}
    finally:
        store.close()
    with _opened(copy.as_uri()) as alone:
        alone.execute("PRAGMA journal_mode = DELETE")
    return found


@contextmanager
def _opened(uri: str) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(uri, uri=True, timeout=5, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def _alone(store: Path) -> Iterator[bool]:
    """Keep every other process out of the store, which is one file inside; False if there is none."""
    if not store.exists():
        yield False
        return
    try:
        with _opened(store.resolve().as_uri()) as connection:
            connection.execute("PRAGMA journal_mode = DELETE").fetchone()  # locked while another has it open
            connection.execute("BEGIN EXCLUSIVE")
            yield True
    except sqlite3.OperationalError:
        raise StoreBusy(
            f"{store} is in use by another ruvmlx; end it (chats and servers, too), then restore."
        ) from None
    except sqlite3.DatabaseError:  # damaged, perhaps the reason to restore
        yield True


def _put_aside(store: Path) -> Path:
    """Give the store a second name, under which it stays."""
    names = (store.with_name(f"{store.name}.before-restore-{n}") for n in range(1, 10_000))
    kept = next(name for name in names if not name.exists())
    os.link(store, kept)
    return kept
