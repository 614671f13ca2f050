"""What the router chose for each reply, and the cell that it learned; numbers alone, no words of a chat."""

import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from .chats import Chats
from .witness import digest

KEEP_ROUTES = 2000  # the newest choices of all adapters together


@dataclass(frozen=True)
class RouteRow:
    """One choice. turns [T, I] float32: what it was made by; best: each arm that could be chosen, and its
    probability of being the best."""

    reply_id: str
    fingerprint: str
    name: str
    arm: str
    probability: float
    turns: np.ndarray
    best: dict[str, float]


@dataclass(frozen=True)
class RatedRoute:
    """A choice whose reply is rated, by a rating in force."""

    reply_id: str
    arm: str
    turns: np.ndarray
    rating: str
    latency_ratio: float


class Routes(Chats):
    """Choices go with their replies, words or not: what they were made by says something about the words."""

    def _route(self, route: RouteRow) -> None:
        """Within the transaction of its reply."""
        turns = np.asarray(route.turns, "<f4")
        self._db.execute(
            "INSERT INTO routes VALUES (?, ?, ?, ?, ?, ?, ?)",
            (route.reply_id, route.fingerprint, route.name, route.arm, route.probability, turns.shape[1],
             turns.tobytes()),
        )  # fmt: skip
        facts: dict[str, Any] = {"reply": route.reply_id, "arm": route.arm, "probability": route.probability}
        self.record("route", {"model": route.fingerprint, "adapter": route.name, "best": route.best, **facts})
        self._db.execute(
            "DELETE FROM routes WHERE rowid <= (SELECT max(rowid) FROM routes) - ?", (KEEP_ROUTES,)
        )

    def rated_routes(self, fingerprint: str, name: str, newest: int) -> list[RatedRoute]:
        """The newest rated choices, in the order of their ratings."""
        rows = self._rows(
            "SELECT o.reply_id, o.arm, o.inputs, o.turns, t.rating, r.latency_ratio FROM routes o"
            " JOIN ratings t ON t.reply_id = o.reply_id AND t.fingerprint = o.fingerprint"
            " AND t.adapter = o.name AND t.in_force JOIN replies r ON r.id = o.reply_id"
            " WHERE o.fingerprint = ? AND o.name = ? ORDER BY t.id DESC LIMIT ?",
            fingerprint,
            name,
            newest,
        )
        return [
            RatedRoute(reply, arm, _matrix(turns, inputs), rating, latency)
            for reply, arm, inputs, turns, rating, latency in reversed(rows)
        ]

    def newest_routes(self, fingerprint: str, name: str, newest: int) -> list[tuple[str, np.ndarray]]:
        """(arm, turns) of the newest choices, rated or not, the newest first."""
        rows = self._rows(
            "SELECT arm, inputs, turns FROM routes WHERE fingerprint = ? AND name = ?"
            " ORDER BY rowid DESC LIMIT ?",
            fingerprint,
            name,
            newest,
        )
        return [(arm, _matrix(turns, inputs)) for arm, inputs, turns in rows]

    def route_counts(self, fingerprint: str, name: str) -> dict[str, int]:
        """How often each arm was chosen."""
        return dict(
            self._rows(
                "SELECT arm, count(*) FROM routes WHERE fingerprint = ? AND name = ? GROUP BY arm",
                fingerprint,
                name,
            )
        )

    def rated_route_mark(self, fingerprint: str, name: str) -> tuple[int, int]:
        """Changes whenever choices come to have ratings in force, or to be gone: their number, their sum."""
        row = self._row(
            "SELECT count(*), coalesce(sum(t.id), 0) FROM routes o JOIN ratings t ON t.reply_id = o.reply_id"
            " AND t.fingerprint = o.fingerprint AND t.adapter = o.name AND t.in_force"
            " WHERE o.fingerprint = ? AND o.name = ?",
            fingerprint,
            name,
        )
        return (row[0], row[1]) if row else (0, 0)

    def questions_of(self, session_id: str) -> list[tuple[str, bytes]]:
        """(question, its pooled state [D] float32) of a chat's replies, where it was read."""
        return self._rows(
            "SELECT r.prompt, r.query FROM messages m JOIN replies r ON r.id = m.reply_id"
            " WHERE m.session_id = ? AND r.query IS NOT NULL ORDER BY m.id",
            session_id,
        )

    # -- the cell ----------------------------------------------------------------------------------------

    def router_cell(self, fingerprint: str, name: str) -> tuple[bytes | None, dict[str, Any]]:
        """The low-rank updates in use, if there are any, and the report of the newest training."""
        row = self._row(
            "SELECT state, report FROM router_cells WHERE fingerprint = ? AND name = ?", fingerprint, name
        )
        return (row[0], json.loads(row[1])) if row else (None, {})

    def put_router_cell(
        self, fingerprint: str, name: str, state: bytes | None, report: dict[str, Any]
    ) -> None:
        """Commit a training: its report, and the updates that are in use from now on."""
        with self.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO router_cells VALUES (?, ?, ?, ?, ?)",
                (fingerprint, name, state, json.dumps(report), time.time()),
            )
            facts = {"state": digest(state) if state is not None else None, **report}
            self.record("router", {"model": fingerprint, "adapter": name, **facts})


def _matrix(blob: bytes, inputs: int) -> np.ndarray:
    return np.frombuffer(blob, "<f4").reshape(-1, inputs)
