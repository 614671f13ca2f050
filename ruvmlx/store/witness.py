"""The witness log: what happened to the model's weights, in order, so that nothing can be changed unseen.

    hash[n] = sha256(JSON [seq, time, kind, body, hash[n - 1]])        hash[0] = 64 zeros

A row is written in the transaction of what it records: neither is ever found without the other. Bodies hold
ids, numbers and digests, never words of a chat. The chain shows damage and edits. It cannot stop someone
who may write the file from making the whole log anew: note the last hash elsewhere (`ruvmlx doctor` prints
it) if you need to know that too.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .database import Database

GENESIS = "0" * 64
_GUARDS = 3  # triggers that let rows be appended only


@dataclass(frozen=True)
class Chain:
    """What a check found. head: hash of the last sound row; broken: the first row that is not, and why."""

    rows: int
    head: str
    broken: int | None = None
    why: str = ""


@dataclass(frozen=True)
class WitnessRow:
    seq: int
    time: int  # ns since 1970
    kind: str
    body: dict[str, Any]
    hash: str


class Witness(Database):
    """Appends to the chain and checks it."""

    def record(self, kind: str, body: Mapping[str, Any]) -> None:
        """Append a row. Call inside the transaction of what it records."""
        if not self._db.in_transaction:
            raise RuntimeError("a witness row belongs into the transaction of what it records")
        seq, previous = self._last()
        row = (seq + 1, time.time_ns(), kind, canonical(body), previous)
        self._db.execute("INSERT INTO witness VALUES (?, ?, ?, ?, ?, ?)", (*row, _hash(*row)))

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Append a row about something that the store itself does not hold: a policy, a setting."""
        with self.transaction():
            self.record(kind, body)

    def _last(self) -> tuple[int, str]:
        row = self._row("SELECT seq, hash FROM witness ORDER BY seq DESC LIMIT 1")
        return (row[0], row[1]) if row else (0, GENESIS)

    def witnessed(self, kind: str | None = None) -> list[WitnessRow]:
        """The log, the oldest row first."""
        rows = self._rows(
            "SELECT seq, time, kind, body, hash FROM witness WHERE ?1 IS NULL OR kind = ?1 ORDER BY seq", kind
        )
        return [WitnessRow(seq, at, k, json.loads(body), digest) for seq, at, k, body, digest in rows]

    def check_chain(self) -> Chain:
        """Compute every hash again; about 4 us a row."""
        sql = "SELECT seq, time, kind, body, previous, hash FROM witness ORDER BY seq"
        with self.reading():
            rows, why = self._rows(sql), self._cut() or self._unguarded()
        found = _checked(rows)
        if found.broken is None and why:
            return Chain(found.rows, found.head, found.rows + 1, why)
        return found

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is read within is of one moment, whatever other processes write."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def _cut(self) -> str:
        """Rows missing at the end leave no gap, but SQLite remembers the largest number it has given."""
        row = self._row("SELECT seq FROM sqlite_sequence WHERE name = 'witness'")
        given, last = (row[0] if row else 0), self._last()[0]
        return "" if given == last else f"{given} rows were written, {last} are there"

    def _unguarded(self) -> str:
        sql = "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'witness'"
        return "" if self._rows(sql)[0][0] == _GUARDS else "the triggers that guard the log are gone"


def canonical(body: Mapping[str, Any]) -> str:
    """One way to write a body: sorted keys, no spaces. ValueError for NaN and infinity."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not belong into the witness log")


def digest(data: bytes) -> str:
    """How a body names the bytes of weights."""
    return hashlib.sha256(data).hexdigest()


def _hash(seq: int, at: int, kind: str, body: str, previous: str) -> str:
    return hashlib.sha256(json.dumps([seq, at, kind, body, previous]).encode()).hexdigest()


def _checked(rows: Iterable[tuple]) -> Chain:
    previous, count = GENESIS, 0
    for seq, at, kind, body, before, stored in rows:
        if why := _wrong(count + 1, previous, seq, at, kind, body, before, stored):
            return Chain(count, previous, count + 1, why)
        previous, count = stored, count + 1
    return Chain(count, previous)


def _wrong(expected: int, previous: str, seq, at, kind, body, before, stored) -> str:
    """What is wrong with a row, if anything."""
    if seq != expected:
        return f"the row after {expected - 1} is {seq}"
    if before != previous:
        return "it does not follow from the row before it"
    try:
        return "" if _hash(seq, at, kind, body, before) == stored else "its contents were changed"
    except TypeError:
        return "it holds bytes where text was written"
