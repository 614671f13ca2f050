"""One SQLite file, durable at every commit.

WAL with synchronous=FULL (and F_FULLFSYNC on macOS): when a call that writes has returned, the data is on
the disk.
"""

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..errors import CorruptFile, StoreBusy, StoreError
from .schema import migrate

_BUSY_SECONDS = 5.0


class Database:
    """The connection. Use it from the thread that opened it."""

    def __init__(self, path: Path):
        self.path = path
        with _told_plainly(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute("PRAGMA secure_delete = ON")
            if sys.platform == "darwin":
                self._db.execute("PRAGMA fullfsync = ON")
                self._db.execute("PRAGMA checkpoint_fullfsync = ON")
            migrate(self._db)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; holds the write lock from the first line."""
        with _told_plainly(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def truncate_log(self) -> None:
        """Move the write-ahead log into the file, so that what was deleted is nowhere any more."""
        with _told_plainly(self.path):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def integrity(self) -> str:
        """SQLite's own check: "ok", or what is wrong."""
        with _told_plainly(self.path):
            return str(self._db.execute("PRAGMA quick_check").fetchone()[0])

    def _rows(self, sql: str, *args) -> list[tuple]:
        with _told_plainly(self.path):
            return self._db.execute(sql, args).fetchall()

    def _row(self, sql: str, *args) -> tuple | None:
        rows = self._rows(sql, *args)
        return rows[0] if rows else None


def vector(blob: bytes | None) -> np.ndarray | None:
    return None if blob is None else np.frombuffer(blob, "<f4")


@contextmanager
def _told_plainly(path: Path) -> Iterator[None]:
    """Turn what SQLite and the file system say into one line for people."""
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
    except sqlite3.DatabaseError as e:
        raise CorruptFile(
            f"{path} is damaged: {e}. Move it away to start afresh; keep it if you want to recover chats."
        ) from e
    except OSError as e:
        raise StoreError(
            f"cannot use {path.parent}: {e.strerror}. Set RUVMLX_HOME to a folder you can write."
        ) from e
