"""This module writes a report of `ruvmlx bench` as one self-contained HTML file. The file has charts, all
rows, and the computed speeds of other chips."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from .. import charts
from ..charts import Axis
from . import projection
from .rows import verdict
from .terminal import by_context, footer

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
       color: #111827; background: #fff; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid #e5e7eb; vertical-align: top; }
td.n { text-align: right; white-space: nowrap; }
.no { color: #b91c1c; font-weight: 600; } .yes { color: #047857; } small { color: #4b5563; }
.warn { background: #fef3c7; padding: .6rem 1rem; } svg { max-width: 100%; height: auto; }
p { overflow-wrap: anywhere; }
@media (max-width: 45rem) { table { display: block; overflow-x: auto; } }
@media (prefers-color-scheme: dark) {
  body { color: #f3f4f6; background: #111827; } th, td { border-color: #374151; } small { color: #9ca3af; }
  .no { color: #f87171; } .yes { color: #34d399; } .warn { background: #78350f; }
  svg { filter: invert(1) hue-rotate(180deg); }
}
@media print {
  body { max-width: none; margin: 0; color: #000; background: #fff; } svg { filter: none; }
  th, td { border-color: #9ca3af; } small { color: #4b5563; } .warn { background: none; border: 1px solid; }
  .no { color: #b91c1c; } .yes { color: #047857; } tr, svg { break-inside: avoid; }
}
"""
_CLASS = {"met": "yes", "not met": "no"}


def html(report: Mapping[str, Any]) -> str:
    rows = report["rows"]
    body = [
        "<h1>ruvmlx bench</h1>",
        *(f'<p class="{"warn" if i else ""}">{escape(line)}</p>' for i, line in enumerate(footer(report))),
        _facts(report),
        *_charts(rows),
        *(
            f"<h2>{escape(suite)}</h2>{_table(list(of))}"
            for suite, of in groupby(rows, lambda row: row["suite"])
        ),
        _projection(rows, report),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>ruvmlx bench</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _facts(report: Mapping[str, Any]) -> str:
    machine = dict(report["machine"])
    versions = machine.pop("versions")
    machine["memory"] = f"{machine['memory'] / 1e9:.0f} GB"
    known = machine | {"model": report["model"]} | versions | report["settings"]
    return "<p><small>" + escape("; ".join(f"{k}: {v}" for k, v in known.items())) + "</small></p>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ("what", "median", "", "±", "target", "", "of limit", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(map(_line, rows))}</table>"


def _line(row: Mapping[str, Any]) -> str:
    number = lambda x: "" if x is None else f"{x:g}"  # noqa: E731
    note = "; ".join(part for part in (row["condition"], row["note"]) if part)
    said = f'<span class="{_CLASS.get(verdict(row), "")}">{verdict(row)}</span>'
    cells = [
        f"<td>{escape(row['name'])}</td>",
        f'<td class="n">{number(row["value"]) or "-"}</td><td>{escape(row["unit"])}</td>',
        f'<td class="n">{row["spread"]:.0%}</td>' if row["spread"] else "<td></td>",
        f'<td class="n">{number(row["target"])}</td><td>{said}</td>',
        f'<td class="n">{row["share"]:.0%}</td>' if row["share"] is not None else "<td></td>",
        f"<td><small>{escape(note)}</small></td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _charts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if speeds := by_context(rows):
        yield _by_context("Decode, tokens a second, by tokens of context", speeds)
    limited = [row for row in rows if row["share"] is not None]
    if limited:
        yield charts.bars(
            "Share of this machine's limit that is used",
            [(row["name"], row["share"], f"{row['share']:.0%}") for row in limited],
        )
    shares = [row for row in rows if "share of f16" in row["name"] and row["value"]]
    if shares:
        yield charts.bars(
            "Memory of the key-value cache, as a share of float16's",
            [(row["name"], row["value"], f"{row['value']:.0%}") for row in shares],
        )
    proved = [row for row in rows if row["name"].startswith("prove:") and row["value"] is not None]
    if proved:
        yield _learning(proved)


def _by_context(title: str, series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    points = {name: [(x, y, y, y) for x, y in line] for name, line in series.items()}
    contexts = sorted({x for line in series.values() for x, _ in line})
    heights = charts.ticks(max(y for line in series.values() for _, y in line))
    wide = Axis(contexts[0], max(contexts[-1], contexts[0] + 1), contexts, ",", logarithmic=True)
    return charts.lines(title, "tokens of context", points, wide, Axis(0, heights[-1], heights))


def _learning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the chart of learning: how often a reply is better, after each number of ratings. The name of a
    row is "prove: better than the untouched model after N ratings"."""
    points = [(int(row["name"].split()[-2]), *[row["value"]] * 3) for row in rows]
    ratings = Axis(0, points[-1][0], [0, *(x for x, *_ in points)], ".0f")
    half = Axis(0, 1, (0, 0.25, 0.5, 0.75, 1), ".0%", strong=0.5)
    line = {"brevity": [(0, 0.5, 0.5, 0.5), *points]}
    return charts.lines(
        "A simulated user", "ratings; how often the reply is better than before", line, ratings, half
    )


def _projection(rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> str:
    found = projection.project_chips(rows, report["weights"])
    if not found:
        return ""
    lines = []
    for p in found:
        speeds = (f"{x:.3g}" for x in (p.expected, p.most, p.expected_7b, p.most_7b))
        cells = "".join(f"<td class=n>{x}</td>" for x in (f"{p.bandwidth:.0f} GB/s", *speeds))
        lines.append(f"<tr><td>{p.chip}</td>{cells}</tr>")
    names = ("chip", "memory", "this model, expected", "at most", "7B at 4.5 bits, expected", "at most")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        "<h2>M-series chips: computed, not measured</h2>"
        "<p>Tokens a second of one reply, without speculation. Expected: the share of memory bandwidth "
        "measured here, times Apple's figure for the chip. At most: all of that bandwidth. None of these "
        f"chips has been measured.</p><table><tr>{head}</tr>{''.join(lines)}</table>"
    )
