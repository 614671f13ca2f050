"""One SQLite file, durable at every commit.

WAL with synchronous=FULL (and F_FULLFSYNC on macOS): the data is on the disk when a call that writes returns.
"""

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptFile, StoreBusy, StoreError
from .schema import VERSION, migrate

_BUSY_SECONDS = 5.0


class Database:
    """The connection, for the thread that opened it. Read the columns of a row by name."""

    def __init__(self, path: Path, reading: bool = False):
        """reading: a disk that is full, or cannot be written, is no error while nothing is written."""
        self.path = path
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
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
            connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
            try:
                self._configure(connection)
                migrate(connection)
            except BaseException:
                connection.close()
                raise
        return connection

    def _configure(self, connection: sqlite3.Connection) -> None:
        pragmas = ["journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"]
        if sys.platform == "darwin":
            pragmas += ["fullfsync = ON", "checkpoint_fullfsync = ON"]
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    def close(self) -> None:
        self._connection.close()

    # -- transactions --------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything that is written inside, or nothing. Takes the write lock at once. Inside of
        another transaction it is a part of that one."""
        if self.in_transaction:
            yield
            return
        with _readable_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read the state of one moment inside, even while other processes write."""
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
        """The first row, or None."""
        rows = self.rows(sql, *args)
        return rows[0] if rows else None

    def value(self, sql: str, *args: Any) -> Any:
        """The first column of the first row, or None."""
        row = self.row(sql, *args)
        return None if row is None else row[0]

    # -- writing -------------------------------------------------------------------------------------

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        """Run a statement. Call inside a transaction, which makes SQLite's errors readable."""
        return self._connection.execute(sql, args)

    def insert(self, table: str, **values: Any) -> int:
        """Insert a row, {column: value}; returns its rowid. Call inside a transaction."""
        return self._write("INSERT", table, values)

    def replace(self, table: str, **values: Any) -> int:
        """Insert a row in place of the one with the same key, if there is one. Call inside a transaction."""
        return self._write("INSERT OR REPLACE", table, values)

    def _write(self, verb: str, table: str, values: dict[str, Any]) -> int:
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        sql = f"{verb} INTO {table} ({names}) VALUES ({marks}) RETURNING rowid"
        ((rowid,),) = self.execute(sql, *values.values()).fetchall()
        return int(rowid)

    @property
    def changes(self) -> int:
        """Rows that this connection has written since it was opened, those of triggers included."""
        return self._connection.total_changes

    def open_blob(self, table: str, column: str, rowid: int) -> sqlite3.Blob:
        """One value as a file: write a long one in pieces."""
        return self._connection.blobopen(table, column, rowid)

    # -- the file ------------------------------------------------------------------------------------

    def truncate_log(self) -> bool:
        """Move the write-ahead log into the file, so that no copy of deleted data remains in the log.

        False while another process still reads it: a later call, or the last to close the file, does it.
        """
        with _readable_errors(self.path):
            ((blocked, _, _),) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return not blocked

    def integrity(self) -> str:
        """SQLite's quick check: "ok", or a description of the damage."""
        return str(self.value("PRAGMA quick_check"))


def columns(row_class: type, table: str = "") -> str:
    """The fields of a row class as a list of columns for SELECT; table: an alias to put before each."""
    prefix = f"{table}." if table else ""
    return ", ".join(prefix + field.name for field in fields(row_class))


def to_vector(blob: bytes | None) -> np.ndarray | None:
    """[D] float32 from a column; None for NULL."""
    return None if blob is None else np.frombuffer(blob, "<f4")


def from_vector(vector: np.ndarray | None) -> bytes | None:
    """A column's value from [D] of any float type; NULL for None."""
    return None if vector is None else vector.astype("<f4").tobytes()


def _read_only(path: Path) -> sqlite3.Connection | None:
    """The file of today's format as it is, without anything being written; None if that does not work."""
    log = Path(f"{path}-wal")
    whole = not log.exists() or not log.stat().st_size
    # Without shared memory, which is a file: in this process alone, or not at all, if nothing is in the log.
    for options, pragma in (("", "locking_mode = EXCLUSIVE"), ("?mode=ro", "query_only = ON"), (
        "?mode=ro&immutable=1", "query_only = ON"
    )):  # fmt: skip
        if "immutable" in options and not whole:
            continue
        connection = sqlite3.connect(f"{path.as_uri()}{options}", uri=True, timeout=1, isolation_level=None)
        try:
            connection.execute(f"PRAGMA {pragma}")
            connection.execute("SELECT count(*) FROM sessions").fetchone()
            if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
                connection.execute("PRAGMA query_only = ON")
                return connection
        except sqlite3.Error:
            pass
        connection.close()
    return None


@contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    """Raise errors of SQLite and of the file system as one line that names the file and a remedy."""
    try:
        yield
    except sqlite3.OperationalError as e:
        if "locked" in str(e) or "busy" in str(e):
            raise StoreBusy(
                f"{path} has been locked by another process for {_BUSY_SECONDS:.0f} s; try again."
            ) from e
        raise StoreError(
            f"cannot write {path}: {e}. Check the disk and its permissions, or set RUVMLX_HOME."
        ) from e
    except sqlite3.IntegrityError as e:  # of a value, not of the file
        raise StoreError(f"cannot store this in {path}: {e}. Nothing was changed.") from e
    except sqlite3.DatabaseError as e:
        raise CorruptFile(
            f"{path} is damaged: {e}. Move it away to start afresh; keep it if you want to recover chats."
        ) from e
    except OSError as e:
        raise StoreError(
            f"cannot use {path.parent}: {e.strerror}. Set RUVMLX_HOME to a folder you can write."
        ) from e
