"""This module describes the optimizer of a runtime in words. The words name the speed and the quality of the
newest replies, the values in force, the conditions of each automatic change, and the newest actions."""

import time
from typing import Any

from ruvmlx.text import size

MODES = {
    "on": "it measures in idle time and keeps what makes replies faster",
    "watch": "it measures in idle time and changes nothing",
    "off": "it neither measures nor changes anything",
}
KNOBS = {
    "speculate": "guessed tokens",
    "threads": "cores that compute",
    "batch": "replies at a time",
    "kv_level": "bits of the KV cache",
    "kv_tiers": "bits of new KV caches",
    "kv_choice": "bits of new KV caches",
    "consolidation": "version, by background training,",
    "router": "router",
}
_TRIGGERS = {
    "merge": "background training",
    "router": "a training of the router",
    "rebalance": "fewer bits for the KV cache",
    "tune": "trials of what is faster",
}


def optimizer_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows of (label, text) about the optimizer. facts: the field `optimizer` of `learn status
    --json`."""
    mode = facts["optimizer"]
    return [
        ("replies", figures_line(facts["figures"])),
        ("optimizer", f"{mode}: {MODES[mode]}{_in_force(facts['in_force'])}"),
        *(("by itself", trigger_line(trigger)) for trigger in facts["triggers"]),
        *(("action", f"{_local_time(action['time'])}: {action_line(action)}") for action in facts["actions"]),
    ]


def figures_line(figures: dict[str, Any]) -> str:
    """Return a line with the figures of the newest replies."""
    if not figures["replies"]:
        return "none on this machine yet"
    speed, wait, quality = (figures[name] for name in ("tokens_per_second", "ttft_ms", "quality"))
    parts = [
        f"the newest {figures['replies']}",
        f"{speed:.0f} tokens a second" if speed else "speed not known yet",
        f"first word after {wait / 1000:.2f} s" if wait else "",
        f"caches up to {size(figures['kv_bytes'])}",
        f"memory pressure up to {figures['pressure']:.0%}",
        f"estimated quality {quality:.0%}" if quality is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _in_force(values: dict[str, str]) -> str:
    said = ", ".join(f"{KNOBS.get(name, name)} {value}" for name, value in values.items())
    return f"; in force: {said}" if said else ""


def trigger_line(trigger: dict[str, Any]) -> str:
    """Return a line about a condition under which the runtime changes something by itself."""
    form = ".0%" if trigger["action"] == "rebalance" else ".3g"
    now = "not known" if trigger["now"] is None else f"{trigger['now']:{form}}"
    limit = "below" if trigger["action"] == "tune" else "at"
    what = _TRIGGERS[trigger["action"]]
    return f"{what}: {limit} {trigger['at']:{form}} {trigger['counts']} (now {now})"


def action_line(action: dict[str, Any]) -> str:
    """Return a line about an action: what it changed, the reason, and the measured speeds."""
    before, after = action["measured_before"], action["measured_after"]
    measured = f" ({before:.1f} to {after:.1f} tokens a second)" if before and after else ""
    undone = f", takes back row {action['undoes']}" if action["undoes"] else ""
    knob = KNOBS.get(action["knob"], action["knob"])
    change = f"{knob} {action['before']} to {action['after']}" if action["after"] else knob
    return f"{change}, {action['outcome']}{measured}{undone}: {action['why']}"


def _local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def tuning_line(report: dict[str, Any]) -> str:
    """Return a line about a trial. report: what `RealtimeOptimizer.work` returns."""
    knob = KNOBS.get(report["knob"], report["knob"])
    if report["outcome"] == "none":
        return f"{knob}: not tried, {report['reason']}"
    kept = f"{report['value']} is in force" if report["outcome"] == "kept" else "nothing changed"
    return f"{knob}: {kept}; {report['reason']}"
