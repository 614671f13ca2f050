"""This module stores the choices of the router (sona/optional/router.py) and of the model selector
(sona/optional/selector.py). The router chooses how a reply is generated, and the selector chooses which model
writes the reply; each possible choice is called an arm. The module also stores the trained cells, which are
small neural networks. The tables hold no words of a chat."""

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .audit_log import Witness, digest
from .database import Database
from .ratings import TEACHES

KEEP_ROUTES = 2000  # the number of newest choices that are kept, of all adapters together


@dataclass(frozen=True)
class RouteRow:
    """One choice of the router. `best` is written only to the witness log."""

    reply_id: str
    fingerprint: str
    name: str  # the name of the adapter
    arm: str
    probability: float
    turns: np.ndarray  # [T, I] float32: the router's inputs, I numbers for each of T turns
    best: dict[str, float]  # {arm: the probability that this arm is the best}


@dataclass(frozen=True)
class RatedRoute:
    """A choice whose reply has a rating in force."""

    reply_id: str
    arm: str
    turns: np.ndarray  # [T, I] float32
    rating: str
    latency_ratio: float


class Routes:
    """This class reads and writes the tables `routes` and `router_cells`. A choice is deleted with its reply,
    because the router's inputs depend on the words of the chat."""

    def __init__(self, db: Database, witness: Witness):
        self._db, self._witness = db, witness

    def add(self, route: RouteRow) -> None:
        """Add a choice. Call inside the transaction that adds the reply."""
        turns = np.asarray(route.turns, "<f4")
        self._db.insert(
            "routes",
            reply_id=route.reply_id,
            fingerprint=route.fingerprint,
            name=route.name,
            arm=route.arm,
            probability=route.probability,
            inputs=turns.shape[1],
            turns=turns.tobytes(),
        )
        facts: dict[str, Any] = {"reply": route.reply_id, "arm": route.arm, "probability": route.probability}
        facts |= {"model": route.fingerprint, "adapter": route.name, "best": route.best}
        self._witness.record("route", facts)
        self._db.execute("DELETE FROM routes WHERE rowid <= (SELECT max(rowid) FROM routes) - ?", KEEP_ROUTES)

    def delete(self, reply_id: str) -> None:
        """Delete a reply's choices, also that of the model. Call inside a transaction."""
        self._db.execute("DELETE FROM routes WHERE reply_id = ?", reply_id)
        self._db.execute("DELETE FROM model_choices WHERE reply_id = ?", reply_id)

    def rated_routes(self, fingerprint: str, name: str, limit: int) -> list[RatedRoute]:
        """Return the choices whose replies have the newest ratings, at most `limit`, the oldest rating
        first."""
        rows = self._db.rows(
            "SELECT o.reply_id, o.arm, o.inputs, o.turns, t.rating, r.latency_ratio FROM routes o"
            " JOIN ratings t ON t.reply_id = o.reply_id AND t.fingerprint = o.fingerprint"
            " AND t.adapter = o.name AND t.in_force JOIN replies r ON r.id = o.reply_id"
            " WHERE o.fingerprint = ? AND o.name = ? ORDER BY t.id DESC LIMIT ?",
            fingerprint,
            name,
            limit,
        )
        return [
            RatedRoute(row["reply_id"], row["arm"], _turns(row), row["rating"], row["latency_ratio"])
            for row in reversed(rows)
        ]

    def newest(self, fingerprint: str, name: str, limit: int) -> list[tuple[str, np.ndarray]]:
        """Return (arm, turns [T, I]) of the newest choices, rated or not, newest first."""
        rows = self._db.rows(
            "SELECT arm, inputs, turns FROM routes WHERE fingerprint = ? AND name = ?"
            " ORDER BY rowid DESC LIMIT ?",
            fingerprint,
            name,
            limit,
        )
        return [(row["arm"], _turns(row)) for row in rows]

    def counts(self, fingerprint: str, name: str) -> dict[str, int]:
        """Return the number of choices by arm."""
        rows = self._db.rows(
            "SELECT arm, count(*) AS chosen FROM routes WHERE fingerprint = ? AND name = ? GROUP BY arm",
            fingerprint,
            name,
        )
        return {row["arm"]: row["chosen"] for row in rows}

    def rated_mark(self, fingerprint: str, name: str) -> tuple[int, int]:
        """Return (count, sum of rating ids) of the rated choices. These numbers change when the reply of a
        choice gains or loses a rating."""
        row = self._db.row(
            "SELECT count(*) AS rated, coalesce(sum(t.id), 0) AS ids FROM routes o"
            " JOIN ratings t ON t.reply_id = o.reply_id"
            " AND t.fingerprint = o.fingerprint AND t.adapter = o.name AND t.in_force"
            " WHERE o.fingerprint = ? AND o.name = ?",
            fingerprint,
            name,
        )
        return (row["rated"], row["ids"]) if row else (0, 0)

    # -- the cell ----------------------------------------------------------------------------------------

    def cell(self, fingerprint: str, name: str) -> tuple[bytes | None, dict[str, Any]]:
        """Return (the low-rank updates of the router's cell that are in use, the report of the cell's last
        training). The updates are None if no training was good enough yet."""
        row = self._db.row(
            "SELECT state, report FROM router_cells WHERE fingerprint = ? AND name = ?", fingerprint, name
        )
        return (row["state"], json.loads(row["report"])) if row else (None, {})

    def put_cell(self, fingerprint: str, name: str, state: bytes | None, report: dict[str, Any]) -> None:
        """Commit the report of a training of the router's cell, and the low-rank updates of the cell to use
        from now on."""
        with self._db.transaction():
            self._db.replace(
                "router_cells",
                fingerprint=fingerprint,
                name=name,
                state=state,
                report=json.dumps(report),
                created=time.time(),
            )
            facts = {"state": digest(state) if state is not None else None, **report}
            self._witness.record("router", {"model": fingerprint, "adapter": name, **facts})


@dataclass(frozen=True)
class ModelChoiceRow:
    """One choice of the model selector. `best` is written only to the witness log.

    reader: the fingerprint of the model that embedded the questions in `turns`. arm: the fingerprint of the
    model that wrote the reply. ms: the reply's milliseconds per token, with the reading of the prompt.
    """

    reply_id: str
    reader: str
    arm: str
    probability: float
    ms: float
    turns: np.ndarray  # [T, I] float32, as in `RouteRow`
    best: dict[str, float]


@dataclass(frozen=True)
class RatedModelChoice:
    """A choice of the model selector. The reply of this choice has a rating in force, and the rating teaches
    (`TEACHES`)."""

    reply_id: str
    arm: str
    turns: np.ndarray  # [T, I] float32
    rating: str
    ms: float


_RATED_CHOICES = (
    " FROM model_choices o JOIN replies r ON r.id = o.reply_id JOIN ratings t ON t.reply_id = o.reply_id"
    f" AND t.fingerprint = o.arm AND t.adapter = r.adapter AND t.in_force AND {TEACHES} WHERE o.reader = ?"
)


class ModelChoices:
    """This class reads and writes the table `model_choices`. `Routes.delete` deletes a choice with its
    reply."""

    def __init__(self, db: Database, witness: Witness):
        self._db, self._witness = db, witness

    def add(self, choice: ModelChoiceRow) -> None:
        """Commit the choice of the model that wrote a reply."""
        turns = np.asarray(choice.turns, "<f4")
        with self._db.transaction():
            self._db.insert(
                "model_choices",
                reply_id=choice.reply_id,
                reader=choice.reader,
                arm=choice.arm,
                probability=choice.probability,
                ms=choice.ms,
                inputs=turns.shape[1],
                turns=turns.tobytes(),
            )
            facts = {"reply": choice.reply_id, "model": choice.arm, "probability": choice.probability}
            self._witness.record("model", facts | {"best": choice.best})
            self._db.execute(
                "DELETE FROM model_choices WHERE rowid <= (SELECT max(rowid) FROM model_choices) - ?",
                KEEP_ROUTES,
            )

    def rated_choices(self, reader: str, limit: int) -> list[RatedModelChoice]:
        """Return the choices whose replies have the newest ratings, at most `limit`, the oldest rating
        first."""
        rows = self._db.rows(
            "SELECT o.reply_id, o.arm, o.inputs, o.turns, o.ms, t.rating"
            + _RATED_CHOICES
            + " ORDER BY t.id DESC LIMIT ?",
            reader,
            limit,
        )
        return [
            RatedModelChoice(row["reply_id"], row["arm"], _turns(row), row["rating"], row["ms"])
            for row in reversed(rows)
        ]

    def rated_mark(self, reader: str) -> tuple[int, int]:
        """Return (count, sum of rating ids) of the rated choices, as `Routes.rated_mark` does."""
        row = self._db.row("SELECT count(*) AS rated, coalesce(sum(t.id), 0) AS ids" + _RATED_CHOICES, reader)
        return (row["rated"], row["ids"]) if row else (0, 0)

    def newest(self, reader: str, limit: int) -> list[tuple[str, np.ndarray]]:
        """Return (arm, turns [T, I]) of the newest choices, rated or not, newest first."""
        rows = self._db.rows(
            "SELECT arm, inputs, turns FROM model_choices WHERE reader = ? ORDER BY rowid DESC LIMIT ?",
            reader,
            limit,
        )
        return [(row["arm"], _turns(row)) for row in rows]

    def counts(self, reader: str) -> dict[str, int]:
        """Return the number of choices by arm."""
        rows = self._db.rows(
            "SELECT arm, count(*) AS chosen FROM model_choices WHERE reader = ? GROUP BY arm", reader
        )
        return {row["arm"]: row["chosen"] for row in rows}

    def newest_feedback(self, fingerprints: Sequence[str], adapter: str) -> str | None:
        """Return the fingerprint of the model that has the newest rating or preference in force for this
        adapter, among these models. Return None if there is none."""
        marks = ", ".join("?" * len(fingerprints))
        of_models = f"WHERE adapter = ? AND in_force AND fingerprint IN ({marks})"
        row = self._db.row(
            f"SELECT fingerprint, created FROM ratings {of_models} UNION ALL"
            f" SELECT fingerprint, created FROM preferences {of_models} ORDER BY created DESC LIMIT 1",
            *(adapter, *fingerprints, adapter, *fingerprints),
        )
        return str(row["fingerprint"]) if row else None


def _turns(row: sqlite3.Row) -> np.ndarray:
    return np.frombuffer(row["turns"], "<f4").reshape(-1, row["inputs"])
