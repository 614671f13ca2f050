"""This module writes a report as text: the rows of a table for each suite, then bars of decode speed by
context."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from .compare import RowChange
from .rows import verdict

WIDTH = 40  # characters of the longest bar
VERDICTS = ("faster", "slower", "same")
IN_WORDS = {"same": "the same"}


def by_suite(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield (suite, rows of its table): what was measured, value, target, verdict, share of the limit."""
    for suite, of_suite in groupby(rows, lambda row: row["suite"]):
        yield suite, [_row(row) for row in of_suite]


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


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    value = "-" if row["value"] is None else f"{row['value']:g} {row['unit']}"
    spread = f" ±{row['spread']:.0%}" if row["spread"] else ""
    target = "" if row["target"] is None else f"{row['target']:g}"
    share = "" if row["share"] is None else f"{row['share']:.0%}"
    note = "; ".join(part for part in (row["condition"], row["note"]) if part)
    said = verdict(row).replace("not met", "NOT MET")
    return row["name"] + (f" ({note})" if note else ""), value + spread, target, said, share


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


def change_row(change: RowChange) -> tuple[str, ...]:
    """Return a row of the table of changes: what was measured, old and new value, their unit, change in
    percent, p-value, verdict."""
    old, new = ("" if value is None else f"{value:g}" for value in (change.old, change.new))
    values = old, new, change.unit
    if change.ratio is None or change.p is None:
        return change.name, *values, "", "", change.verdict
    chance = "under 0.1%" if change.p < 0.001 else f"{change.p:.1%}"
    return change.name, *values, f"{change.ratio - 1:+.1%}", chance, change.verdict


def _verdict_counts(counts: Mapping[str, int]) -> str:
    """Return the number of measurements with each verdict, as a sentence."""
    parts = [f"{n:,} {'is' if n == 1 else 'are'} {IN_WORDS.get(said, said)}" for said, n in counts.items()]
    number, rest = parts[0].split(" ", 1)
    noun = "measurement" if number == "1" else "measurements"
    return f"{', '.join([f'{number} {noun} {rest}', *parts[1:]])}."


def changes(found: Sequence[RowChange], verdicts: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Yield the lines that come after the table of changes."""
    counts = {v: sum(c.verdict == v for c in found) for v in VERDICTS}
    if others := len(found) - sum(counts.values()):
        counts["without a verdict"] = others
    yield _verdict_counts(counts)
    other = [f"{name}: {was} -> {now}" for name, was, now in verdicts if was != now]
    against = sum({was, now} == {"met", "not met"} for _, was, now in verdicts)
    if not verdicts:
        return
    yield (
        f"targets: {len(verdicts) - len(other)} of {len(verdicts)} with the same verdict,"
        f" {against} met in one and not in the other"
    )
    yield from (f"  {line}" for line in other)
