"""Do the tables say what the witness log says? The chain proves the log; this compares the rest with it."""

from typing import Any

from .adapters import Adapters
from .witness import digest

_MOVES = ("version", "undo", "rollback", "save")  # kinds of rows that put a version in use


def disagreement(store: Adapters) -> str:
    """The first version, base, rating, KV policy or route that is not in the log as it is; "" if all agree.

    A row that is gone is no disagreement: adapters and old weights may be deleted.
    """
    versions, bases = ("version", "adapters", "version"), ("base", "bases", "id")
    with store.reading():
        weights = _weights(store, *versions) or _weights(store, *bases)
        return weights or _ratings(store) or _heads(store) or _kv(store) or _routes(store)


def _weights(store: Adapters, kind: str, table: str, number: str) -> str:
    """Versions or bases, whose bytes the log knows by their digest."""
    known = {_key(row.body, number): row.body["state"] for row in store.witnessed(kind)}
    for *key, state in store._rows(f"SELECT fingerprint, name, {number}, state FROM {table}"):
        what = f"{kind} {key[2]} of adapter {key[1]!r}"
        if tuple(key) not in known:
            return f"{what} is not in the log"
        if state is not None and digest(state) != known[tuple(key)]:
            return f"{what} is not what was written"
    return ""


def _ratings(store: Adapters) -> str:
    logged = [row.body for row in store.witnessed("rating")]
    known = {b["id"]: (*_key(b, "version"), b["reply"], b["rating"], b["weight"]) for b in logged}
    sql = "SELECT id, fingerprint, adapter, version, reply_id, rating, weight FROM ratings"
    for rating_id, *facts in store._rows(sql):
        if known.get(rating_id) != tuple(facts):
            return f"rating {rating_id} is not what was written"
    return ""


def _heads(store: Adapters) -> str:
    """Is every version in use the one that was put in use last?"""
    last: dict[tuple[str, str], int] = {}
    for row in store.witnessed():
        if row.kind in _MOVES:
            last[row.body["model"], row.body["adapter"]] = row.body["version"]
    for fingerprint, name, version in store._rows("SELECT fingerprint, name, version FROM adapter_heads"):
        if last.get((fingerprint, name)) != version:
            return f"adapter {name!r} is at version {version}, which nothing in the log led to"
    return ""


def _kv(store: Adapters) -> str:
    """Is every KV policy in force the one that was chosen last?"""
    logged = [row.body for row in store.witnessed("kv_choice")]
    last = {(b["model"], b["backend"]): (b["hot"], b["warm"]) for b in logged}
    sql = "SELECT fingerprint, backend, hot, warm FROM kv_choices"
    for fingerprint, backend, *policy in store._rows(sql):
        if last.get((fingerprint, backend)) != tuple(policy):
            return f"the KV policy of the {backend} backend is not what was written"
    return ""


def _routes(store: Adapters) -> str:
    """Is every choice of the router, and its cell, as it was written?"""
    known = {b["reply"]: (b["arm"], b["probability"]) for b in (r.body for r in store.witnessed("route"))}
    for reply_id, *facts in store._rows("SELECT reply_id, arm, probability FROM routes"):
        if known.get(reply_id) != tuple(facts):
            return f"the route of reply {reply_id} is not what was written"
    last = {(r.body["model"], r.body["adapter"]): r.body["state"] for r in store.witnessed("router")}
    for fingerprint, name, state in store._rows("SELECT fingerprint, name, state FROM router_cells"):
        if last.get((fingerprint, name)) != (digest(state) if state is not None else None):
            return f"the router of adapter {name!r} is not what was written"
    return ""


def _key(body: dict[str, Any], number: str) -> tuple[Any, ...]:
    return body["model"], body["adapter"], body[number]
