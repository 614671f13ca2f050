"""What the learning loop remembers beside ratings: how questions look to the model, and signals."""

import time
from dataclasses import dataclass

import numpy as np

from .database import vector
from .named import Named

KEEP_SIGNALS = 10_000  # the newest; how many older ones were let go is counted


@dataclass(frozen=True)
class SignalRow:
    """One signal about a reply. label: a rating ("up", "4") or what was done ("copied")."""

    reply_id: str
    kind: str  # "explicit" | "implicit"
    label: str
    quality: float  # 0 to 1
    reward: float  # quality * max(0, 2 - latency_ratio)
    latency_ratio: float
    tier: int
    context_tokens: int


class Signals(Named):
    """The trajectory buffer: bounded, and it never drops a signal silently."""

    def add_signals(self, rows: list[SignalRow]) -> None:
        """Commit signals, the oldest first; those of replies that were deleted meanwhile are left out."""
        with self.transaction():
            for r in rows:
                self._db.execute(
                    "INSERT INTO signals (reply_id, kind, label, quality, reward, latency_ratio, tier,"
                    " context_tokens, created) SELECT id, ?, ?, ?, ?, ?, ?, ?, ? FROM replies WHERE id = ?",
                    (r.kind, r.label, r.quality, r.reward, r.latency_ratio, r.tier, r.context_tokens,
                     time.time(), r.reply_id),
                )  # fmt: skip
            dropped = self._db.execute(
                "DELETE FROM signals WHERE id <= (SELECT id FROM signals ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (KEEP_SIGNALS,),
            ).rowcount
            if dropped:
                self._db.execute("UPDATE signals_dropped SET count = count + ?", (dropped,))

    def signals(self, fingerprint: str, kind: str | None = None) -> list[SignalRow]:
        """Signals about a model's replies, the oldest first."""
        rows = self._rows(
            "SELECT s.reply_id, s.kind, s.label, s.quality, s.reward, s.latency_ratio, s.tier,"
            " s.context_tokens FROM signals s JOIN replies r ON r.id = s.reply_id"
            " WHERE r.fingerprint = ? AND (?2 IS NULL OR s.kind = ?2) ORDER BY s.id",
            fingerprint,
            kind,
        )
        return [SignalRow(*row) for row in rows]

    def signal_count(self) -> int:
        row = self._row("SELECT count(*) FROM signals")
        return row[0] if row else 0

    def signals_dropped(self) -> int:
        """Signals let go since the store was made."""
        row = self._row("SELECT count FROM signals_dropped")
        return row[0] if row else 0

    # -- questions -----------------------------------------------------------------------------------

    def rated(self, fingerprint: str, name: str) -> list[tuple[str, str]]:
        """(reply_id, rating) of every rating in force, the oldest first: `ratings` without the vectors."""
        return self._rows(
            "SELECT reply_id, rating FROM ratings WHERE fingerprint = ? AND adapter = ? AND in_force"
            " ORDER BY id",
            fingerprint,
            name,
        )

    def set_query(self, reply_id: str, query: np.ndarray) -> None:
        """Keep a question's pooled state [D] with the reply that answers it."""
        with self.transaction():
            self._db.execute(
                "UPDATE replies SET query = ? WHERE id = ?", (query.astype("<f4").tobytes(), reply_id)
            )

    def query(self, reply_id: str) -> np.ndarray | None:
        row = self._row("SELECT query FROM replies WHERE id = ?", reply_id)
        return vector(row[0]) if row else None

    def examples_used(self, fingerprint: str) -> list[str]:
        """Every use of a reply as an example: its id, as often as it was used."""
        rows = self._rows(
            "SELECT examples FROM replies WHERE fingerprint = ? AND examples != ''", fingerprint
        )
        return [reply_id for row in rows for reply_id in row[0].split()]

    def whitening(self, fingerprint: str) -> bytes | None:
        row = self._row("SELECT data FROM whitening WHERE fingerprint = ?", fingerprint)
        return row[0] if row else None

    def put_whitening(self, fingerprint: str, data: bytes) -> None:
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO whitening VALUES (?, ?)", (fingerprint, data))
