"""What the KV cache did and what its policies were measured to cost; numbers alone, no words of a chat."""

import json
import time
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from .routes import Routes

KEEP_OBSERVATIONS = 2000  # the newest replies
KEEP_MEASURED = 32  # replies, the newest, of a model on a backend


@dataclass(frozen=True)
class KVObservation:
    """One reply's cache when it ended. hot, warm: the policy that was asked for, in tokens; level: how far
    memory pressure had tightened it; pressure: 0 to 1. us_per_token: of decoding, 0 if nothing was."""

    reply_id: str
    fingerprint: str
    backend: str
    hot: int
    warm: int
    tokens: int
    hot_bytes: int
    warm_bytes: int
    cold_bytes: int
    us_per_token: float
    pressure: float
    level: int


@dataclass(frozen=True)
class KVMeasured:
    """A reply read with a policy and with the f16 cache. total, squares: of the KL of each block, nats per
    token. us, us_f16: a decoded token's time at the end of it, one measured beside the other."""

    reply_id: str
    hot: int
    warm: int
    blocks: int
    total: float
    squares: float
    us: float
    us_f16: float


@dataclass(frozen=True)
class KVChoiceRow:
    """The policy in force for new caches, and the report that says why."""

    hot: int
    warm: int
    report: dict[str, Any]
    created: float


class KVRecords(Routes):
    """Bounded tables: what is older than their length goes."""

    def _observe(self, seen: KVObservation) -> None:
        """Within the transaction of its reply. A policy other than the last reply's is witnessed."""
        last = self._row(
            "SELECT hot, warm FROM kv_observations WHERE fingerprint = ? AND backend = ?"
            " ORDER BY id DESC LIMIT 1",
            seen.fingerprint,
            seen.backend,
        )
        if last is not None and last != (seen.hot, seen.warm):
            facts = {"model": seen.fingerprint, "backend": seen.backend, "reply": seen.reply_id}
            self.record("kv_used", facts | {"hot": seen.hot, "warm": seen.warm, "before": list(last)})
        self._db.execute(
            f"INSERT INTO kv_observations VALUES (NULL{', ?' * 12}, ?)", (*astuple(seen), time.time())
        )
        self._db.execute(
            "DELETE FROM kv_observations WHERE id <= (SELECT max(id) FROM kv_observations) - ?",
            (KEEP_OBSERVATIONS,),
        )

    def kv_observations(self, fingerprint: str, backend: str, newest: int) -> list[KVObservation]:
        """The newest first."""
        rows = self._rows(
            "SELECT reply_id, fingerprint, backend, hot, warm, tokens, hot_bytes, warm_bytes, cold_bytes,"
            " us_per_token, pressure, level FROM kv_observations WHERE fingerprint = ? AND backend = ?"
            " ORDER BY id DESC LIMIT ?",
            fingerprint,
            backend,
            newest,
        )
        return [KVObservation(*row) for row in rows]

    # -- measured ------------------------------------------------------------------------------------

    def long_replies(self, fingerprint: str, tokens: int) -> list[str]:
        """Ids of the newest KEEP_MEASURED replies of at least so many tokens, the prompt's included."""
        rows = self._rows(
            "SELECT id FROM replies WHERE fingerprint = ? AND length(prompt_ids) + length(sampled_ids) >= ?"
            " ORDER BY seq DESC LIMIT ?",
            fingerprint,
            4 * tokens,
            KEEP_MEASURED,
        )
        return [row[0] for row in rows]

    def reply_tokens(self, reply_id: str) -> list[int]:
        """The prompt's and the reply's; none when it was deleted."""
        row = self._row("SELECT prompt_ids, sampled_ids FROM replies WHERE id = ?", reply_id)
        return np.frombuffer(b"".join(row), "<i4").tolist() if row else []

    def add_kv_measured(self, fingerprint: str, backend: str, found: KVMeasured) -> None:
        """Commit a measurement; those of the oldest replies go, all policies of a reply at once."""
        mine = (fingerprint, backend)
        with self.transaction():
            self._db.execute(
                f"INSERT OR REPLACE INTO kv_measured VALUES (?, ?{', ?' * 8}, ?)",
                (*mine, *astuple(found), time.time()),
            )
            self._db.execute(
                "DELETE FROM kv_measured WHERE fingerprint = ?1 AND backend = ?2 AND reply_id NOT IN"
                " (SELECT reply_id FROM kv_measured WHERE fingerprint = ?1 AND backend = ?2"
                "  GROUP BY reply_id ORDER BY max(created) DESC, max(rowid) DESC LIMIT ?3)",
                (*mine, KEEP_MEASURED),
            )

    def kv_measured(self, fingerprint: str, backend: str) -> list[KVMeasured]:
        rows = self._rows(
            "SELECT reply_id, hot, warm, blocks, total, squares, us, us_f16 FROM kv_measured"
            " WHERE fingerprint = ? AND backend = ? ORDER BY created, rowid",
            fingerprint,
            backend,
        )
        return [KVMeasured(*row) for row in rows]

    # -- chosen --------------------------------------------------------------------------------------

    def kv_choice(self, fingerprint: str, backend: str) -> KVChoiceRow | None:
        row = self._row(
            "SELECT hot, warm, report, created FROM kv_choices WHERE fingerprint = ? AND backend = ?",
            fingerprint,
            backend,
        )
        return KVChoiceRow(row[0], row[1], json.loads(row[2]), row[3]) if row else None

    def put_kv_choice(self, fingerprint: str, backend: str, choice: KVChoiceRow) -> None:
        """Commit a choice; another policy than before is witnessed, with the reason."""
        with self.transaction():
            before = self.kv_choice(fingerprint, backend)
            was = [before.hot, before.warm] if before else None
            self._db.execute(
                "INSERT OR REPLACE INTO kv_choices VALUES (?, ?, ?, ?, ?, ?)",
                (fingerprint, backend, choice.hot, choice.warm, json.dumps(choice.report), choice.created),
            )
            if was != [choice.hot, choice.warm]:
                facts = {"model": fingerprint, "backend": backend, "hot": choice.hot, "warm": choice.warm}
                self.record("kv_choice", facts | {"before": was, "reason": choice.report["reason"]})
