"""The command `ruvmlx bench` measures this machine's speed, memory and learning. The command compares the
results with the project's targets, with the machine's own limits and with other runtimes."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ruvmlx.backends.sharded.place import BACKEND, all_are_here, ranks
from ruvmlx.errors import UsageError

from .number_types import WholeNumber
from .options import model_options, require_new_file, resolve
from .output import json_option, log, print_json, show_whole
from .path_types import NewPath
from .text_output import TableColumn, hint, say, table
from .verb import ChoiceArgument, Verb

ROWS = (
    TableColumn("MEASURED", keep=False),
    TableColumn("VALUE", right=True),
    TableColumn("TARGET", right=True),
    TableColumn("VERDICT"),
    TableColumn("OF LIMIT", right=True),
)
CHANGES = (
    TableColumn("MEASURED", keep=False),
    *(TableColumn(name, right=True) for name in ("OLD", "NEW")),
    TableColumn("UNIT"),
    *(TableColumn(name, right=True) for name in ("CHANGE", "BY CHANCE")),
    TableColumn("VERDICT"),
)
OF_LIMIT = "OF LIMIT is the share of what this machine could reach at best; ± is the uncertainty of a value."
SUITES = ("all", "kernels", "model", "kv", "serving", "learning", "load", "chat", "compare")


@click.command(cls=Verb)
@click.argument("suite", cls=ChoiceArgument, type=click.Choice(SUITES), default="all")
@click.argument("reports", nargs=-1, type=click.Path())
@click.option("--vs", default="", help="Also measure llama.cpp or mlx-lm, in turns (both: llama.cpp,mlx-lm).")
@click.option(
    "--quick", is_flag=True, help="Fewer turns, contexts, ratings: two minutes on an idle machine, not ten."
)
@click.option(
    "--report",
    type=NewPath(path_type=Path),
    help="Write the report to a new FILE.html (with charts) or FILE.md.",
)
@click.option("--rounds", type=WholeNumber(min=3), help="Turns of each runtime.")
@click.option(
    "--context",
    "contexts",
    type=WholeNumber(min=1),
    multiple=True,
    help="Decode after so many tokens; may be repeated.",
)
@model_options
@json_option
def bench(
    suite: str,
    reports: tuple[str, ...],
    vs: str,
    quick: bool,
    report: Path | None,
    rounds: int | None,
    contexts: tuple[int, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Measure speed, memory and learning, each beside its target and the machine's limit.

    `bench compare OLD.json NEW.json` says what became faster or slower between two runs with --json.
    """
    if suite == "compare":
        _compare(reports, as_json)
        return
    if reports:
        raise UsageError(f"{suite} takes no files; `bench compare OLD.json NEW.json` does.")
    if report is not None:
        require_new_file("--report", report)
    from ..bench import suites, terminal

    if ranks() > 1:
        suite = _suite_over_ranks(suite)
    settings = resolve(flags)
    plan = suites.BenchPlan(
        suites.NAMES if suite == "all" else (suite,),
        _model(settings.model),
        settings.backend,
        settings.threads or _cores(),
        _parse_peers(vs),
        quick,
        rounds,
        contexts or None,
    )

    def show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
        for name, of_suite in terminal.by_suite(rows):
            say(name, "bold")
            table(ROWS, of_suite)
            say("")

    found = suites.run(plan, log, (lambda rows: None) if as_json else show_rows)
    if as_json:
        print_json(found)
    else:
        for line in terminal.end_lines(found):
            show_whole(line)
        hint(OF_LIMIT)
    if report is not None:  # last, because a full disk must not lose the figures
        given = {"vs": vs or None, "rounds": rounds, "context": contexts, **flags}
        _write(report, found, [suite] * (suite != "all") + ["--quick"] * quick, given)


def _suite_over_ranks(suite: str) -> str:
    """Return the suite that `ruvmlx launch` measures: the only one that opens the model once."""
    if suite not in ("all", "model"):
        raise UsageError(
            f"bench {suite} opens several models at once; with launch, `bench model` measures the one that "
            "is divided."
        )
    return "model"


def _write(report: Path, found: dict[str, Any], words: Sequence[str], given: Mapping[str, Any]) -> None:
    """Write the report. The Markdown report has the command that made the report, with the names of files
    without their folders, because other people read the report.

    words: the words of the command after `ruvmlx bench`. given: the options with their values."""
    from ruvmlx.chats.chat_file import write_new

    from ..bench import markdown, page

    if report.suffix == ".md":
        command = ["ruvmlx", *_launch_words(), "bench", *words]
        for name, value in {**given, "report": report}.items():
            for one in value if isinstance(value, tuple) else [value] * (value is not None):
                is_file = name == "report" or (name == "model" and Path(one).exists())
                command += [f"--{name.replace('_', '-')}", Path(one).name if is_file else str(one)]
        text = "\n".join(markdown.lines(found, shlex.join(command))) + "\n"
    else:
        text = page.html(found)
    write_new(report, text)
    log(f"wrote {report}")


def _launch_words() -> list[str]:
    """Return the words with which `ruvmlx launch` started this process. The words do not name the machines,
    because other people read the report."""
    if ranks() == 1:
        return []
    hosts = ",".join(f"HOST{rank}" for rank in range(ranks()))
    backend = os.environ.get(BACKEND, "ring")
    where = ["-n", str(ranks())] if all_are_here() else ["--hosts", hosts]
    return ["launch", *([] if backend == "ring" else ["--backend", backend]), *where, "--"]


def _compare(reports: tuple[str, ...], as_json: bool) -> None:
    from ..bench import compare, terminal

    if len(reports) != 2:
        raise UsageError(f"compare takes two reports, got {len(reports)}: `bench compare OLD.json NEW.json`.")
    old, new = map(compare.read, reports)
    changes, others = compare.changes(old, new), compare.differences(old, new)
    verdicts = compare.verdicts(old, new)
    if as_json:
        print_json({
            "changes": [vars(c) for c in changes],
            "verdicts": [{"name": name, "old": was, "new": now} for name, was, now in verdicts],
            "differences": others,
        })  # fmt: skip
        return
    for what in others:
        say(f"not the same: {what}")
    table(CHANGES, map(terminal.change_row, changes))
    ours = [change.name.endswith(": ours") for change in changes]
    others_too = "" if all(ours) else "; the other rows are about other programs"
    if any(ours):
        hint(
            f'A row with "ours" is about ruvmlx{others_too}. "decode at 256" is the speed of writing when '
            "the chat already has 256 tokens."
        )
    hint("BY CHANCE is how often chance alone makes such a difference.")
    for line in terminal.changes(changes, verdicts):
        say(line)


def _model(name: str | None) -> str:
    from ruvmlx.models.load import load_model

    return str(load_model(name).path)


def _parse_peers(vs: str) -> list[str]:
    from ..bench.peers import NAMES

    wanted = [name.strip() for name in vs.split(",") if name.strip()]
    for name in wanted:
        if name not in NAMES:
            raise UsageError(f"--vs: {name} is not known; there are {' and '.join(NAMES)}.")
    return wanted


def _cores() -> int:
    """Return the number of CPUs that the operating system lets this process use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


VERBS = [bench]
