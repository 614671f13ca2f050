"""docs/systems.md: the design's systems, how each is reached, which tests show it, and what is missing.

systems.toml has the rows. `python -m tests.docs.systems` checks that each named test and command exists,
takes the figures from committed reports, and writes the page. test_systems.py fails where the page says
something else.
"""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click

from apps.cli import cli

from .figures import figure as figure_of_prove

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "systems.md"
REPORT = ROOT / "apps" / "bench" / "REPORT.md"
PARTS = {"E": "Engine", "K": "Kernels", "M": "Memory", "A": "Adapters", "S": "Learning (SONA)"}
_INTRO = """\
# The design's systems

The design that ruvmlx follows names {count} systems. This page says for each how you reach it, which
tests show that it works, what was measured, and what is missing: {whole} are whole, {part} in part. Figures
are those of committed reports ([benchmarks]({report}), `apps/prove/REPORT.md`), on the machine that they
name; none is written by hand. `python -m tests.docs.systems` checks that the tests and commands exist, and
writes this page.
"""
_TARGETS = """\
## Targets

{met} of the design's {count} targets are met on the report's machine, {missed} are not, and
{unmeasured} have no row in a committed report yet.
"""


_HEAD = "| | system | reached by | shown by | measured | missing |\n|---|---|---|---|---|---|"


class WrongRow(Exception):
    """A row that names what there is not."""


@dataclass(frozen=True)
class SystemRow:
    """One of the design's systems; the fields are those of systems.toml."""

    id: str
    name: str
    command: str
    tests: list[str]
    figure: list[str]
    open: str


@dataclass(frozen=True)
class TargetRow:
    name: str
    target: str
    figure: str
    missed: str = ""  # why it is missed, though the report's own target is met


@dataclass(frozen=True)
class MeasuredRow:
    """A row of the benchmark's report. met: "yes", "**no**", or "" without a target."""

    value: str
    met: str


def read() -> tuple[list[SystemRow], list[TargetRow]]:
    data: dict[str, Any] = tomllib.loads(Path(__file__).with_name("systems.toml").read_text("utf-8"))
    return [SystemRow(**row) for row in data["row"]], [TargetRow(**row) for row in data["target"]]


# -- what the rows name ------------------------------------------------------------------------------


@cache
def tests_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file, "" if there is no such file."""
    path = ROOT / file
    tree = ast.parse(path.read_text("utf-8")) if path.is_file() else ast.Module([], [])
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions))


def check_test(name: str) -> None:
    """WrongRow unless file::test is a test."""
    file, _, test = name.partition("::")
    if not test.startswith("test_") or test not in tests_in(file):
        raise WrongRow(f"there is no test {name}")


def check_command(words: str) -> None:
    """WrongRow unless the command line parses."""
    command: click.Command | None = cli
    left, context = shlex.split(words), None
    while isinstance(command, click.Group):
        context = click.Context(command, context)
        command = command.get_command(context, left.pop(0)) if left else None
    try:
        if command is None:
            raise click.UsageError("no such verb")
        command.make_context(command.name, left, context)
    except click.UsageError as e:
        raise WrongRow(f"`ruvmlx {words}` is no command: {e.format_message()}") from None


@cache
def bench_rows() -> dict[str, MeasuredRow]:
    """The rows of the benchmark's report by their names."""
    found = {}
    for line in REPORT.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 7 and cells[1] not in ("median", "---", "-"):
            found[cells[0]] = MeasuredRow(cells[1], cells[4])
    return found


def figure_row(name: str) -> MeasuredRow:
    """A figure of a committed report by its name: "bench: ROW", or as in figures.py. WrongRow if there is
    none."""
    report, _, row = name.partition(": ")
    try:
        if report == "bench":
            return bench_rows()[row]
        cell, ratings, what = row.split("; ")
        return MeasuredRow(figure_of_prove(report, cell, int(ratings), what), "")
    except (KeyError, ValueError):
        raise WrongRow(f"no committed report has {name!r}") from None


# -- the page ----------------------------------------------------------------------------------------


def page(rows: list[SystemRow], targets: list[TargetRow]) -> str:
    """The whole page. WrongRow if a row names what there is not."""
    for row in rows:
        check_command(row.command)
        for test in row.tests:
            check_test(test)
        if not row.tests:
            raise WrongRow(f"{row.id} names no test")
    whole = sum(not row.open for row in rows)
    facts = {"count": len(rows), "whole": whole, "part": len(rows) - whole, "report": "benchmarks.md"}
    return "\n".join([_INTRO.format(**facts), *_parts(rows), *_target_table(targets)])


def _parts(rows: list[SystemRow]) -> Iterator[str]:
    for letter, heading in PARTS.items():
        yield f"## {heading}\n\n{_HEAD}"
        for row in rows:
            if row.id.startswith(letter):
                tests = "<br>".join(f"`{test}`" for test in row.tests)
                figures = "<br>".join(map(_words, row.figure)) or "-"
                command = f"`ruvmlx {row.command}`"
                yield f"| {row.id} | {row.name} | {command} | {tests} | {figures} | {row.open or '-'} |"
        yield ""


def _words(name: str) -> str:
    """ "decode at 256: ours: 443.7 tok/s" """
    found, row = figure_row(name), name.partition(": ")[2]
    if name.startswith("bench"):
        return f"{row}: {found.value}"
    cell, ratings, _ = row.split("; ")
    return f"better than the original model after {ratings} ratings ({cell}): {found.value}"


def _target_table(targets: list[TargetRow]) -> Iterator[str]:
    rows = [(target, figure_row(target.figure) if target.figure else None) for target in targets]
    met = [(target.missed and "**no**") or (row.met if row else "") for target, row in rows]
    counts = {"met": met.count("yes"), "missed": met.count("**no**"), "count": len(rows)}
    unmeasured = sum(row is None for _, row in rows)
    yield _TARGETS.format(**counts, unmeasured=unmeasured)
    yield "| operation | target | measured | met |\n|---|---|---|---|"
    for (target, row), verdict in zip(rows, met, strict=True):
        where = re.sub(r"^bench: ", "", target.figure)
        shown = f"{row.value} ({where})" if row else "-"
        words = ": ".join(filter(None, (verdict, target.missed))) or "-"
        yield f"| {target.name} | {target.target} | {shown} | {words} |"


def main() -> int:
    try:
        text = page(*read())
    except WrongRow as e:
        print(f"tests/docs/systems.toml: {e}", file=sys.stderr)
        return 1
    PAGE.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
