"""This module writes a report of `ruvmlx bench` as Markdown, with all rows of one run. This repository keeps
reports in this form beside the code."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from .rows import verdict
from .terminal import footer

_MET = {"met": "yes", "not met": "**no**"}
_HEAD = ("| what | median | ± | target | met | of limit | |", "|---|---|---|---|---|---|---|")


def lines(report: Mapping[str, Any], command: str) -> Iterator[str]:
    """Yield the lines of the report. command: the command that made the report."""
    yield from (
        "# What ruvmlx does on one machine",
        "",
        f"Made by `{command}`; nothing here is written by hand.",
    )
    versions = ", ".join(f"{name} {version}" for name, version in report["machine"]["versions"].items())
    yield from ("", f"Model: {report['model']}. {versions}.", "", *footer(report))
    for suite, rows in groupby(report["rows"], lambda row: row["suite"]):
        yield from ("", f"## {suite}", "", *_HEAD, *map(_row, rows))


def _row(row: Mapping[str, Any]) -> str:
    number = lambda x: "" if x is None else f"{x:g}"  # noqa: E731
    value = f"{number(row['value'])} {row['unit']}".strip() if row["value"] is not None else "-"
    spread = f"{row['spread']:.0%}" if row["spread"] else ""
    share = "" if row["share"] is None else f"{row['share']:.0%}"
    note = "; ".join(part for part in (row["condition"], row["note"]) if part)
    met = _MET.get(verdict(row), verdict(row))
    cells = (row["name"], value, spread, number(row["target"]), met, share, note)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
