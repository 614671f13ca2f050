"""This module compares the store's tables with the witness log (audit_log.py). The hash chain shows changes
of the log; the check in this module shows changes of the tables."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import CorruptFile
from ..tiers import LENGTHS, fill_lengths
from .audit_log import MOVES, WitnessRow, digest
from .store import Store
from .weights import KnownWeights

_VERSION_FACTS = ("parent", "base", "kl", "norm")
_PREFERENCE_FACTS = ("better", "worse", "kind", "strength", "weight")
# seconds: the maximum difference between the times of a table's row and of the log's row about it; one
# transaction writes both rows
_SLACK = 60.0
_ODD_LOG = (AttributeError, CorruptFile, KeyError, RecursionError, TypeError, ValueError)

Body = dict[str, Any]
Key = tuple[Any, ...]


def disagreement(store: Store) -> str:
    """Return a text about the first version, base, rating, preference, head, KV policy, route, choice of a
    model or router that differs from the log. A missing row is a difference, except a KV policy, a route, a
    choice of a model or a router. Return "" if there is no difference. The function does not report missing
    weights as a difference, except those of a version in use."""
    with store.snapshot():
        try:
            logged = _Logged.read(store.witness.rows())
            return next(filter(None, (check(store, logged) for check in _CHECKS)), "")
        except _ODD_LOG as error:
            return f"the log holds a row of another form ({type(error).__name__})"


@dataclass
class _Logged:
    """The contents that the tables must have, according to the log. The keys of most dictionaries begin with
    the model and the adapter."""

    versions: dict[Key, Body] = field(default_factory=dict)
    # the earliest and the latest time (seconds since 1970) that the table can have for each version
    times: dict[Key, tuple[float, float]] = field(default_factory=dict)
    bases: dict[Key, Body] = field(default_factory=dict)
    ratings: dict[Key, Body] = field(default_factory=dict)
    preferences: dict[Key, Body] = field(default_factory=dict)
    heads: dict[Key, int] = field(default_factory=dict)
    policies: dict[Key, Key] = field(default_factory=dict)
    routes: dict[str, Key] = field(default_factory=dict)
    models: dict[str, Key] = field(default_factory=dict)
    routers: dict[Key, str | None] = field(default_factory=dict)
    tunings: dict[Key, str] = field(default_factory=dict)

    @classmethod
    def read(cls, rows: Iterable[WitnessRow]) -> "_Logged":
        logged, before = cls(), math.inf
        for row in rows:
            now = row.time / 1e9
            logged._add(row.kind, row.body)
            # between this row and the row before, the machine can have slept, or its clock can have been set
            # back
            if row.kind == "version":
                logged.times[_key(row.body, "version")] = min(before, now) - _SLACK, now + _SLACK
            before = now
        return logged

    def _add(self, kind: str, body: Body) -> None:
        match kind:
            case "version":
                self.versions[_key(body, "version")] = body
            case "save":
                self._copy_times(body)
            case "base":
                self.bases[_key(body, "id")] = body
            case "rating":
                self.ratings[_key(body, "id")] = body
            case "preference":
                self.preferences[_key(body, "id")] = body
            case "kv_choice":  # an old row of the log has no length for a tier that was added later
                lengths = fill_lengths([body[name] for name in LENGTHS if name in body])
                self.policies[body["model"], body["backend"]] = tuple(lengths)
            case "route":
                self.routes[body["reply"]] = body["arm"], body["probability"]
            case "model":
                self.models[body["reply"]] = body["model"], body["probability"]
            case "router":
                self.routers[_adapter(body)] = body["state"]
            case "optimizer" if "value" in body:
                self.tunings[body["model"], body["backend"], body["knob"]] = body["value"]
            case "remove":
                self._remove(_adapter(body))
        if kind in MOVES:
            self.heads[_adapter(body)] = body["version"]

    def _copy_times(self, body: Body) -> None:
        """Give each version of a copied adapter the times of the same version of the source adapter, which
        can have a smaller number. The source adapter can be deleted already."""
        for key in [key for key in self.times if key[:2] == _adapter(body)]:
            source = self.times.get((body["model"], body["from"], key[2] - body.get("shift", 0)))
            self.times[key] = source or (-math.inf, math.inf)

    def _remove(self, adapter: Key) -> None:
        tables: tuple[dict[Key, Any], ...] = (self.versions, self.times, self.bases)
        for of_adapter in (*tables, self.ratings, self.preferences):
            for key in [key for key in of_adapter if key[:2] == adapter]:
                del of_adapter[key]
        self.heads.pop(adapter, None)
        self.routers.pop(adapter, None)


def _adapter(body: Body) -> Key:
    return body["model"], body["adapter"]


def _key(body: Body, number: str) -> Key:
    return *_adapter(body), body[number]


# -- weights -----------------------------------------------------------------------------------------


def _versions(store: Store, logged: _Logged) -> str:
    missing, before = dict(logged.versions), None
    sql = (
        "SELECT fingerprint, name, version, parent, base, kl, norm, created FROM adapters"
        " ORDER BY fingerprint, name, version"
    )
    for model, name, number, *facts, created in store.db.rows(sql):
        key, what = (model, name, number), f"version {number} of adapter {name!r}"
        body = missing.pop(key, None)
        if body is None:
            return f"{what} is not in the log"
        earliest, latest = logged.times[key]
        if facts != [body[name] for name in _VERSION_FACTS]:
            return f"{what} is not what was written"
        if not earliest <= created <= latest:
            return f"{what} has another time than was written"
        near = before if before and (before.fingerprint, before.name) == key[:2] else None
        try:
            state = store.versions.weights.get(*key, near)
        except CorruptFile:
            return f"{what} is not what was written"
        if not _are_as_written(state, body["state"], logged.heads.get(key[:2]) == number):
            return f"{what} is not what was written"
        before = KnownWeights(*key, created, state) if state is not None else None
    return _first(missing, "version {2} of adapter {1!r} is gone")


def _bases(store: Store, logged: _Logged) -> str:
    missing = dict(logged.bases)
    for rowid, *key in store.db.rows("SELECT rowid, fingerprint, name, id FROM bases"):
        body = missing.pop(tuple(key), None)
        if body is None:
            return f"base {key[2]} of adapter {key[1]!r} is not in the log"
        state = store.db.value("SELECT state FROM bases WHERE rowid = ?", rowid)
        if not _are_as_written(state, body["state"]):
            return f"base {key[2]} of adapter {key[1]!r} is not what was written"
    return _first(missing, "base {2} of adapter {1!r} is gone")


def _are_as_written(state: bytes | None, written: str | None, are_needed: bool = False) -> bool:
    """Return True if the weights equal the weights that were written, or if the weights were deleted and are
    not needed.

    written: the digest of the weights in the log
    are_needed: True if the weights belong to the version in use
    """
    return digest(state) == written if state is not None else not are_needed


def _first(missing: dict[Key, Body], words: str) -> str:
    return next((words.format(*key) for key in missing), "")


# -- feedback ----------------------------------------------------------------------------------------


def _ratings(store: Store, logged: _Logged) -> str:
    missing = dict(logged.ratings)
    sql = "SELECT fingerprint, adapter, id, version, reply_id, rating, weight FROM ratings"
    for model, adapter, id_, *facts in store.db.rows(sql):
        body = missing.pop((model, adapter, id_), None)
        if body is None or facts != [body[name] for name in ("version", "reply", "rating", "weight")]:
            return f"rating {id_} is not what was written"
    return _first(missing, "rating {2} of adapter {1!r} is gone")


def _preferences(store: Store, logged: _Logged) -> str:
    missing, names = dict(logged.preferences), ("version", *_PREFERENCE_FACTS)
    sql = f"SELECT fingerprint, adapter, id, {', '.join(names)} FROM preferences"
    for model, adapter, id_, *facts in store.db.rows(sql):
        body = missing.pop((model, adapter, id_), None)
        if body is None or facts != [body[name] for name in names]:
            return f"preference {id_} is not what was written"
    return _first(missing, "preference {2} of adapter {1!r} is gone")


def _heads(store: Store, logged: _Logged) -> str:
    """Return "" if every head (the version in use of an adapter) is the version that the log put in use last,
    or version 0 of an adapter that has learned nothing; else the first difference."""
    missing = dict(logged.heads)
    for model, name, version in store.db.rows("SELECT fingerprint, name, version FROM adapter_heads"):
        if missing.pop((model, name), 0) != version:
            return f"adapter {name!r} is at version {version}, which nothing in the log led to"
    return next((f"nothing says which version of adapter {name!r} is in use" for _, name in missing), "")


# -- choices -----------------------------------------------------------------------------------------


def _policies(store: Store, logged: _Logged) -> str:
    """Return "" if every KV policy in use is the policy that was chosen last; else the first difference."""
    sql = f"SELECT fingerprint, backend, {', '.join(LENGTHS)} FROM kv_choices"
    for fingerprint, backend, *lengths in store.db.rows(sql):
        if logged.policies.get((fingerprint, backend)) != tuple(lengths):
            return f"the KV policy of the {backend} backend is not what was written"
    return ""


def _tunings(store: Store, logged: _Logged) -> str:
    """Return "" if every value that the optimizer keeps in force is as the log says; else the first
    difference."""
    for fingerprint, backend, knob, value in store.db.rows(
        "SELECT fingerprint, backend, knob, value FROM tunings"
    ):
        if logged.tunings.get((fingerprint, backend, knob)) != value:
            return f"the tuning {knob!r} of the {backend} backend is not what was written"
    return ""


def _routes(store: Store, logged: _Logged) -> str:
    """Return "" if the router's choices and its trained cells (small networks) are as the log says; else the
    first difference."""
    for reply_id, arm, probability in store.db.rows("SELECT reply_id, arm, probability FROM routes"):
        if logged.routes.get(reply_id) != (arm, probability):
            return f"the route of reply {reply_id} is not what was written"
    for reply_id, arm, probability in store.db.rows("SELECT reply_id, arm, probability FROM model_choices"):
        if logged.models.get(reply_id) != (arm, probability):
            return f"the choice of the model for reply {reply_id} is not what was written"
    for fingerprint, name, state in store.db.rows("SELECT fingerprint, name, state FROM router_cells"):
        found = digest(state) if state is not None else None
        if logged.routers.get((fingerprint, name), "none") != found:
            return f"the router of adapter {name!r} is not what was written"
    return ""


_CHECKS: tuple[Callable[[Store, _Logged], str], ...] = (
    _versions, _bases, _ratings, _preferences, _heads, _policies, _tunings, _routes,
)  # fmt: skip
