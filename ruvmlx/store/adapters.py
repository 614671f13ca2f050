"""This module lists, copies, imports and deletes whole adapters, with all their versions."""

from dataclasses import dataclass

from ..errors import NotFound, UsageError
from .audit_log import Witness
from .bases import Bases
from .database import Database
from .preferences import Preferences
from .ratings import Ratings
from .traces import Traces
from .versions import Versions

_TABLES = (  # the tables whose rows belong to an adapter (columns fingerprint and name)
    "adapters", "adapter_heads", "bases", "attempts", "trainings", "anchors", "deep_runs", "measurements",
    "pruned", "routes", "router_cells",
)  # fmt: skip


@dataclass(frozen=True)
class NamedRow:
    """An adapter of one model."""

    name: str
    fingerprint: str
    model: str  # the name of the adapter's model, from the model's newest reply; "" if the model has no reply
    version: int  # the version in use
    bytes: int  # the number of bytes of all weights of this adapter in the store


class Adapters:
    """This class manages named adapters. An adapter exists once it has a version, or once `begin` has begun
    it."""

    def __init__(
        self,
        db: Database,
        witness: Witness,
        versions: Versions,
        bases: Bases,
        ratings: Ratings,
        preferences: Preferences,
        traces: Traces,
    ):
        self._db, self._witness = db, witness
        self._versions, self._bases, self._traces = versions, bases, traces
        self._ratings, self._preferences = ratings, preferences

    def all(self, fingerprint: str | None = None) -> list[NamedRow]:
        """Return the adapters of one model, or of all models, sorted by name."""
        rows = self._db.rows(
            "SELECT h.name, h.fingerprint, h.version, coalesce((SELECT model FROM replies r"
            " WHERE r.fingerprint = h.fingerprint ORDER BY seq DESC LIMIT 1), '') AS model,"
            " (SELECT coalesce(sum(length(state)), 0) FROM adapters a"
            "  WHERE a.fingerprint = h.fingerprint AND a.name = h.name) +"
            " (SELECT coalesce(sum(length(state)), 0) FROM bases b"
            "  WHERE b.fingerprint = h.fingerprint AND b.name = h.name) AS bytes"
            " FROM adapter_heads h WHERE ?1 IS NULL OR h.fingerprint = ?1 ORDER BY h.name, h.fingerprint",
            fingerprint,
        )
        return [NamedRow(**row) for row in rows]

    def get(self, fingerprint: str, name: str) -> NamedRow:
        """Return one adapter. Raises NotFound if the model has no adapter with this name."""
        found = [row for row in self.all(fingerprint) if row.name == name]
        if not found:
            raise NotFound(f"this model has no adapter {name!r}; `ruvmlx adapters ls` lists its adapters.")
        return found[0]

    def begin(self, fingerprint: str, name: str) -> None:
        """Make an adapter of version 0, the original model, if the model has no adapter with this name."""
        with self._db.transaction():
            self._db.execute("INSERT OR IGNORE INTO adapter_heads VALUES (?, ?, 0)", fingerprint, name)

    def add(
        self, fingerprint: str, name: str, state: bytes, base: bytes | None, kl: float, norm: float
    ) -> int:
        """Commit an imported adapter. Returns the number of the adapter's first version: 1, or the number
        after the last version of a removed adapter of this name. Raises UsageError if the name is taken.

        state: a MicroLoRA as bytes
        base: a BaseLoRA as bytes; None: the adapter has no base LoRA
        """
        with self._db.transaction():
            self._refuse_existing(fingerprint, name)
            base_id = self._bases.add(fingerprint, name, base, {}) if base is not None else 0
            version = self._versions.add(fingerprint, name, 0, state, kl, norm, base_id)
            self._witness.record("import", {"model": fingerprint, "adapter": name, "version": version})
        return version

    def copy(self, fingerprint: str, name: str, new: str) -> None:
        """Commit a copy of an adapter's version in use, under a new name. The copy keeps the version's
        ancestors, ratings and preferences. The copy keeps the numbers of the versions, unless an adapter of
        the new name was removed: the numbers then go on where that adapter's numbers ended.

        Raises UsageError if the new name is taken, and NotFound if the adapter has no version in use.
        """
        with self._db.transaction():
            self._refuse_existing(fingerprint, new)
            head = self._versions.head(fingerprint, name)
            if head == 0:
                raise NotFound(f"adapter {name!r} has learned nothing yet, so there is nothing to save.")
            shift = self._versions.newest(fingerprint, new)
            for part in (self._versions, self._ratings, self._preferences):
                part.copy(fingerprint, name, new, head, shift)
            facts = {"from": name, "version": head + shift} | ({"shift": shift} if shift else {})
            self._witness.record("save", {"model": fingerprint, "adapter": new, **facts})

    def delete(self, fingerprint: str, name: str) -> NamedRow:
        """Delete an adapter with its ratings, preferences, weights and traces. Returns the adapter's row as
        it was before the deletion."""
        with self._db.transaction():
            row = self.get(fingerprint, name)
            last = self._versions.newest(fingerprint, name), self._bases.newest(fingerprint, name)
            self._db.replace(
                "removed_adapters", fingerprint=fingerprint, name=name, version=last[0], base=last[1]
            )
            for table in _TABLES:
                self._db.execute(f"DELETE FROM {table} WHERE fingerprint = ? AND name = ?", fingerprint, name)
            self._ratings.delete(fingerprint, name)
            self._preferences.delete(fingerprint, name)
            self._traces.delete_of_adapter(fingerprint, name)
            self._witness.record("remove", {"model": fingerprint, "adapter": name, "version": row.version})
        self._db.truncate_log()
        return row

    def _refuse_existing(self, fingerprint: str, name: str) -> None:
        if self._db.row("SELECT 1 FROM adapters WHERE fingerprint = ? AND name = ?", fingerprint, name):
            raise UsageError(
                f"there is an adapter {name!r} already; choose another name, or remove it first."
            )
