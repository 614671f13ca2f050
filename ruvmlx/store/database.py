"""This module opens one SQLite file whose data is on the disk after every commit.

The database uses WAL with synchronous=FULL (and F_FULLFSYNC on macOS). When a call that writes returns, its
data is therefore on the disk.
"""

import os
import random
import sqlite3
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptFile, StoreBusy, StoreError, UsageError
from ..platform.files import NO_LOCKS, folder_fault, make_folder
from .schema import VERSION, migrate
from .soundness import difference

# SQLite reports these errors if the store's folder is read-only, or if its files cannot be locked. The errors
# can also have other causes.
_OF_FOLDERS = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
)  # fmt: skip
COPY_EVERY = 8  # a reply and its rating write up to 100 pages, and SQLite copies the log at 1,000 pages
# seconds: if one other process keeps the write lock longer than this, the wait for the lock fails
_BUSY_SECONDS = 5.0
# seconds: if many other processes pass the lock to each other for this time, the wait for the lock fails
_WAIT_SECONDS = 60.0
_REMEDY = (
    "Use a backup: `ruvmlx restore FILE`. Or start afresh: move it away, with the files -wal and -shm beside "
    "it, and keep them all if you want to recover chats."
)
# the minimum and maximum seconds between two tries to take the write lock; the pause is random
_PAUSE_SECONDS = 0.001, 0.004
# A value of more bytes is written through a blob handle. SQLite copies each value that a statement gets.
# Python keeps the statement with these copies for the next call.
_MAX_BOUND_BYTES = 1 << 16


class Database:
    """A Database is a connection to one SQLite file. Only the thread that opened the connection can use it. A
    caller reads the columns of a row by their names."""

    def __init__(self, path: Path, reading: bool = False):
        """reading: True if the caller only reads. In this case a disk that is full or read-only causes no
        error, if the file has the format VERSION."""
        self.path = path
        self._calls = 0  # of `copy_log_early`
        try:
            self._connection = self._open()
        except StoreBusy:
            raise
        except StoreError:
            found = _read_only(path) if reading else None
            if found is None:
                raise
            self._connection = found
        self._connection.row_factory = sqlite3.Row

    def _open(self) -> sqlite3.Connection:
        with _readable_errors(self.path):
            _make_private(self.path)
            connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
            try:
                self._configure(connection)
                migrate(connection)
                _remove_old_journal(connection, self.path)
            except BaseException:
                connection.close()
                raise
        return connection

    def _configure(self, connection: sqlite3.Connection) -> None:
        # SQLite then keeps its temporary tables in memory. So a full folder /tmp makes no statement fail, and
        # SQLite writes no text of a chat to that folder.
        pragmas = ["temp_store = MEMORY", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"]
        pragmas += ["secure_delete = ON"]
        if sys.platform == "darwin":
            pragmas += ["fullfsync = ON", "checkpoint_fullfsync = ON"]
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    def close(self) -> None:
        self._connection.close()

    # -- transactions --------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Take the write lock before the block. After the block, commit everything that the block wrote, or
        nothing if the block raised an error. Inside another transaction, the block is a part of that
        transaction."""
        if self.in_transaction:
            yield
            return
        with _readable_errors(self.path):
            self._begin_writing()
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _begin_writing(self) -> None:
        """Take the write lock. Raises an error if one process keeps the lock, or if many processes pass the
        lock to each other for too long.

        SQLite itself waits up to 100 ms between two tries to take the lock. With these long pauses, a process
        that has waited long would lose the lock to processes that come later.
        """
        began = changed = time.monotonic()
        commits = self._commits_of_others(0)
        self._connection.execute("PRAGMA busy_timeout = 0")
        try:
            while not self._has_begun(time.monotonic() > min(changed + _BUSY_SECONDS, began + _WAIT_SECONDS)):
                time.sleep(random.uniform(*_PAUSE_SECONDS))
                if commits != (commits := self._commits_of_others(commits)):
                    changed = time.monotonic()
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000:.0f}")

    def _has_begun(self, is_last_try: bool) -> bool:
        """Try once to begin a transaction. Returns False if another process has the lock. If `is_last_try` is
        True, raises the error instead."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as e:
            if is_last_try or not is_locked(e):
                raise
            return False
        return True

    def _commits_of_others(self, known: int) -> int:
        """Return a number that changes when another process commits. Return `known` if the number cannot be
        read now."""
        try:
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.OperationalError as e:
            if not is_locked(e):
                raise
            return known

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all reads in the `with` block see the data of one moment, even while other processes write. If
        the block is inside a transaction or another snapshot, the reads see the data of the outer block."""
        if self.in_transaction:
            yield
            return
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("ROLLBACK")

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    # -- reading -------------------------------------------------------------------------------------

    def rows(self, sql: str, *args: Any) -> list[sqlite3.Row]:
        with _readable_errors(self.path):
            return self._connection.execute(sql, args).fetchall()

    def row(self, sql: str, *args: Any) -> sqlite3.Row | None:
        """Return the first row of the result, or None if the result is empty."""
        rows = self.rows(sql, *args)
        return rows[0] if rows else None

    def value(self, sql: str, *args: Any) -> Any:
        """Return the first column of the first row of the result, or None if the result is empty."""
        row = self.row(sql, *args)
        return None if row is None else row[0]

    # -- writing -------------------------------------------------------------------------------------

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        """Run a statement. Call inside a transaction, which turns SQLite's errors into errors with a readable
        text."""
        return self._connection.execute(sql, args)

    def insert(self, table: str, **values: Any) -> int:
        """Insert a row {column: value} and return its rowid. Call inside a transaction."""
        return self._write("INSERT", table, values)

    def replace(self, table: str, **values: Any) -> int:
        """Insert a row; a row with the same key is replaced. Call inside a transaction."""
        return self._write("INSERT OR REPLACE", table, values)

    def _write(self, verb: str, table: str, values: dict[str, Any]) -> int:
        long = {name: v for name, v in values.items() if isinstance(v, bytes) and len(v) > _MAX_BOUND_BYTES}
        names = ", ".join(values)
        marks = ", ".join("zeroblob(?)" if name in long else "?" for name in values)
        sql = f"{verb} INTO {table} ({names}) VALUES ({marks}) RETURNING rowid"
        bound = [len(long[name]) if name in long else value for name, value in values.items()]
        ((rowid,),) = self.execute(sql, *bound).fetchall()
        for name, value in long.items():
            with self.open_blob(table, name, rowid) as blob:
                blob.write(value)
        return int(rowid)

    @property
    def changes(self) -> int:
        """Return the number of rows that this connection has written since it was opened, also by
        triggers."""
        return self._connection.total_changes

    def write_mark(self) -> tuple[int, int] | None:
        """Return two numbers that differ from an earlier result if any process has written into the database
        since. Return None if that cannot be known now: in a transaction, or while the database is locked."""
        if self.in_transaction or (commits := self._commits_of_others(-1)) < 0:
            return None
        return commits, self.changes

    def open_blob(self, table: str, column: str, rowid: int) -> sqlite3.Blob:
        """Open one value of a table as a file, so that a long value can be written in pieces."""
        return self._connection.blobopen(table, column, rowid)

    # -- the file ------------------------------------------------------------------------------------

    def truncate_log(self) -> bool:
        """Move the content of the write-ahead log into the database file, so that the log keeps no copy of
        deleted data.

        Returns False while another process still reads the log. If the result is False, the content is moved
        by a later call, or by the last process that closes the file.
        """
        with _readable_errors(self.path):
            ((blocked, _, _),) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return not blocked

    def copy_log_early(self) -> None:
        """Copy the write-ahead log into the database file at each COPY_EVERY-th call. The caller has time. If
        the log becomes long, SQLite copies the log within a commit, and a rating would wait for the copy. An
        error has no effect here: the log stays, and a later commit copies it."""
        self._calls += 1
        if self._calls % COPY_EVERY == 0:
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def integrity(self) -> str:
        """Return "ok", or else one line about the first fault: text that is not UTF-8, a table of another
        form, a value of a wrong type or size, or damage that SQLite finds."""
        with _readable_errors(self.path):
            return difference(self._connection, VERSION) or str(self.value("PRAGMA quick_check"))


def columns(row_class: type, table: str = "") -> str:
    """Return the fields of a row class as a list of columns for SELECT. table: an alias that stands before
    each column."""
    prefix = f"{table}." if table else ""
    return ", ".join(prefix + field.name for field in fields(row_class))


def to_vector(blob: bytes | None) -> np.ndarray | None:
    """Return the vector [D] (float32) that the bytes in a column hold; None for NULL."""
    return None if blob is None else np.frombuffer(blob, "<f4")


def from_vector(vector: np.ndarray | None) -> bytes | None:
    """Return the bytes that a column holds for a vector [D] of any float type; None (NULL) for None."""
    return None if vector is None else vector.astype("<f4").tobytes()


def _make_private(path: Path) -> None:
    """Create the file if it does not exist. Where the file system has access modes, deny other users access
    to the file and its log."""
    make_folder(path.parent)
    path.touch(mode=0o600)
    if not path.is_file():
        raise StoreError(
            f"{path} is not an ordinary file. Move it away, or set RUVMLX_HOME to another folder."
        )
    for ending in ("", "-wal", "-shm"):
        with suppress(OSError):  # the file does not exist, or the file system has no access modes
            mode = stat.S_IMODE(os.stat(f"{path}{ending}").st_mode)
            if mode & 0o077:
                os.chmod(f"{path}{ending}", mode & 0o700)


def _remove_old_journal(connection: sqlite3.Connection, path: Path) -> None:
    """Remove the rollback journal that a killed `restore` or first start left. `connection` has read the file
    in WAL mode, so SQLite has played back a journal that it needs, and no process can begin a new one."""
    if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        Path(f"{path}-journal").unlink(missing_ok=True)


def _read_only(path: Path) -> sqlite3.Connection | None:
    """Open a file of the current format without writing. Returns None if the file cannot be opened, or if it
    has an older or a newer format."""
    connection = open_unchanged(path)
    if connection is None or connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
        return connection
    connection.close()
    return None


def open_unchanged(path: Path) -> sqlite3.Connection | None:
    """Open a database of any format for reading only, even if its disk is full or read-only. Returns None if
    the database cannot be opened."""
    if not path.is_file():
        return None
    log = Path(f"{path}-wal")
    is_whole = not log.exists() or not log.stat().st_size
    # SQLite's shared memory needs a file, which cannot be written on a full or read-only disk. Two of these
    # three ways need no shared memory: lock the file for this process alone, or, if the log is empty, open it
    # as a file that never changes.
    for options, pragma in (("", "locking_mode = EXCLUSIVE"), ("?mode=ro", "query_only = ON"), (
        "?mode=ro&immutable=1", "query_only = ON"
    )):  # fmt: skip
        if "immutable" in options and not is_whole:
            continue
        uri = f"{path.absolute().as_uri()}{options}"
        try:
            connection = sqlite3.connect(uri, uri=True, timeout=1, isolation_level=None)
        except sqlite3.Error:
            continue
        with suppress(sqlite3.Error):
            connection.execute(f"PRAGMA {pragma}")
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            connection.execute("PRAGMA query_only = ON")
            return connection
        connection.close()
    return None


def is_locked(error: sqlite3.Error) -> bool:
    """Return True if another process has locked the database."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def folder_error(error: sqlite3.Error, *files: Path) -> StoreError | None:
    """Return the error to raise in place of `error` if the cause is a folder that is read-only or has no
    locks. Return None for another cause. files: the databases of the statement that failed."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _OF_FOLDERS:
        return None
    for folder in {file.parent: None for file in files}:
        fault = folder_fault(folder)
        if fault is not None and fault.errno in NO_LOCKS:
            return StoreError(
                f"the file system of {folder} has no locks ({fault.strerror}), so two processes could damage "
                "the data. Use a folder on a local disk; RUVMLX_HOME names the data folder."
            )
        if fault is not None:
            return StoreError(
                f"cannot write into {folder}: {fault.strerror}. Check the disk and its permissions, or set "
                "RUVMLX_HOME."
            )
    return None


@contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the file system in the block into errors of the program with a readable
    text. Most of these texts name the file and a remedy."""
    try:
        yield
    except sqlite3.OperationalError as e:
        if found := folder_error(e, path):
            raise found from e
        if is_locked(e):
            raise StoreBusy(
                f"{path} has been locked by another process for {_BUSY_SECONDS:.0f} s; try again."
            ) from e
        if "decode" in str(e):  # SQLite's message quotes the text that is not UTF-8
            raise CorruptFile(f"{path} is damaged: it holds text that is not UTF-8. {_REMEDY}") from e
        raise StoreError(
            f"cannot write {path}: {e}. Check the disk and its permissions, or set RUVMLX_HOME."
        ) from e
    except sqlite3.IntegrityError as e:  # the error is in a value that the program wrote, not in the file
        raise StoreError(f"cannot store this in {path}: {e}. Nothing was changed.") from e
    except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
        raise  # a mistake of the program, such as a value of a wrong type; the file is not damaged
    except sqlite3.DatabaseError as e:
        raise CorruptFile(f"{path} is damaged: {e}. {_REMEDY}") from e
    # SQLite's message quotes the text of a damaged schema, which is not UTF-8
    except UnicodeDecodeError as e:
        raise CorruptFile(f"{path} is damaged: it holds text that is not UTF-8. {_REMEDY}") from e
    except OverflowError as e:
        raise UsageError("a number is too large: the store's numbers have 64 bits.") from e
    except OSError as e:
        raise StoreError(
            f"cannot use {path.parent}: {e.strerror}. Set RUVMLX_HOME to a folder you can write."
        ) from e
