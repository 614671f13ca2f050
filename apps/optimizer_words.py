"""This module describes the optimizer of a runtime in words. The words name the speed and the quality of the
newest replies, the values in force, the conditions of each automatic change, and the newest actions."""

import time
from typing import Any

from ruvmlx.text import count, size

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
# The action of a condition -> the label of its row, and what the runtime does by itself. {at}: the number
# from which the runtime acts; {now}: the number now; {least}: the least number of ratings.
_TRIGGERS = {
    "merge": (
        "background",
        "the background learning starts when you have rated {least} replies or more, and {at} ratings are "
        "new since its last run (now {now} new)",
    ),
    "router": (
        "router",
        "if it is on (see `ruvmlx learn router`), it learns when {at} of its choices are rated (now {now})",
    ),
    "rebalance": (
        "cache",
        "the KV cache gets fewer bits when {at} of the machine's memory is in use (now {now})",
    ),
    "tune": (
        "speed",
        "when replies are slower than {at} tokens a second, ruvmlx tries faster settings (now {now})",
    ),
}


def optimizer_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows of (label, text) about the optimizer. facts: the field `optimizer` of `learn status
    --json`."""
    mode = facts["optimizer"]
    return [
        ("replies", figures_line(facts["figures"])),
        ("optimizer", f"{mode}: {MODES[mode]}{_in_force(facts['in_force'])}"),
        *((_TRIGGERS[trigger["action"]][0], trigger_line(trigger)) for trigger in facts["triggers"]),
        *(("action", f"{_local_time(action['time'])}: {action_line(action)}") for action in facts["actions"]),
    ]


def figures_line(figures: dict[str, Any]) -> str:
    """Return a line with the figures of the newest replies."""
    if not figures["replies"]:
        return "none on this machine yet"
    speed, wait, quality = (figures[name] for name in ("tokens_per_second", "ttft_ms", "quality"))
    parts = [
        f"{count(figures['replies'], 'reply', 'replies')} measured",
        f"{speed:.0f} tokens a second" if speed else "too few tokens to tell the speed",
        f"first word after {wait / 1000:.2f} s" if wait else "",
        f"KV caches up to {size(figures['kv_bytes'])}",
        f"up to {figures['pressure']:.0%} of the machine's memory in use",
        f"quality {quality:.0%} (a guess from the reply's length, repetition and end, not from your rating)"
        if quality is not None
        else "",
    ]
    return ", ".join(filter(None, parts))


def _in_force(values: dict[str, str]) -> str:
    said = ", ".join(f"{KNOBS.get(name, name)} {value}" for name, value in values.items())
    return f"; in force: {said}" if said else ""


def trigger_line(trigger: dict[str, Any]) -> str:
    """Return a line about a condition under which the runtime changes something by itself."""
    from ruvmlx.sona.adapter_history import MINIMUM

    form = ".0%" if trigger["action"] == "rebalance" else ".3g"
    now = "not known" if trigger["now"] is None else f"{trigger['now']:{form}}"
    return _TRIGGERS[trigger["action"]][1].format(least=MINIMUM, at=f"{trigger['at']:{form}}", now=now)


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
