"""This module writes the report as Markdown: a summary for people, then all data as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ruvmlx.text import size

Facts = Mapping[str, Any]


def markdown(report: Facts) -> str:
    parts = [_head(report), _checks(report), _kernels(report)]
    parts += [_speed(report[name]) for name in ("speed", "speed_cpu") if name in report]
    parts += [_failed_section(report["failed"])] if report["failed"] else []
    everything = json.dumps(report, indent=1, ensure_ascii=False)
    fold = f"<details><summary>Everything, as JSON</summary>\n\n```json\n{everything}\n```\n\n</details>"
    return "\n\n".join([*parts, fold]) + "\n"


def _head(report: Facts) -> str:
    machine, model = report.get("machine", {}), report.get("model", {})
    on = "The GPU was used." if report.get("gpu") else "NO GPU: MLX found none; all figures are from the CPU."
    lines = [
        "# ruvmlx doctor",
        on,
        f"{machine.get('chip', 'unknown chip')}, {machine.get('cores', '?')} cores, "
        f"{size(machine.get('memory', 0))}, {machine.get('system', 'unknown system')}, "
        f"Python {machine.get('python', '?')}, power: {machine.get('power', '?')}",
        _fact_list(machine.get("versions", {})) + f", commit {machine.get('commit') or 'unknown'}",
    ]
    if model:
        name = "the starter model" if model["starter"] else f"a {model['type']} model"
        lines.append(
            f"Measured on {name}: {model['parameters'] / 1e6:.0f} M parameters, {model['bits']} bits."
        )
    lines.append(
        f"Made on {report['made']} in {report['seconds']} s; {report['slower_at_the_end']:.0%} slower at the "
        f"end than at the beginning; load average before: {report.get('load_before', {}).get('load', '?')}."
    )
    lines += [_heat(report)] if "heat_before" in report else []
    return "\n\n".join(lines)


def _heat(report: Facts) -> str:
    before, after = report["heat_before"], report.get("heat_after", {})
    low = {True: "on", False: "off"}.get(before.get("low_power_mode"), "unknown")
    states = [heat.get("thermal_state", "unknown") for heat in (before, after)]
    return f"Thermal state: {states[0]} before, {states[1]} after; low-power mode: {low}."


def _fact_list(facts: Facts) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _checks(report: Facts) -> str:
    rows = [
        (c["name"], "ok" if c["ok"] else "FAIL", c.get("error") or c.get("detail", ""))
        for c in report["checks"]
    ]
    return "## Checks\n\n" + _table(("check", "", ""), rows)


def _kernels(report: Facts) -> str:
    verdicts = report.get("kernels")
    if not verdicts:
        return "## GPU kernels\n\nNo kernel was checked on this machine."
    columns = list(dict.fromkeys(name for verdict in verdicts for name in verdict if name != "message"))
    rows = [[verdict.get(name, "") for name in columns] for verdict in verdicts]
    shapes = report.get("kernel_shapes", [])
    more = [_table(_SHAPE_COLUMNS, list(map(_shape_row, shapes)))] if shapes else []
    every = [*verdicts, *(result for shape in shapes for result in shape.get("results", []))]
    return "\n\n".join(["## GPU kernels", _table(columns, rows), *more, *_messages(every)])


_SHAPE_COLUMNS = ("head size", "type", "group", "verdict", "attention x MLX's, 2,048 tokens", "256 tokens")


def _shape_row(shape: Facts) -> Sequence[Any]:
    results = {result["name"]: result for result in shape.get("results", [])}
    wrong = "; ".join(f"{name}: {result['why']}" for name, result in results.items() if not result["ok"])
    ratios = [results.get(name, {}).get("ratio") for name in ("attend_decode", "attend_decode_256")]
    verdict = shape.get("error") or wrong or "ok"
    return (shape["head_dim"], shape["dtype"], shape["group"], verdict, *(ratio or "" for ratio in ratios))


def _messages(verdicts: Sequence[Facts]) -> Iterator[str]:
    """Yield each long message of the GPU compiler once, with the names of the kernels that it is about."""
    kernels: dict[str, list[str]] = {}
    for verdict in verdicts:
        if len(lines := verdict.get("message", [])) > 1:
            kernels.setdefault("\n".join(lines), []).append(verdict["name"])
    for message, names in kernels.items():
        yield f"{', '.join(dict.fromkeys(names))}:\n\n" + "\n".join(
            f"    {line}" for line in message.splitlines()
        )


def _speed(speed: Facts) -> str:
    """Return the report's section on speed. For each length of the prompt, the section has the tokens per
    second of each runtime, the ratio to mlx-lm's speed, and the runtime's memory."""
    lines = ["## Speed"]
    for length in speed["lengths"]:
        lines.append(
            f"A prompt of {length['prompt']} tokens, a reply of {length['decoded']}; tokens a second:"
        )
        lines.append(_table(_COLUMNS, _rows(length)))
    if not speed["lengths"]:
        lines.append("Nothing could be measured.")
    lines += [f"Left out: {name}: {why}" for name, why in speed["left_out"].items()]
    return "\n\n".join(lines)


_COLUMNS = (
    "",
    "rounds",
    "prefill",
    "x mlx-lm",
    "decode",
    "x mlx-lm",
    "MLX peak",
    "MLX cache",
    "process peak",
)


def _rows(length: Facts) -> Iterator[Sequence[Any]]:
    for name, rate in length["rates"].items():
        ratio, held = length["ratios"].get(name, {}), length["memory"][name]
        yield (
            name,
            rate["rounds"],
            rate["prefill"]["median"],
            ratio.get("prefill", ""),
            rate["decode"]["median"],
            ratio.get("decode", ""),
            *(size(held[k]) if k in held else "" for k in ("mlx_peak", "mlx_cache", "peak_resident")),
        )


def _failed_section(failed: Mapping[str, str]) -> str:
    return "## Parts that failed\n\n" + "\n".join(f"* {name}: {why}" for name, why in failed.items())


def _table(columns: Sequence[str], rows: Iterator[Sequence[Any]] | Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table. In the cells, line breaks become spaces, and vertical bars are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
