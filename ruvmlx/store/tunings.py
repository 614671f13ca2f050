"""This module stores what the optimizer (ruvmlx/optimizer/) tried for a model on a backend, and what it keeps
in force. Each action of the optimizer is also a row of the witness log."""

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from .audit_log import LogFilter, Witness, WitnessRow
from .database import Database, columns

ACTION = "optimizer"  # the kind of the log's rows about actions of the optimizer
# the kinds of the log's rows about what the runtime changes by itself
OWN_CHANGES = (ACTION, "kv_choice", "consolidation", "router")
_LOOK_BACK = 200  # the number of the newest actions, of all models, that `newest` reads


@dataclass(frozen=True)
class Tuning:
    """The newest trial of one knob (a property of the runtime that the optimizer can change).

    value: the value in force; "": the value that applies without the optimizer
    report: figures of the trial
    created: seconds since 1970
    """

    knob: str
    value: str
    report: dict[str, Any]
    created: float = 0.0


@dataclass(frozen=True)
class OptimizerAction:
    """An action of the optimizer, as the log keeps it.

    knob: what was changed. why: the reason. before, after: the value before and after the action
    outcome: "kept" | "put back" | "undone" | "watched" | "forced" | "eased"; "watched": the optimizer only
        measured; "forced": a lack of memory forced the change; "eased": a part of such a change ended
    measured_before, measured_after: the speed in tokens per second; None: not measured
    undoes: the number of the log's row that this action undoes
    facts: further numbers
    """

    knob: str
    why: str
    before: str
    after: str
    outcome: str
    measured_before: float | None = None
    measured_after: float | None = None
    undoes: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Tunings:
    """This class reads and writes the table `tunings`, and the log's rows about it."""

    def __init__(self, db: Database, witness: Witness):
        self._db, self._witness = db, witness

    def all(self, fingerprint: str, backend: str) -> dict[str, Tuning]:
        """Return the newest trial of each knob of one model on one backend."""
        rows = self._db.rows(
            f"SELECT {columns(Tuning)} FROM tunings WHERE fingerprint = ? AND backend = ?",
            fingerprint,
            backend,
        )
        return {row["knob"]: Tuning(**dict(row) | {"report": json.loads(row["report"])}) for row in rows}

    def put(self, fingerprint: str, backend: str, tuning: Tuning, action: OptimizerAction) -> int:
        """Commit a trial together with the log's row about its action. Return the row's number."""
        with self._db.transaction():
            self._db.replace(
                "tunings",
                fingerprint=fingerprint,
                backend=backend,
                knob=tuning.knob,
                value=tuning.value,
                report=json.dumps(tuning.report),
                created=time.time(),
            )
            body = _body(fingerprint, backend, action)
            return self._witness.record(ACTION, body | {"value": tuning.value})

    def note(self, fingerprint: str, backend: str, action: OptimizerAction) -> int:
        """Commit the log's row about an action that changes no stored value. Return the row's number."""
        with self._db.transaction():
            return self._witness.record(ACTION, _body(fingerprint, backend, action))

    def newest(self, fingerprint: str, limit: int) -> list[WitnessRow]:
        """Return the log's newest rows about what the runtime changed by itself for one model, at most
        `limit`, oldest first: actions of the optimizer, choices of KV tiers, and trainings."""
        rows = self._witness.newest(LogFilter(OWN_CHANGES), _LOOK_BACK)
        return [row for row in rows if row.body.get("model") == fingerprint][-limit:]

    def newest_row(self, fingerprint: str, backend: str, knob: str, outcome: str) -> int | None:
        """Return the number of the log's newest row about a knob with this outcome; None if there is none."""
        wanted = {"model": fingerprint, "backend": backend, "knob": knob, "outcome": outcome}
        rows = self._witness.newest(LogFilter((ACTION,)), _LOOK_BACK)
        return next((row.seq for row in reversed(rows) if wanted.items() <= row.body.items()), None)


def _body(fingerprint: str, backend: str, action: OptimizerAction) -> dict[str, Any]:
    return {"model": fingerprint, "backend": backend, **asdict(action)}
