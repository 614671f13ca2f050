"""The witness log: an append-only hash chain of the adapters' events, which makes every edit visible.

    hash[n] = sha256(JSON [seq, time, kind, body, hash[n - 1]])        hash[0] = 64 zeros

A row is written in the same transaction as the event that it records, so neither exists without the other.
Bodies hold ids, numbers and digests, never words of a chat. The chain shows damage and edits. It cannot stop
someone who can write the file from building a whole new log. To detect that, keep a copy of the last hash
elsewhere (`ruvmlx doctor` prints it).
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
_PAGE = 1000  # rows that `walk` holds at a time
_TRIGGERS = 3  # they reject every statement but an append


@dataclass(frozen=True)
class Chain:
    """The result of a check."""

    rows: int
    head: str  # hash of the last sound row
    broken: int | None = None  # number of the first unsound row
    why: str = ""  # what is wrong with it


@dataclass(frozen=True)
class WitnessRow:
    seq: int
    time: int  # ns since 1970
    kind: str
    body: dict[str, Any]
    hash: str


@dataclass(frozen=True)
class LogFilter:
    """Which rows of the log. kinds: empty for all. since, until: ns since 1970, `until` itself left out."""

    kinds: Sequence[str] = ()
    since: int | None = None
    until: int | None = None

    @property
    def where(self) -> tuple[str, list[Any]]:
        """A condition in SQL, and its arguments."""
        marks = ", ".join("?" * len(self.kinds))
        terms = [f"kind IN ({marks})"] if self.kinds else []
        terms += ["time >= ?"] if self.since is not None else []
        terms += ["time < ?"] if self.until is not None else []
        times = [time for time in (self.since, self.until) if time is not None]
        return " AND ".join(terms) or "1", [*self.kinds, *times]


class Witness:
    """The table `witness`: append, read and check."""

    def __init__(self, db: Database):
        self._db = db

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        """Append a row. Call inside the transaction of the event. ValueError for NaN and infinity."""
        if not self._db.in_transaction:
            raise RuntimeError("a witness row belongs into the transaction of what it records")
        last, previous = self._last()
        seq, at, text = last + 1, time.time_ns(), canonical(body)
        digest_ = _hash(seq, at, kind, text, previous)
        self._db.insert("witness", seq=seq, time=at, kind=kind, body=text, previous=previous, hash=digest_)

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Commit a row about something outside the store, such as a setting."""
        with self._db.transaction():
            self.record(kind, body)

    def rows(self, kind: str | None = None) -> list[WitnessRow]:
        """The rows of one kind, or all; oldest first."""
        rows = self._db.rows(
            f"SELECT {columns(WitnessRow)} FROM witness WHERE ?1 IS NULL OR kind = ?1 ORDER BY seq", kind
        )
        return [_row(row) for row in rows]

    def newest(self, wanted: LogFilter, limit: int) -> list[WitnessRow]:
        """The newest rows that the filter lets through, oldest first."""
        where, values = wanted.where
        sql = f"SELECT {columns(WitnessRow)} FROM witness WHERE {where} ORDER BY seq DESC LIMIT ?"
        return [_row(row) for row in reversed(self._db.rows(sql, *values, limit))]

    def walk(self, wanted: LogFilter) -> Iterator[WitnessRow]:
        """All rows that the filter lets through, oldest first; a page of them is in memory at a time."""
        (where, values), after = wanted.where, 0
        sql = f"SELECT {columns(WitnessRow)} FROM witness WHERE {where} AND seq > ? ORDER BY seq LIMIT ?"
        while rows := self._db.rows(sql, *values, after, _PAGE):
            yield from map(_row, rows)
            after = rows[-1]["seq"]

    def counts(self, wanted: LogFilter) -> dict[str, int]:
        """How many rows of each kind the filter lets through."""
        where, values = wanted.where
        sql = f"SELECT kind, count(*) AS n FROM witness WHERE {where} GROUP BY kind ORDER BY kind"
        return {row["kind"]: row["n"] for row in self._db.rows(sql, *values)}

    def number(self, beginning: str) -> int | None:
        """The number of the row whose hash begins so; None if there is none."""
        sql = "SELECT seq FROM witness WHERE substr(hash, 1, ?) = ? ORDER BY seq LIMIT 1"
        found = self._db.value(sql, len(beginning), beginning)
        return None if found is None else int(found)

    def check(self) -> Chain:
        """Compute every hash again; about 4 us per row."""
        sql = "SELECT seq, time, kind, body, previous, hash FROM witness ORDER BY seq"
        with self._db.snapshot():
            rows, why = self._db.rows(sql), self._missing_rows() or self._missing_triggers()
        found = _checked(rows)
        if found.broken is None and why:
            return Chain(found.rows, found.head, found.rows + 1, why)
        return found

    def _last(self) -> tuple[int, str]:
        """(number, hash) of the newest row."""
        row = self._db.row("SELECT seq, hash FROM witness ORDER BY seq DESC LIMIT 1")
        return (row["seq"], row["hash"]) if row else (0, GENESIS)

    def _missing_rows(self) -> str:
        """Rows missing at the end leave no gap, but SQLite remembers the largest number it has given."""
        given = self._db.value("SELECT seq FROM sqlite_sequence WHERE name = 'witness'") or 0
        last, _ = self._last()
        return "" if given == last else f"{given} rows were written, {last} are there"

    def _missing_triggers(self) -> str:
        sql = "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'witness'"
        return "" if self._db.value(sql) == _TRIGGERS else "the triggers that guard the log are gone"


def _row(row: sqlite3.Row) -> WitnessRow:
    """CorruptFile if the row's body is no JSON object."""
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
    """A body as canonical JSON: sorted keys, no spaces. ValueError for NaN and infinity."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not belong into the witness log")


def digest(data: bytes) -> str:
    """SHA-256 in hex, which a body holds in place of weights."""
    return hashlib.sha256(data).hexdigest()


def _hash(seq: int, at: int, kind: str, body: str, previous: str) -> str:
    return hashlib.sha256(json.dumps([seq, at, kind, body, previous]).encode()).hexdigest()


def _checked(rows: Iterable[sqlite3.Row]) -> Chain:
    previous, count = GENESIS, 0
    for row in rows:
        if why := _wrong(row, count + 1, previous):
            return Chain(count, previous, count + 1, why)
        previous, count = row["hash"], count + 1
    return Chain(count, previous)


def _wrong(row: sqlite3.Row, expected: int, previous: str) -> str:
    """What is wrong with a row; "" for nothing. expected: its number, previous: the hash before it."""
    if row["seq"] != expected:
        return f"the row after {expected - 1} is {row['seq']}"
    if row["previous"] != previous:
        return "it does not follow from the row before it"
    try:
        found = _hash(row["seq"], row["time"], row["kind"], row["body"], row["previous"])
    except TypeError:
        return "it holds bytes where text was written"
    return "" if found == row["hash"] else "its contents were changed"
