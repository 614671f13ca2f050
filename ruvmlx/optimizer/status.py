"""This module describes the optimizer: the speed and the quality of the newest replies, what is in force, the
conditions of all actions that change the runtime by themselves, and the newest actions.

The functions need the store, but not the model's weights, so a command that loads no model can call them.
"""

from typing import Any

from ..kv.pool import HIGH
from ..sona.adapter_history import AdapterHistory
from ..sona.optional.router import MINIMUM as ROUTER_MINIMUM
from ..sona.slow_loops import loop_of_setting, new_ratings_for
from ..store import Store
from ..store.audit_log import WitnessRow
from ..tiers import LENGTHS
from .monitor import WINDOW, PerformanceMonitor
from .optimizer import TOKENS_PER_SECOND

ACTIONS_SHOWN = 8  # the number of newest actions that the facts contain


def optimizer_facts(
    store: Store, history: AdapterHistory, backend: str, mode: str, slow_loop: str
) -> dict[str, Any]:
    """Return the facts about the optimizer of one model on one backend, for JSON. mode and
    slow_loop: the values of the settings `optimizer` and `slow_loop`."""
    mine = (history.fingerprint, backend)
    monitor = PerformanceMonitor(store.kv.speeds(*mine, WINDOW))
    loop = loop_of_setting(slow_loop, history.fingerprint)
    return {
        "optimizer": mode,
        "backend": backend,
        "figures": monitor.facts,
        "in_force": {name: one.value for name, one in store.tunings.all(*mine).items() if one.value},
        "triggers": triggers(store, history, monitor, new_ratings_for(loop)),
        "actions": [_action(row) for row in store.tunings.newest(history.fingerprint, ACTIONS_SHOWN)],
    }


def _action(row: WitnessRow) -> dict[str, Any]:
    """Return a row of the log as an action: the fields of OptimizerAction, with the row's number and time.
    For a row of another part of the runtime, the field `knob` is the row's kind."""
    body, kept = row.body, "kept"
    found: dict[str, Any] = {"measured_before": None, "measured_after": None, "undoes": None, "facts": {}}
    match row.kind:
        case "kv_choice":
            lengths = [body[name] for name in LENGTHS if name in body]
            found |= {"before": str(body["before"]), "after": str(lengths), "why": body["reason"]}
        case "consolidation":
            kept = "kept" if body["version"] is not None else "put back"
            found |= {"before": str(body["parent"]), "after": str(body["version"] or body["parent"])}
            found["why"] = "enough new ratings, or a command"
        case "router":
            kept = "kept" if body["state"] else "put back"
            found |= {"before": "", "after": "", "why": str(body.get("reason", ""))}
        case _:
            found = body
    return {"n": row.seq, "time": row.time / 1e9, "knob": row.kind, "outcome": kept, **found}


def triggers(
    store: Store, history: AdapterHistory, monitor: PerformanceMonitor, due: int
) -> list[dict[str, Any]]:
    """Return the conditions under which the runtime changes something by itself: what it does, the number
    that decides, the number now, and the number from which (or, for `tune`, below which) it acts. due: the
    number of new ratings after which the slow loop starts."""
    newest = monitor.newest()
    return [
        {"action": "merge", "counts": "ratings since the last training", "at": due,
         "now": history.new_and_missing(due)[0]},
        {"action": "router", "counts": "rated choices of the router", "at": ROUTER_MINIMUM,
         "now": store.routes.rated_mark(history.fingerprint, history.name)[0]},
        {"action": "rebalance", "counts": "memory pressure", "at": HIGH,
         "now": newest.pressure if newest else 0.0},
        {"action": "tune", "counts": "tokens per second", "at": TOKENS_PER_SECOND, "now": monitor.speed()},
    ]  # fmt: skip
