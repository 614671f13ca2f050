"""This module stores the weights of adapter versions: whole, or as the difference from an older version.

A chain begins at a whole copy. Each version after it is stored as the difference from its source, usually the
version that it was made from. The whole copy and the differences give the weights that were written, bit for
bit.
"""

import sqlite3
import zlib
from dataclasses import dataclass

from ..errors import CorruptFile
from .ancestors import WITH_ANCESTORS
from .database import Database
from .differences import DAMAGED, add_differences, difference, inflate

# the maximum number of differences between a version and its whole copy; more would take longer to read
MOST_DIFFERENCES = 31
# the number of versions (the head and its nearest ancestors) whose weights `delete_old` always keeps
KEEP_NEAREST = 64
# the number of newest versions that keep their weights: about 11 KB each for the starter model
KEEP_NEWEST = 10_000
# the maximum number of bytes of one adapter's weights in the store; the oldest versions beyond it lose their
# weights, except the KEEP_NEAREST nearest. The starter model's 7,500 newest versions take less.
KEEP_BYTES = 110_000_000
COUNTS = 32  # these bytes are counted again after growing by about this part; a count takes some ms
# the maximum number of versions compressed per rating, in a store that had format 14 or older: 3 ms each
PACKED_AT_ONCE = 1
# In bytes. Weights with only zeros can have this size; other weights become at most eight times as large as
# their compressed bytes.
_MOST_SPARSE = 64 << 20

# A common table expression `chain(version, source, step)`: a version and its sources, back to the whole copy.
# Arguments: ?1: fingerprint of the model; ?2: adapter name; ?3: the version.
_CHAIN = (
    "WITH RECURSIVE chain(version, source, step) AS (SELECT version, source, 0 FROM adapters"
    " WHERE fingerprint = ?1 AND name = ?2 AND version = ?3 UNION ALL"
    " SELECT a.version, a.source, chain.step + 1 FROM chain JOIN adapters a"
    " ON a.fingerprint = ?1 AND a.name = ?2 AND a.version = chain.source"
    " WHERE chain.source < chain.version) "  # in a damaged store, the sources can form a circle
)


@dataclass(frozen=True)
class KnownWeights:
    """The weights of one version, in memory. created: the time at which the version was made. A version with
    the same number but another time belongs to another adapter that had or has the same name."""

    fingerprint: str
    name: str
    version: int
    created: float
    state: bytes

    @property
    def key(self) -> tuple[str, str, int, float]:
        return self.fingerprint, self.name, self.version, self.created


class Weights:
    """The columns `state`, `packed` and `source` of the table `adapters`.

    state: the weights; NULL: they are no longer kept
    packed: 1 if `state` is compressed
    source: the version from which `state` is the difference; 0: `state` is whole
    """

    def __init__(self, db: Database):
        self._db = db
        self._known: KnownWeights | None = None  # the weights of the version that was written last

    def get(
        self, fingerprint: str, name: str, version: int, near: KnownWeights | None = None
    ) -> bytes | None:
        """Return the weights of a version; None if they are not kept. Raises CorruptFile if the weights, or
        weights that are needed to compute them from differences, are damaged or gone.

        near: the weights of another version of this adapter, already in memory; if this other version is the
            source, no further weights are read
        """
        chain = self._chain(fingerprint, name, version, whole=near is None)
        if near and chain and chain[0]["source"] not in (0, near.version):
            chain = self._chain(fingerprint, name, version)
        if not chain or chain[0]["state"] is None:
            return None
        if near and chain[-1]["source"] == near.version:
            oldest: bytes | None = near.state
        elif chain[-1]["source"] == 0:
            last = chain.pop()
            oldest = unpack_state(last["state"], last["packed"])
        else:
            oldest = None
        differences = [row["state"] for row in reversed(chain)]
        if oldest is None or None in differences:
            raise CorruptFile(DAMAGED)
        return add_differences(oldest, differences)

    def _chain(self, fingerprint: str, name: str, version: int, whole: bool = True) -> list[sqlite3.Row]:
        """Return the rows of a version and of its sources, the version first. whole: False: return only the
        row of the version."""
        return self._db.rows(
            _CHAIN + "SELECT a.version, a.source, a.state, a.packed FROM chain JOIN adapters a"
            " ON a.fingerprint = ?1 AND a.name = ?2 AND a.version = chain.version ORDER BY step LIMIT ?4",
            fingerprint,
            name,
            version,
            -1 if whole else 1,
        )

    def write(self, fingerprint: str, name: str, version: int, source: int, state: bytes) -> None:
        """Write the weights of a version whose row exists. Call inside a transaction.

        source: a version with similar weights, usually the parent; 0: store the weights whole
        """
        stored, packed = self._difference(fingerprint, name, source, state) if source else None, 1
        if stored is None or len(stored) >= len(state):
            stored, packed = _pack(state)
            source = 0
        found = self._db.execute(
            "UPDATE adapters SET state = ?, packed = ?, source = ?"
            " WHERE fingerprint = ? AND name = ? AND version = ? RETURNING created",
            stored,
            packed,
            source,
            fingerprint,
            name,
            version,
        ).fetchall()
        self._known = KnownWeights(fingerprint, name, version, found[0]["created"], state)

    def _difference(self, fingerprint: str, name: str, source: int, state: bytes) -> bytes | None:
        """Return the difference from a version's weights; None if that version is already MOST_DIFFERENCES
        differences away from its whole copy, or if its weights cannot be read."""
        of = fingerprint, name, source
        if self._db.value(_CHAIN + "SELECT max(step) FROM chain", *of) == MOST_DIFFERENCES:
            return None
        sql = "SELECT created FROM adapters WHERE fingerprint = ? AND name = ? AND version = ?"
        known = self._known
        if known and known.key == (*of, self._db.value(sql, *of)):
            return difference(state, known.state)
        try:
            older = self.get(*of)
        except CorruptFile:
            return None
        return None if older is None else difference(state, older)

    # -- old versions --------------------------------------------------------------------------------

    def delete_old(self, fingerprint: str, name: str, head: int) -> bool:
        """Delete the weights of the versions that are older than the newest KEEP_NEWEST versions, and, at
        some versions, of the oldest versions beyond KEEP_BYTES bytes. Return True if weights were deleted. A
        version that was stored as the difference from a deleted version becomes whole. The weights of the
        head and of its nearest ancestors (KEEP_NEAREST versions) stay."""
        old = (
            " fingerprint = ?1 AND name = ?2 AND state IS NOT NULL AND packed IN (0, 1)"
            " AND version <= ?5 AND version NOT IN (SELECT version FROM ancestors)"
        )
        newest_old = head - KEEP_NEWEST
        size = self._db.value(
            "SELECT length(state) FROM adapters WHERE fingerprint = ? AND name = ? AND version = ?",
            fingerprint,
            name,
            head,
        )
        if head % max(1, KEEP_BYTES // (COUNTS * (size or 1))) == 0:
            newest_old = max(newest_old, self._newest_beyond(fingerprint, name, KEEP_BYTES))
        of = fingerprint, name, head, KEEP_NEAREST, newest_old
        found = self._db.rows(WITH_ANCESTORS + f"SELECT version FROM adapters WHERE{old}", *of)
        gone = [row["version"] for row in found]
        for version in gone:
            self._make_children_whole(fingerprint, name, version, gone)
        for version in gone:
            self._set(fingerprint, name, version, None, 0)
        return bool(gone)

    def _newest_beyond(self, fingerprint: str, name: str, most: int) -> int:
        """Add up the bytes of the stored weights from the newest version backwards. Return the first version
        with which the sum is over `most` bytes. Return 0 if the sum stays within the limit."""
        rows = self._db.rows(
            "SELECT version, length(state) AS size FROM adapters"
            " WHERE fingerprint = ? AND name = ? AND state IS NOT NULL ORDER BY version DESC",
            fingerprint,
            name,
        )
        total = 0
        for row in rows:
            total += row["size"]
            if total > most:
                return row["version"]
        return 0

    def _make_children_whole(self, fingerprint: str, name: str, version: int, gone: list[int]) -> None:
        rows = self._db.rows(
            "SELECT version FROM adapters WHERE fingerprint = ? AND name = ? AND source = ? AND source > 0",
            fingerprint,
            name,
            version,
        )
        for child in (row["version"] for row in rows if row["version"] not in gone):
            try:
                state = self.get(fingerprint, name, child)
            except CorruptFile:
                continue  # nobody can read these weights, with or without the deleted version
            if state is not None:
                self._set(fingerprint, name, child, *_pack(state))

    def pack_plain(self, fingerprint: str, name: str, head: int) -> None:
        """Compress some weights that a ruvmlx with format 14 or older wrote. The newest version's weights are
        not compressed here, so that its rating is acknowledged sooner."""
        rows = self._db.rows(
            "SELECT version, state FROM adapters WHERE fingerprint = ? AND name = ? AND state IS NOT NULL"
            " AND packed = 0 AND version < ? LIMIT ?",
            fingerprint,
            name,
            head,
            PACKED_AT_ONCE,
        )
        for row in rows:
            self._set(fingerprint, name, row["version"], *_pack(row["state"]))

    def _set(self, fingerprint: str, name: str, version: int, state: bytes | None, packed: int) -> None:
        """Store the weights of a version as a whole copy; None deletes the weights."""
        self._db.execute(
            "UPDATE adapters SET state = ?, packed = ?, source = 0"
            " WHERE fingerprint = ? AND name = ? AND version = ?",
            state,
            packed,
            fingerprint,
            name,
            version,
        )


def _pack(state: bytes) -> tuple[bytes, int]:
    """Return whole weights as they are stored, and the value of `packed`."""
    packed = zlib.compress(state, level=1)
    return (packed, 1) if len(packed) < len(state) else (state, 0)


def unpack_state(state: bytes | None, packed: int) -> bytes | None:
    """Return whole weights as they were written. Raises CorruptFile if the weights are damaged."""
    try:
        return inflate(state, _MOST_SPARSE + 8 * len(state)) if packed and state is not None else state
    except zlib.error:
        raise CorruptFile(DAMAGED) from None
