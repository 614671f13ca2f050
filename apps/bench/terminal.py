"""This module formats a report of `ruvmlx bench` as text for a terminal: a table for each suite, then bars of
the decode speed for each length of the context."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from .compare import RowChange
from .rows import verdict

WIDTH = 40  # the number of characters of the longest bar
_SIGNS = {"faster": "+", "slower": "-", "same": "="}


def row_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of text for the rows, suite by suite."""
    for suite, of_suite in groupby(rows, lambda row: row["suite"]):
        yield f"{suite}"
        yield from (_row(row) for row in of_suite)
        yield ""


def end_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of text that come after the rows of all suites."""
    yield from _bars(by_context(report["rows"]))
    yield from footer(report)


def footer(report: Mapping[str, Any]) -> Iterator[str]:
    machine, limits = report["machine"], report["limits"]
    read, multiply = limits["memory"] / 1e9, limits["products"] / 1e9
    yield (
        f"{machine['chip']}, {machine['threads']} threads: reads {read:.1f} GB/s, "
        f"{multiply:.0f} G products/s; {report['seconds']:.0f} s"
    )
    if report["throttled"]:
        yield (
            f"The machine became {report['drift']:.0%} slower during the run (heat, or other work): "
            "do not compare figures of different suites. Run it again when the machine is idle."
        )


def _row(row: Mapping[str, Any]) -> str:
    value = "-" if row["value"] is None else f"{row['value']:g}"
    against = "" if row["target"] is None else f"target {row['target']:g}"
    share = "" if row["share"] is None else f"{row['share']:.0%} of limit"
    spread = f"±{row['spread']:.0%}" if row["spread"] else ""
    note = "; ".join(part for part in (row["condition"], row["note"]) if part)
    said = verdict(row).replace("not met", "NOT MET")
    figure = f"{value:>8} {row['unit']:<6}{spread:<5}"
    return f"  {row['name']:<50} {figure} {against:<13} {said:<8}{share:<14}{note}".rstrip()


def by_context(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return {player: [(context tokens, decoded tokens a second)]} from the rows of the model suite."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        at, _, player = row["name"].removeprefix("decode at ").partition(": ")
        if row["suite"] == "model" and row["unit"] == "tok/s" and at.isdigit() and row["value"]:
            found.setdefault(player, []).append((int(at), row["value"]))
    return found


def _bars(series: Mapping[str, Sequence[tuple[int, float]]]) -> Iterator[str]:
    most = max((rate for points in series.values() for _, rate in points), default=0)
    if not most:
        return
    yield "decode, tokens a second, by tokens of context"
    for context in sorted({c for points in series.values() for c, _ in points}):
        for player, points in series.items():
            if rate := dict(points).get(context):
                yield f"  {context:>6} {player:<22} {'█' * max(1, round(WIDTH * rate / most))} {rate:.0f}"
    yield ""


def changes(
    found: Sequence[RowChange], verdicts: Sequence[tuple[str, str, str]], differences: Sequence[str]
) -> Iterator[str]:
    for what in differences:
        yield f"not the same: {what}"
    for change in found:
        if change.ratio is None:
            yield f"  {change.name:<58} {change.verdict}"
            continue
        size = f"{change.ratio - 1:+.1%}"
        yield (
            f"{_SIGNS[change.verdict]} {change.name:<58} {change.old or 0:>9g} -> {change.new or 0:<9g} "
            f"{change.unit:<6} {size:>7}  p {change.p:.4f}  {change.verdict}"
        )
    yield "p: how often chance alone makes such a difference"
    counts = {v: sum(c.verdict == v for c in found) for v in _SIGNS}
    yield ", ".join(f"{n} {said}" for said, n in counts.items())
    other = [f"{name}: {was} -> {now}" for name, was, now in verdicts if was != now]
    against = sum({was, now} == {"met", "not met"} for _, was, now in verdicts)
    if not verdicts:
        return
    yield (
        f"targets: {len(verdicts) - len(other)} of {len(verdicts)} with the same verdict,"
        f" {against} met in one and not in the other"
    )
    yield from (f"  {line}" for line in other)
