"""This module stores how replies used the KV cache, and measurements of tier policies (a policy sets the
precision of KV pages by the age of their tokens). The tables hold no words of a chat."""

import json
import time
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ..tiers import LENGTHS, TIERS, lengths_by_name
from .audit_log import Witness
from .database import Database

KEEP_OBSERVATIONS = 2000  # the number of newest replies of all models together whose observations are kept
KEEP_MEASURED = 32  # the number of newest replies of one model on one backend whose measurements are kept

# These fields of the row classes have one column for each tier. A new tier needs new columns (schema.py).
_BY_TIER = {"lengths": LENGTHS, "tier_bytes": tuple(f"{tier.name}_bytes" for tier in TIERS)}
Row = TypeVar("Row")


@dataclass(frozen=True)
class KVObservation:
    """The KV cache of one reply when the reply ended."""

    reply_id: str
    fingerprint: str
    backend: str
    lengths: tuple[int, ...]  # the lengths of the tiers (tokens) in the requested policy, as in TierPolicy
    tokens: int
    tier_bytes: tuple[int, ...]  # bytes by tier
    us_per_token: float  # microseconds of decoding for one token; 0: no token was decoded
    pressure: float  # the pressure on the machine's memory, 0 to 1
    level: int  # the level of memory pressure; a higher level lowers the precision of the requested policy
    ttft_ms: float = 0.0  # milliseconds from the request to the first token; 0: not known
    written: int = 0  # the number of tokens that the model wrote
    replies: int = 1  # the number of replies in progress when this reply ended, with this reply
    others: float = 0.0  # the number of cores that other programs kept busy during the reply


@dataclass(frozen=True)
class SpeedRow:
    """The speed of one reply, the load of the machine meanwhile, and the reply's estimated quality.

    us_per_token, ttft_ms, written, replies, others, pressure: as in KVObservation
    kv_bytes: the bytes of the reply's KV cache
    quality: 0 to 1; None: not known
    created: seconds since 1970
    """

    us_per_token: float
    ttft_ms: float
    written: int
    replies: int
    others: float
    pressure: float
    kv_bytes: int
    quality: float | None
    created: float


@dataclass(frozen=True)
class KVMeasured:
    """A measurement of how much a tier policy changes one reply. The reply was decoded with a tier policy and
    with an f16 cache, and the two results were compared in blocks of tokens."""

    reply_id: str
    lengths: tuple[int, ...]
    blocks: int
    total: float  # the sum of the KL divergences of the blocks (nats per token)
    squares: float  # the sum of the squares of the blocks' KL divergences
    us: float  # microseconds per decoded token at the end of the reply, with the tier policy
    us_f16: float  # microseconds per decoded token with the f16 cache; the two caches are measured in turns


@dataclass(frozen=True)
class KVChoiceRow:
    """The policy for new caches, and the report of the measurement that chose it."""

    lengths: tuple[int, ...]
    report: dict[str, Any]
    created: float


class KVRecords:
    """This class reads and writes the tables `kv_observations`, `kv_measured` and `kv_choices`.
    `kv_observations` and `kv_measured` have a maximum number of rows."""

    def __init__(self, db: Database, witness: Witness):
        self._db, self._witness = db, witness

    def observe(self, seen: KVObservation) -> None:
        """Add an observation. If its tier policy differs from that of the last reply of this model on this
        backend, write the new policy to the witness log. Call inside a transaction."""
        last = self._db.row(
            f"SELECT {', '.join(LENGTHS)} FROM kv_observations WHERE fingerprint = ? AND backend = ?"
            " ORDER BY id DESC LIMIT 1",
            seen.fingerprint,
            seen.backend,
        )
        if last is not None and (before := list(last)) != list(seen.lengths):
            facts = {"model": seen.fingerprint, "backend": seen.backend, "reply": seen.reply_id}
            self._witness.record("kv_used", facts | lengths_by_name(seen.lengths) | {"before": before})
        self._db.insert("kv_observations", created=time.time(), **_to_columns(seen))
        self._db.execute(
            "DELETE FROM kv_observations WHERE id <= (SELECT max(id) FROM kv_observations) - ?",
            KEEP_OBSERVATIONS,
        )

    def observations(self, fingerprint: str, backend: str, limit: int) -> list[KVObservation]:
        """Return at most `limit` observations of one model on one backend, newest first."""
        rows = self._db.rows(
            f"SELECT {_columns(KVObservation)} FROM kv_observations WHERE fingerprint = ? AND backend = ?"
            " ORDER BY id DESC LIMIT ?",
            fingerprint,
            backend,
            limit,
        )
        return [_read(KVObservation, dict(row)) for row in rows]

    def speeds(self, fingerprint: str, backend: str, limit: int) -> list[SpeedRow]:
        """Return the speeds of the newest replies of one model on one backend, at most `limit`, oldest
        first."""
        nbytes = " + ".join(f"o.{name}" for name in _BY_TIER["tier_bytes"])
        rows = self._db.rows(
            "SELECT o.us_per_token, o.ttft_ms, o.written, o.replies, o.others, o.pressure,"
            f" {nbytes} AS kv_bytes, r.quality, o.created FROM kv_observations o"
            " JOIN replies r ON r.id = o.reply_id WHERE o.fingerprint = ? AND o.backend = ?"
            " ORDER BY o.id DESC LIMIT ?",
            fingerprint,
            backend,
            limit,
        )
        return [SpeedRow(**row) for row in reversed(rows)]

    # -- measurements --------------------------------------------------------------------------------

    def long_replies(self, fingerprint: str, tokens: int) -> list[str]:
        """Return the ids of the newest KEEP_MEASURED replies that, together with their prompts, have at least
        `tokens` tokens."""
        rows = self._db.rows(
            "SELECT id FROM replies WHERE fingerprint = ? AND length(prompt_ids) > 0"
            " AND length(prompt_ids) + length(sampled_ids) >= ?"
            " ORDER BY seq DESC LIMIT ?",
            fingerprint,
            4 * tokens,
            KEEP_MEASURED,
        )
        return [row["id"] for row in rows]

    def add_measured(self, fingerprint: str, backend: str, found: KVMeasured) -> None:
        """Commit a measurement. Keep only the measurements of the KEEP_MEASURED replies that were measured
        last. All measurements of a reply are deleted together."""
        with self._db.transaction():
            self._db.replace(
                "kv_measured",
                fingerprint=fingerprint,
                backend=backend,
                created=time.time(),
                **_to_columns(found),
            )
            self._db.execute(
                "DELETE FROM kv_measured WHERE fingerprint = ?1 AND backend = ?2 AND reply_id NOT IN"
                " (SELECT reply_id FROM kv_measured WHERE fingerprint = ?1 AND backend = ?2"
                "  GROUP BY reply_id ORDER BY max(created) DESC, max(rowid) DESC LIMIT ?3)",
                fingerprint,
                backend,
                KEEP_MEASURED,
            )

    def measurements(self, fingerprint: str, backend: str) -> list[KVMeasured]:
        """Return all measurements of one model on one backend, oldest first."""
        rows = self._db.rows(
            f"SELECT {_columns(KVMeasured)} FROM kv_measured"
            " WHERE fingerprint = ? AND backend = ? ORDER BY created, rowid",
            fingerprint,
            backend,
        )
        return [_read(KVMeasured, dict(row)) for row in rows]

    # -- the choice ----------------------------------------------------------------------------------

    def choice(self, fingerprint: str, backend: str) -> KVChoiceRow | None:
        row = self._db.row(
            f"SELECT {_columns(KVChoiceRow)} FROM kv_choices WHERE fingerprint = ? AND backend = ?",
            fingerprint,
            backend,
        )
        return _read(KVChoiceRow, dict(row) | {"report": json.loads(row["report"])}) if row else None

    def put_choice(self, fingerprint: str, backend: str, choice: KVChoiceRow) -> None:
        """Commit a choice. If the policy changes, write the choice and its reason to the witness log."""
        with self._db.transaction():
            before = self.choice(fingerprint, backend)
            was = list(before.lengths) if before else None
            values = _to_columns(choice) | {"report": json.dumps(choice.report)}
            self._db.replace("kv_choices", fingerprint=fingerprint, backend=backend, **values)
            if was != list(choice.lengths):
                facts = {"model": fingerprint, "backend": backend, **lengths_by_name(choice.lengths)}
                self._witness.record("kv_choice", facts | {"before": was, "reason": choice.report["reason"]})


def _columns(row_class: type) -> str:
    """Return the columns of a row class as a list for SELECT."""
    return ", ".join(name for field in fields(row_class) for name in _BY_TIER.get(field.name, (field.name,)))


def _to_columns(row: Any) -> dict[str, Any]:
    """Return {column: value} for a row."""
    values = dict(vars(row))
    for field in _BY_TIER.keys() & values.keys():
        values |= zip(_BY_TIER[field], values.pop(field), strict=True)
    return values


def _read(row_class: type[Row], values: dict[str, Any]) -> Row:
    """Return the row from its values by column (the reverse of `_to_columns`)."""
    for field in _BY_TIER.keys() & row_class.__annotations__.keys():
        values[field] = tuple(values.pop(name) for name in _BY_TIER[field])
    return row_class(**values)
