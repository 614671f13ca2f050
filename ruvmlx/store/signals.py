"""This module stores signals about replies: ratings, and the user's actions on a reply (the trajectory
buffer)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .database import Database, columns

KEEP_SIGNALS = 10_000  # the number of newest signals that are kept


@dataclass(frozen=True)
class SignalRow:
    """One signal about one reply. Each field is a column of the table `signals`."""

    reply_id: str
    kind: str  # "explicit" | "implicit"
    label: str  # a rating ("up", "4") or an action ("copied")
    quality: float  # 0 to 1
    reward: float  # quality * max(0, 2 - latency_ratio)
    latency_ratio: float
    tier: int
    context_tokens: int


@dataclass(frozen=True)
class SignalGroup:
    """The means over the signals of one kind about replies of one model size and context length."""

    kind: str
    tier: int
    context: str  # tokens of prompt and reply: "under 512", "512 to 2047" or "2048 and more"
    count: int
    quality: float
    reward: float
    latency_ratio: float


class Signals:
    """This class reads and writes the tables `signals` and `signals_dropped`. The size of `signals` is
    limited; `signals_dropped` counts deleted signals."""

    def __init__(self, db: Database):
        self._db = db

    def add(self, rows: Sequence[SignalRow]) -> None:
        """Commit signals, oldest first. Signals of replies that were deleted in the meantime are left out."""
        with self._db.transaction():
            for row in rows:
                now = time.time()
                if self._db.row("SELECT 1 FROM replies WHERE id = ?", row.reply_id):
                    self._db.insert("signals", created=now, **vars(row))
            dropped = self._db.execute(
                "DELETE FROM signals WHERE id <= (SELECT id FROM signals ORDER BY id DESC LIMIT 1 OFFSET ?)",
                KEEP_SIGNALS,
            ).rowcount
            if dropped:
                self._db.execute("UPDATE signals_dropped SET count = count + ?", dropped)

    def all(self, fingerprint: str, kind: str | None = None) -> list[SignalRow]:
        """Return the signals about a model's replies, of one kind or of both kinds ("explicit", "implicit"),
        oldest first."""
        rows = self._db.rows(
            f"SELECT {columns(SignalRow, 's')} FROM signals s JOIN replies r ON r.id = s.reply_id"
            " WHERE r.fingerprint = ?1 AND (?2 IS NULL OR s.kind = ?2) ORDER BY s.id",
            fingerprint,
            kind,
        )
        return [SignalRow(**row) for row in rows]

    def groups(self, fingerprint: str) -> list[SignalGroup]:
        """Return means of the signals about a model's replies, by kind, model size and context length. If a
        reply has several signals of a kind, only the newest of them is a part of the mean. A rating counts
        only while it is in force."""
        context = (
            "CASE WHEN context_tokens < 512 THEN 'under 512' WHEN context_tokens < 2048"
            " THEN '512 to 2047' ELSE '2048 and more' END"
        )
        rows = self._db.rows(
            "WITH valid AS (SELECT s.* FROM signals s JOIN replies r ON r.id = s.reply_id"
            " WHERE r.fingerprint = ? AND (s.kind != 'explicit' OR EXISTS (SELECT 1 FROM ratings"
            " WHERE reply_id = s.reply_id AND in_force AND rating = s.label)))"
            f" SELECT kind, tier, {context} AS context, count(*) AS count, avg(quality) AS quality,"
            " avg(reward) AS reward, avg(latency_ratio) AS latency_ratio FROM valid"
            " WHERE id IN (SELECT max(id) FROM valid GROUP BY reply_id, kind)"
            " GROUP BY kind, tier, context ORDER BY kind, tier, min(context_tokens)",
            fingerprint,
        )
        return [SignalGroup(**row) for row in rows]

    def count(self) -> int:
        return self._db.value("SELECT count(*) FROM signals")

    def dropped_count(self) -> int:
        """Return the number of signals that `add` has deleted because there were more than KEEP_SIGNALS,
        since the store was created."""
        return self._db.value("SELECT count FROM signals_dropped") or 0
