"""Named adapters as things of their own: listed, copied, taken in from elsewhere, deleted."""

from dataclasses import dataclass
from typing import Any

from ..errors import NotFound, UsageError
from .adapters import _ALL, _CHAIN
from .anchors import Anchors
from .witness import digest

KEEP_COPIED = 8  # ancestors of the version copied whose weights are copied too
_PARTS = (  # keyed by fingerprint and name
    "adapters", "adapter_heads", "bases", "attempts", "trainings", "anchors", "deep_runs", "measurements",
    "pruned", "routes", "router_cells",
)  # fmt: skip


@dataclass(frozen=True)
class NamedRow:
    """An adapter of one model. model: the model's name, as far as replies know it; bytes: on the disk."""

    name: str
    fingerprint: str
    model: str
    version: int
    bytes: int


class Named(Anchors):
    """Whole adapters, all their versions together."""

    def named_adapters(self, fingerprint: str | None = None) -> list[NamedRow]:
        """Those that have a version, of one model or of all."""
        rows = self._rows(
            "SELECT h.name, h.fingerprint, coalesce((SELECT model FROM replies r"
            " WHERE r.fingerprint = h.fingerprint ORDER BY seq DESC LIMIT 1), ''), h.version,"
            " (SELECT coalesce(sum(length(state)), 0) FROM adapters a"
            "  WHERE a.fingerprint = h.fingerprint AND a.name = h.name) +"
            " (SELECT coalesce(sum(length(state)), 0) FROM bases b"
            "  WHERE b.fingerprint = h.fingerprint AND b.name = h.name)"
            " FROM adapter_heads h WHERE ?1 IS NULL OR h.fingerprint = ?1 ORDER BY h.name, h.fingerprint",
            fingerprint,
        )
        return [NamedRow(*row) for row in rows]

    def named_adapter(self, fingerprint: str, name: str) -> NamedRow:
        found = [row for row in self.named_adapters(fingerprint) if row.name == name]
        if not found:
            raise NotFound(f"this model has no adapter {name!r}; `ruvmlx adapters ls` lists them.")
        return found[0]

    def _refuse_existing(self, fingerprint: str, name: str) -> None:
        if any(row.name == name for row in self.named_adapters(fingerprint)):
            raise UsageError(
                f"there is an adapter {name!r} already; choose another name, or remove it first."
            )

    # -- taking one in -----------------------------------------------------------------------------------

    def take_in(
        self, fingerprint: str, name: str, state: bytes, base: bytes | None, kl: float, norm: float
    ) -> int:
        """A new adapter from elsewhere; returns its version, 1."""
        with self.transaction():
            self._refuse_existing(fingerprint, name)
            stands_on = self.add_base(fingerprint, name, base, {}) if base is not None else 0
            version = self.add_version(fingerprint, name, 0, state, kl, norm, stands_on)
            self.record("import", {"model": fingerprint, "adapter": name, "version": version})
        return version

    # -- copying one -------------------------------------------------------------------------------------

    def copy_adapter(self, fingerprint: str, name: str, new: str) -> None:
        """The version in use under another name, with its number, the way to it and its ratings."""
        with self.transaction():
            self._refuse_existing(fingerprint, new)
            head = self.adapter_version(fingerprint, name)
            if head == 0:
                raise NotFound(f"adapter {name!r} has learned nothing yet, so there is nothing to save.")
            chain = (fingerprint, name, head, _ALL, new)
            self._copy_versions(*chain)
            self._copy_bases(fingerprint, name, new)
            self._set_head(fingerprint, new, head)
            self._copy_ratings(*chain)
            facts = {"from": name, "version": head}
            self.record("save", {"model": fingerprint, "adapter": new, **facts})

    def _copy_versions(self, *chain: Any) -> None:
        fingerprint, _, _, _, new = chain
        self._db.execute(
            _CHAIN + "INSERT INTO adapters SELECT a.fingerprint, ?5, a.version, a.parent, a.base,"
            f" CASE WHEN c.step <= {KEEP_COPIED} THEN a.state END, a.kl, a.norm, a.created"
            " FROM chain c JOIN adapters a ON a.fingerprint = ?1 AND a.name = ?2 AND a.version = c.version",
            chain,
        )
        sql = "SELECT version, parent, base, state, kl, norm FROM adapters WHERE fingerprint = ? AND name = ?"
        for version, parent, base, state, kl, norm in self._rows(sql, fingerprint, new):
            facts = {"version": version, "parent": parent, "base": base, "kl": kl, "norm": norm}
            facts |= {"state": digest(state) if state is not None else None}
            self.record("version", {"model": fingerprint, "adapter": new, **facts})

    def _copy_bases(self, fingerprint: str, name: str, new: str) -> None:
        """Those that the copied versions stand on."""
        self._db.execute(
            "INSERT INTO bases SELECT fingerprint, ?3, id, state, report, created FROM bases"
            " WHERE fingerprint = ?1 AND name = ?2"
            " AND id IN (SELECT base FROM adapters WHERE fingerprint = ?1 AND name = ?3)",
            (fingerprint, name, new),
        )
        self._forget_old_bases(fingerprint, new)
        sql = "SELECT id, state FROM bases WHERE fingerprint = ? AND name = ?"
        for id_, state in self._rows(sql, fingerprint, new):
            facts = {"id": id_, "state": digest(state) if state is not None else None}
            self.record("base", {"model": fingerprint, "adapter": new, **facts})

    def _copy_ratings(self, *chain: Any) -> None:
        fingerprint, _, _, _, new = chain
        self._db.execute(
            _CHAIN + "INSERT INTO ratings (fingerprint, adapter, version, reply_id, rating, note, weight,"
            " in_force, created) SELECT fingerprint, ?5, version, reply_id, rating, note, weight, in_force,"
            " created FROM ratings WHERE fingerprint = ?1 AND adapter = ?2"
            " AND version IN (SELECT version FROM chain) ORDER BY id",
            chain,
        )
        sql = (
            "SELECT id, version, reply_id, rating, weight FROM ratings WHERE fingerprint = ? AND adapter = ?"
        )
        for id_, version, reply_id, rating, weight in self._rows(sql, fingerprint, new):
            facts = {"id": id_, "version": version, "reply": reply_id, "rating": rating, "weight": weight}
            self.record("rating", {"model": fingerprint, "adapter": new, **facts})

    # -- deleting one ------------------------------------------------------------------------------------

    def delete_adapter(self, fingerprint: str, name: str) -> NamedRow:
        """Delete an adapter with its ratings, weights and traces; returns what it was."""
        with self.transaction():
            row = self.named_adapter(fingerprint, name)
            for table in _PARTS:
                self._db.execute(
                    f"DELETE FROM {table} WHERE fingerprint = ? AND name = ?", (fingerprint, name)
                )
            self._db.execute("DELETE FROM ratings WHERE fingerprint = ? AND adapter = ?", (fingerprint, name))
            # An adapter of this name may begin again at version 1: old traces must not be taken for its own.
            self._db.execute(
                "DELETE FROM traces WHERE reply_id IN"
                " (SELECT id FROM replies WHERE fingerprint = ? AND adapter = ? AND adapter_version > 0)",
                (fingerprint, name),
            )
            self.record("remove", {"model": fingerprint, "adapter": name, "version": row.version})
        self.truncate_log()
        return row
