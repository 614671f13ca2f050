"""docs/systems.md: the design's systems, how each is reached, which tests show it, and what is missing.

systems.toml has the rows. `python -m tests.docs.systems` checks that each named test and command exists,
takes the figures from committed reports, and writes the page. test_systems.py fails where the page says
something else.
"""

import ast
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
BENCH = ROOT / "apps" / "bench"
# The instruction set of a benchmark's machine -> its report
REPORTS = {"avx512": BENCH / "REPORT.md", "avx2": BENCH / "REPORT-avx2.md"}
PARTS = {"E": "Engine", "K": "Kernels", "M": "Memory", "A": "Adapters", "S": "Learning (SONA)"}
_INTRO = """\
# The design's systems

After this page you can try each system of the design, and find the tests that show it.

The design that ruvmlx follows names {count} systems. This page says for each how you reach it, which
tests show that it works, what was measured, and what is missing: {whole} are whole, {part} in part. Figures
are those of committed reports ([benchmarks]({report}), `apps/prove/REPORT.md`), on the machine that they
name; none is written by hand. `python -m tests.docs.systems` checks that the tests and commands exist, and
writes this page.
"""
_TARGETS = """\
## Targets

Two machines have a report: an AMD EPYC with AVX-512 (`apps/bench/REPORT.md`) and a slower AMD EPYC without
AVX-512 (`apps/bench/REPORT-avx2.md`, of newer code). Each of the design's {count} targets has a figure of at
least one of them.

| operation | target | with AVX-512 | met | without AVX-512 | met |
|---|---|---|---|---|---|"""


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
    """rows: names of rows of the reports; "[isa]" stands for the instruction set of a report's machine."""

    name: str
    target: str
    rows: list[str]
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
def bench_rows(isa: str = "avx512") -> dict[str, MeasuredRow]:
    """The rows of a benchmark's report by their names."""
    found = {}
    for line in REPORTS[isa].read_text("utf-8").splitlines():
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
    yield _TARGETS.format(count=len(targets))
    for target in targets:
        cells = [cell for isa in REPORTS for cell in _measured_cells(target, isa)]
        if cells == ["-", "-"] * len(REPORTS):
            raise WrongRow(f"no committed report measures {target.name!r}")
        yield f"| {target.name} | {target.target} | {' | '.join(cells)} |"


def _measured_cells(target: TargetRow, isa: str) -> tuple[str, str]:
    """The figures of a target in one report, and their verdict; two dashes if the report lacks a figure."""
    known = bench_rows(isa)
    names = [name.replace("[isa]", f"[{isa}]") for name in target.rows]
    if not all(name in known for name in names):
        return "-", "-"
    found = [known[name] for name in names]
    shown = "<br>".join(f"{row.value} ({name})" for row, name in zip(found, names, strict=True))
    verdicts = {"**no**" if target.missed else row.met for row in found}
    worst = next((verdict for verdict in ("**no**", "close", "yes") if verdict in verdicts), "-")
    return shown, f"{worst}: {target.missed}" if target.missed else worst


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
