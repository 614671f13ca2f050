"""This module makes a complete copy of the store, even while other processes write, and restores a copy.

SQLite's backup copies the state of one moment. The module checks the copy before the copy gets its name: the
tables, the whole file, and every version, rating and preference against the witness log.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptFile, NotFound, StoreBusy, StoreError, UsageError
from ..platform.files import NO_LINKS, file_beside, make_folder, open_ordinary, publish, sync_folder
from ..text import one_line
from .audit import disagreement
from .database import folder_error, is_locked, open_unchanged
from .schema import VERSION
from .soundness import difference
from .store import Store

_LOGS = ("-wal", "-shm", "-journal")  # the endings of the names of files that SQLite puts beside a database
_MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True)
class BackupFacts:
    """The contents of a copy of the store.

    bytes: the size of the file
    chats: the chats that the user can see: they have a message and are not deleted
    ratings, preferences: those in force; one that several adapters have counts once
    """

    file: str
    bytes: int
    chats: int
    messages: int
    replies: int
    ratings: int
    preferences: int
    adapters: int


def back_up(store: Path, file: Path, replace: bool = False) -> BackupFacts:
    """Copy the store to a new file, or replace an existing backup. If the backup fails, an existing backup
    file does not change.

    Raises NotFound if there is no store, UsageError if the file exists and `replace` is False, and
    CorruptFile if the copy is damaged.
    """
    if not store.exists():
        raise NotFound(f"there is nothing to back up: {store} does not exist.")
    _check_ordinary(store)
    with _writing(file, "Give a file in another folder."):
        _check_target(file, store, replace)
        with file_beside(file) as fresh:
            facts = _copy_database(store, fresh)
            if replace:
                os.replace(fresh, file)
                sync_folder(file.parent)
            else:
                publish(fresh, file)
    return BackupFacts(str(file), file.stat().st_size, **facts)


def restore(store: Path, file: Path) -> tuple[BackupFacts, Path | None]:
    """Put a copy of a backup in the place of the store. Returns the contents of the backup, and the new path
    of the old store: the database, or its log if there was only a log; None: there was no store.

    No other process must use the data folder during the restore. If the restore fails, the store keeps its
    content, but the KV caches on disk can be gone. Raises NotFound if `file` does not exist, CorruptFile if
    `file` is not a valid backup, and StoreBusy while another process uses the store.
    """
    if not file.is_file():
        raise NotFound(f"there is no file {file}; name one that `ruvmlx backup` wrote.")
    if store.exists() and file.samefile(store):
        raise UsageError(f"{file} is the store itself; choose a backup.")
    store = store.resolve()
    if store.exists():
        _check_ordinary(store)
    with _writing(store, "Set RUVMLX_HOME to a folder you can write."):
        make_folder(store.parent)
        with file_beside(store) as fresh:
            facts = _copy_database(file, fresh)
            try:
                with _lock_store(store):
                    kept = _exchange(store, fresh)
            except FileExistsError:  # another process has made a store in the meantime
                raise _in_use(store) from None
    return BackupFacts(str(file), store.stat().st_size, **facts), kept


# -- file checks -------------------------------------------------------------------------------------


def _check_ordinary(store: Path) -> None:
    if not store.is_file():
        raise StoreError(f"{store} is not an ordinary file, so it is no store. Move it away.")


def _check_target(file: Path, store: Path, replace: bool) -> None:
    """Raise UsageError if a backup must not be written to this file, for example because the file exists.
    With `replace`, an existing file can be replaced only if it is an SQLite database, but not the store
    itself."""
    if file.name.endswith(_LOGS):
        raise UsageError(f"{file.name} ends like the log of a store; choose another name.")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}; make it first.")
    if os.path.lexists(file) and not replace:
        raise UsageError(f"{file} exists; choose another name, or give --replace.")
    if file.exists() and file.samefile(store):
        raise UsageError(f"{file} is the store itself; choose another name.")
    if os.path.lexists(file) and not _is_database(file):
        raise UsageError(f"{file} is not a backup, so it is not replaced; choose another name.")
    for ending in _LOGS:
        if os.path.lexists(f"{file}{ending}"):  # SQLite would read the log as a part of the backup
            raise UsageError(
                f"{file.name}{ending} is beside the backup; it is the log of another database. Move the log "
                "away, or choose another name."
            )


def _is_database(file: Path) -> bool:
    if not file.is_file():
        return False
    with open_ordinary(file) as opened:
        return opened.read(len(_MAGIC)) == _MAGIC


@contextmanager
def _writing(file: Path, advice: str) -> Iterator[None]:
    """Turn errors of the file system in the block into errors of the program. advice: what the error tells
    the user to do if the file cannot be written."""
    try:
        yield
    except FileExistsError:  # another process was faster
        raise UsageError(f"{file} exists; choose another name, or give --replace.") from None
    except OSError as error:
        raise StoreError(f"cannot write {file}: {error.strerror}. {advice}") from None


# -- copying -----------------------------------------------------------------------------------------


def _copy_database(source: Path, target: Path) -> dict[str, int]:
    """Copy one database to another, check the copy, and count its contents."""
    with _readable_errors(source, target), _opened_source(source) as old, _open_database(target, "") as new:
        version = old.execute("PRAGMA user_version").fetchone()[0]
        if not 0 < version <= VERSION:
            raise CorruptFile(f"{source} is not a store of this ruvmlx (format {version}).")
        old.backup(new)
        new.execute("PRAGMA journal_mode = DELETE")  # the copy must be one file, without a log
        # Check the tables first, because SQLite's own check runs SQL expressions that the file defines.
        damage = difference(new, version) or _damage(new)
    if damage:
        raise CorruptFile(f"{source} is damaged: {damage}. Nothing was written.")
    return _check_copy(target, source)


def _damage(database: sqlite3.Connection) -> str:
    found = one_line(str(database.execute("PRAGMA integrity_check(1)").fetchone()[0]))[:200]
    return "" if found == "ok" else found


def _check_copy(copy: Path, source: Path) -> dict[str, int]:
    """Bring the copy of the store to the newest format, compare the copy with its witness log, and return the
    number of rows of each kind."""
    store = Store(copy)
    try:
        chain = store.witness.check()
        if wrong := chain.why or disagreement(store):
            raise CorruptFile(
                f"{source} is not as it was written: {one_line(wrong)[:200]}. "
                "`ruvmlx doctor` checks the store."
            )
        # a saved copy of an adapter has its own rows of the ratings and preferences
        counts = {
            "messages": "count(*) FROM messages", "replies": "count(*) FROM replies",
            "adapters": "count(*) FROM adapter_heads",
            "ratings": "count(DISTINCT reply_id) FROM ratings WHERE in_force",
            "preferences": "count(*) FROM (SELECT DISTINCT better, worse FROM preferences WHERE in_force)",
        }  # fmt: skip
        found = {"chats": len(store.chats.all())}
        found |= {name: store.db.value(f"SELECT {rows}") for name, rows in counts.items()}
    finally:
        store.close()
    with _readable_errors(source, copy), _open_database(copy, "") as alone:
        alone.execute("PRAGMA journal_mode = DELETE")
    return found


@contextmanager
def _readable_errors(source: Path, target: Path) -> Iterator[None]:
    """Turn SQLite's errors in the block into errors with one line of text, about the disk or about the file
    to copy."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if found := folder_error(error, target, source):
            raise found from None
        if is_locked(error):
            raise StoreBusy(f"{source} is locked by another process; try again.") from None
        raise StoreError(f"cannot copy {source}: {error}. Check the disk; nothing was changed.") from None
    # the text of a damaged schema can hold any bytes
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{source} is damaged, or no store of ruvmlx: {one_line(str(error))}.") from None


@contextmanager
def _open_database(file: Path, options: str) -> Iterator[sqlite3.Connection]:
    uri = f"{file.absolute().as_uri()}{options}"
    connection = sqlite3.connect(uri, uri=True, timeout=5, isolation_level=None)
    connection.text_factory = _text
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        yield connection
    finally:
        connection.close()


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


@contextmanager
def _opened_source(source: Path) -> Iterator[sqlite3.Connection]:
    """Open the database to copy. The disk of the database can be full or read-only."""
    with _open_database(source, "?mode=ro") as connection:
        try:
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except sqlite3.OperationalError as error:
            unchanged = None if is_locked(error) else open_unchanged(source)
            if unchanged is None:
                raise
        else:
            yield connection
            return
    try:
        yield unchanged
    finally:
        unchanged.close()


# -- the exchange ------------------------------------------------------------------------------------


@contextmanager
def _lock_store(store: Path) -> Iterator[None]:
    """Keep every other process out of the store, if the store exists and is a valid database."""
    if not store.exists():
        yield
        return
    with _open_database(store, "") as connection:
        try:
            # this statement fails while another process has the store open
            connection.execute("PRAGMA journal_mode = DELETE").fetchone()
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if found := folder_error(error, store):
                raise found from None
            if not is_locked(error):
                raise StoreError(f"cannot write {store}: {error}. Check the disk.") from None
            raise _in_use(store) from None
        except sqlite3.DatabaseError:  # the store can be damaged, which can be the reason for the restore
            connection.close()
        yield


def _in_use(store: Path) -> StoreBusy:
    return StoreBusy(f"{store} is in use by another ruvmlx; end it (chats and servers, too), then restore.")


def _exchange(store: Path, fresh: Path) -> Path | None:
    """Put the new file in place of the store. Returns the new path of the old store.

    SQLite would replay a log that it finds beside the new file. To prevent this, the logs of the old store
    are moved first.
    """
    found = [ending for ending in ("", "-wal", "-journal") if os.path.lexists(f"{store}{ending}")]
    kept = _free_name(store)
    try:
        for ending in found:
            _name_again(Path(f"{store}{ending}"), Path(f"{kept}{ending}"))
            with suppress(PermissionError):  # the file system has no access modes
                os.chmod(f"{kept}{ending}", 0o600)
        sync_folder(store.parent)
        # remove all stored KV caches, because some belong to adapter versions that are newer than the backup,
        # and new versions will get the same numbers
        _clear(store.parent / "kv")
        for ending in _LOGS:
            Path(f"{store}{ending}").unlink(missing_ok=True)
        sync_folder(store.parent)
        if "" in found:
            os.replace(fresh, store)
            sync_folder(store.parent)
        else:
            publish(fresh, store)
    except OSError:
        _take_back(store, kept, found)
        raise
    return Path(f"{kept}{found[0]}") if found else None


def _take_back(store: Path, kept: Path, found: list[str]) -> None:
    """Undo the work of `_exchange`, as far as the disk allows. If there was only a log without a store, and a
    store is there now, the log is not moved back."""
    if "" not in found and store.exists():
        return
    for ending in found:
        if os.path.lexists(f"{store}{ending}"):
            Path(f"{kept}{ending}").unlink(missing_ok=True)
        else:
            os.rename(f"{kept}{ending}", f"{store}{ending}")


def _free_name(store: Path) -> Path:
    """Return a file name that is not in use, to which the old store can be moved."""
    number = 1
    while True:
        kept = store.with_name(f"{store.name}.before-restore-{number}")
        if not any(os.path.lexists(f"{kept}{ending}") for ending in ("", *_LOGS)):
            return kept
        number += 1


def _name_again(file: Path, name: Path) -> None:
    """Give a file a second name. If the file system has no links, copy the file."""
    try:
        os.link(file, name)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copy2(file, name)


def _clear(folder: Path) -> None:
    """Remove all contents of a folder. Do nothing if the folder does not exist."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
