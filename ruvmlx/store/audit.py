"""Compares the tables with the witness log. The hash chain protects the log, this check the tables."""

from typing import Any

from ..errors import CorruptFile
from ..tiers import LENGTHS, filled
from .store import Store
from .versions import unpacked
from .witness import digest

_MOVES = ("version", "undo", "rollback", "save")  # kinds of rows that put a version in use


def disagreement(store: Store) -> str:
    """The first version, base, rating, preference, head, KV policy or route that differs from the log; "" if
    none does.

    Missing rows are no disagreement: adapters and old weights may be deleted.
    """
    versions, bases = ("version", "adapters", "version"), ("base", "bases", "id")
    with store.snapshot():
        weights = _weights(store, *versions) or _weights(store, *bases)
        given = _ratings(store) or _preferences(store)
        return weights or given or _heads(store) or _kv(store) or _routes(store)


def _weights(store: Store, kind: str, table: str, number: str) -> str:
    """Compare the bytes of versions or bases with the digests in the log."""
    known = {_key(row.body, number): row.body["state"] for row in store.witness.rows(kind)}
    packed = "packed" if table == "adapters" else "0"
    for row in store.db.rows(f"SELECT rowid, fingerprint, name, {number} AS number FROM {table}"):
        key = (row["fingerprint"], row["name"], row["number"])
        what = f"{kind} {row['number']} of adapter {row['name']!r}"
        if key not in known:
            return f"{what} is not in the log"
        if not _as_written(
            store.db.row(f"SELECT state, {packed} FROM {table} WHERE rowid = ?", row["rowid"]), known[key]
        ):
            return f"{what} is not what was written"
    return ""


def _as_written(weights: Any, written: str | None) -> bool:
    try:
        state = unpacked(*weights)
    except CorruptFile:
        return False
    return state is None or digest(state) == written


def _ratings(store: Store) -> str:
    logged = [row.body for row in store.witness.rows("rating")]
    known = {b["id"]: (*_key(b, "version"), b["reply"], b["rating"], b["weight"]) for b in logged}
    sql = "SELECT fingerprint, adapter, version, reply_id, rating, weight, id FROM ratings"
    for *facts, rating_id in store.db.rows(sql):
        if known.get(rating_id) != tuple(facts):
            return f"rating {rating_id} is not what was written"
    return ""


def _preferences(store: Store) -> str:
    facts = ("better", "worse", "kind", "strength", "weight")
    logged = [row.body for row in store.witness.rows("preference")]
    known = {b["id"]: (*_key(b, "version"), *(b[fact] for fact in facts)) for b in logged}
    sql = f"SELECT fingerprint, adapter, version, {', '.join(facts)}, id FROM preferences"
    for *found, id_ in store.db.rows(sql):
        if known.get(id_) != tuple(found):
            return f"preference {id_} is not what was written"
    return ""


def _heads(store: Store) -> str:
    """Is every head the version that was put in use last?"""
    last: dict[tuple[str, str], int] = {}
    for row in store.witness.rows():
        if row.kind in _MOVES:
            last[row.body["model"], row.body["adapter"]] = row.body["version"]
    for fingerprint, name, version in store.db.rows("SELECT fingerprint, name, version FROM adapter_heads"):
        if last.get((fingerprint, name)) != version:
            return f"adapter {name!r} is at version {version}, which nothing in the log led to"
    return ""


def _kv(store: Store) -> str:
    """Is every KV policy in force the one that was chosen last?"""
    logged = [row.body for row in store.witness.rows("kv_choice")]
    # A body from before a tier was added has no length of it.
    last = {(b["model"], b["backend"]): filled([b[n] for n in LENGTHS if n in b]) for b in logged}
    sql = f"SELECT fingerprint, backend, {', '.join(LENGTHS)} FROM kv_choices"
    for fingerprint, backend, *lengths in store.db.rows(sql):
        if last.get((fingerprint, backend)) != tuple(lengths):
            return f"the KV policy of the {backend} backend is not what was written"
    return ""


def _routes(store: Store) -> str:
    """Are the router's choices and cells as they were written?"""
    logged = [row.body for row in store.witness.rows("route")]
    known = {b["reply"]: (b["arm"], b["probability"]) for b in logged}
    for reply_id, arm, probability in store.db.rows("SELECT reply_id, arm, probability FROM routes"):
        if known.get(reply_id) != (arm, probability):
            return f"the route of reply {reply_id} is not what was written"
    last = {(r.body["model"], r.body["adapter"]): r.body["state"] for r in store.witness.rows("router")}
    for fingerprint, name, state in store.db.rows("SELECT fingerprint, name, state FROM router_cells"):
        if last.get((fingerprint, name)) != (digest(state) if state is not None else None):
            return f"the router of adapter {name!r} is not what was written"
    return ""


def _key(body: dict[str, Any], number: str) -> tuple[Any, ...]:
    return body["model"], body["adapter"], body[number]
