"""This module is the witness log: an append-only hash chain of events, such as ratings, adapter versions and
replies. A check finds a row that was changed later, unless the row's hash and all later hashes were computed
again.

    hash[n] = sha256(JSON [seq, time, kind, body, hash[n - 1]])        hash[0] = 64 zeros

A row about a change of the store is written in the same transaction as this change, so neither exists without
the other. The bodies of the rows hold ids, names, numbers and digests, but no words of a chat. The chain
shows damage and edits. A person who can write the store's file can replace the whole log by a new log. To
detect a new log, keep a copy of the last hash in another place (`ruvmlx doctor` prints this hash).
"""

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CorruptFile
from .database import Database, columns

GENESIS = "0" * 64
MOVES = ("version", "undo", "rollback", "save")  # kinds of rows that put a version of an adapter in use
_PAGE = 1000  # the number of rows that `walk` holds at a time
_TRIGGERS = 3  # the number of SQL triggers that reject every statement on the log except an append


@dataclass(frozen=True)
class Chain:
    """The result of a check of the chain."""

    rows: int
    head: str  # the hash of the last valid row
    broken: int | None = None  # the number of the first invalid row; None: all rows are valid
    why: str = ""  # a description of the error in the first invalid row; "": no error


@dataclass(frozen=True)
class WitnessRow:
    seq: int
    time: int  # ns since 1970
    kind: str
    body: dict[str, Any]
    hash: str


@dataclass(frozen=True)
class LogFilter:
    """A filter that selects rows of the log.

    kinds: the kinds of rows that the filter selects; (): all kinds
    since: earlier rows are left out (ns since 1970); None: no limit
    until: rows of this time or later are left out (ns since 1970); None: no limit
    """

    kinds: Sequence[str] = ()
    since: int | None = None
    until: int | None = None

    @property
    def where(self) -> tuple[str, list[Any]]:
        """Return a condition in SQL, and its arguments."""
        marks = ", ".join("?" * len(self.kinds))
        terms = [f"kind IN ({marks})"] if self.kinds else []
        terms += ["time >= ?"] if self.since is not None else []
        terms += ["time < ?"] if self.until is not None else []
        times = [time for time in (self.since, self.until) if time is not None]
        return " AND ".join(terms) or "1", [*self.kinds, *times]


class Witness:
    """This class appends, reads and checks the rows of the table `witness`, the witness log."""

    def __init__(self, db: Database):
        self._db = db

    def record(self, kind: str, body: Mapping[str, Any]) -> int:
        """Append a row and return its number. Call inside the transaction of the event that the row records.
        Raises ValueError for NaN and infinity."""
        if not self._db.in_transaction:
            raise RuntimeError("a witness row belongs into the transaction of what it records")
        last, previous = self._last()
        seq, at, text = last + 1, time.time_ns(), canonical(body)
        digest_ = _hash(seq, at, kind, text, previous)
        self._db.insert("witness", seq=seq, time=at, kind=kind, body=text, previous=previous, hash=digest_)
        return seq

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Commit a row about an event outside the store, for example the change of a setting."""
        with self._db.transaction():
            self.record(kind, body)

    def rows(self, kind: str | None = None) -> list[WitnessRow]:
        """Return the rows of one kind, or all rows, oldest first."""
        rows = self._db.rows(
            f"SELECT {columns(WitnessRow)} FROM witness WHERE ?1 IS NULL OR kind = ?1 ORDER BY seq", kind
        )
        return [_row(row) for row in rows]

    def newest(self, wanted: LogFilter, limit: int) -> list[WitnessRow]:
        """Return the newest rows that the filter selects, at most `limit`, oldest first."""
        where, values = wanted.where
        sql = f"SELECT {columns(WitnessRow)} FROM witness WHERE {where} ORDER BY seq DESC LIMIT ?"
        return [_row(row) for row in reversed(self._db.rows(sql, *values, limit))]

    def walk(self, wanted: LogFilter) -> Iterator[WitnessRow]:
        """Yield all rows that the filter selects, oldest first. Only _PAGE rows are in memory at a time."""
        (where, values), after = wanted.where, 0
        sql = f"SELECT {columns(WitnessRow)} FROM witness WHERE {where} AND seq > ? ORDER BY seq LIMIT ?"
        while rows := self._db.rows(sql, *values, after, _PAGE):
            yield from map(_row, rows)
            after = rows[-1]["seq"]

    def counts(self, wanted: LogFilter) -> dict[str, int]:
        """Return the number of selected rows of each kind."""
        where, values = wanted.where
        sql = f"SELECT kind, count(*) AS n FROM witness WHERE {where} GROUP BY kind ORDER BY kind"
        return {row["kind"]: row["n"] for row in self._db.rows(sql, *values)}

    def number(self, beginning: str) -> int | None:
        """Return the number of the row whose hash has this beginning, in small or capital letters. Return
        None if no row's hash begins so."""
        sql = "SELECT seq FROM witness WHERE substr(hash, 1, ?) = ? ORDER BY seq LIMIT 1"
        found = self._db.value(sql, len(beginning), beginning.lower())
        return None if found is None else int(found)

    def check(self) -> Chain:
        """Compute the hashes again up to the first invalid row, look for missing rows and triggers, and
        return the result. The check takes 4 to 15 us per row, depending on the machine."""
        sql = "SELECT seq, time, kind, body, previous, hash FROM witness ORDER BY seq"
        with self._db.snapshot():
            rows, why = self._db.rows(sql), self._missing_rows() or self._missing_triggers()
        found = _check_rows(rows)
        if found.broken is None and why:
            return Chain(found.rows, found.head, found.rows + 1, why)
        return found

    def _last(self) -> tuple[int, str]:
        """Return (number, hash) of the newest row."""
        row = self._db.row("SELECT seq, hash FROM witness ORDER BY seq DESC LIMIT 1")
        return (row["seq"], row["hash"]) if row else (0, GENESIS)

    def _missing_rows(self) -> str:
        """Return a text if the newest rows of the log are missing, else "". Missing rows at the end leave no
        gap in the numbers, but SQLite remembers the largest number that a row ever had."""
        given = self._db.value("SELECT seq FROM sqlite_sequence WHERE name = 'witness'") or 0
        last, _ = self._last()
        return "" if given == last else f"{given} rows were written, {last} are there"

    def _missing_triggers(self) -> str:
        sql = "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'witness'"
        return "" if self._db.value(sql) == _TRIGGERS else "the triggers that guard the log are gone"


def _row(row: sqlite3.Row) -> WitnessRow:
    """Convert a row of the table `witness` to a WitnessRow. Raises CorruptFile if the row's body is not a
    JSON object."""
    try:
        body = json.loads(row["body"])
    except (ValueError, TypeError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise CorruptFile(
            f"row {row['seq']} of the witness log holds no JSON object; `ruvmlx log verify` checks the log."
        )
    return WitnessRow(**dict(row) | {"body": body})


def canonical(body: Mapping[str, Any]) -> str:
    """Return a body as canonical JSON: sorted keys, no spaces. Raises ValueError for NaN and infinity."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not belong into the witness log")


def digest(data: bytes) -> str:
    """Return the SHA-256 of the data in hex. The body of a row holds this digest in place of weights."""
    return hashlib.sha256(data).hexdigest()


def _hash(seq: int, at: int, kind: str, body: str, previous: str) -> str:
    return hashlib.sha256(json.dumps([seq, at, kind, body, previous]).encode()).hexdigest()


def _check_rows(rows: Iterable[sqlite3.Row]) -> Chain:
    previous, count = GENESIS, 0
    for row in rows:
        if why := _wrong(row, count + 1, previous):
            return Chain(count, previous, count + 1, why)
        previous, count = row["hash"], count + 1
    return Chain(count, previous)


def _wrong(row: sqlite3.Row, expected: int, previous: str) -> str:
    """Return a text about the error in a row. Return "" if the row is valid.

    expected: the number that the row must have
    previous: the hash of the previous row
    """
    if row["seq"] != expected:
        return f"the row after {expected - 1} is {row['seq']}"
    if row["previous"] != previous:
        return "it does not follow from the row before it"
    try:
        found = _hash(row["seq"], row["time"], row["kind"], row["body"], row["previous"])
    except TypeError:
        return "it holds bytes where text was written"
    return "" if found == row["hash"] else "its contents were changed"
