"""`bench`: measure this machine, next to what others do on it."""

import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from .options import model_options, resolve
from .output import json_option, log, print_json, show


@click.command()
@click.argument("suite", type=click.Choice(["kernels", "model", "kv", "learning"]), default="model")
@click.option("--vs", default="", help="llama.cpp: measure it too, in turns, on the same file (GGUF).")
@click.option("--long", type=click.IntRange(min=0), default=4096, help="Context of the long decode; 0: none.")
@click.option("--rounds", type=click.IntRange(min=2), default=9, help="Turns of each.")
@model_options
@json_option
def bench(suite: str, vs: str, long: int, rounds: int, as_json: bool, **flags: Any) -> None:
    """Measure prefill and decode; every figure beside the machine's own limit."""
    settings = resolve(flags)
    threads = settings["threads"] or _cores()
    if suite == "learning":
        from ..bench import learning

        rows = learning.run(settings["model"], settings["backend"], threads, 112 * rounds, log)
    elif suite == "kernels":
        from ..bench import kernels

        rows = kernels.run(log)
    else:
        from ..bench import kv, model

        run = kv.run if suite == "kv" else model.run
        rows = _model_rows(run, settings, threads, "llama.cpp" in vs.split(","), long, rounds)
    machine = {"cpu": platform.machine(), "system": platform.system(), "threads": threads}
    if as_json:
        print_json({"rows": [asdict(row) for row in rows], "machine": machine})
        return
    for row in rows:
        show(_line(row))


def _model_rows(
    run: Callable[..., list[Any]], settings: dict[str, Any], threads: int, peers: bool, long: int, rounds: int
) -> list[Any]:
    """Rows of a suite that runs a model, perhaps beside others."""
    from ruvmlx.models.load import load_model

    path = str(load_model(settings["model"]).path)
    peers = peers and path.endswith(".gguf")
    return run(settings["model"], path, settings["backend"], threads, peers, long, rounds, log)


def _cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _line(row: Any) -> str:
    value = "-" if row.value is None else f"{row.value:g}"
    against = f"target {row.target:g}" if row.target is not None else ""
    limit = f"limit {row.limit:g}" if row.limit is not None else ""
    verdict = {True: "met", False: "NOT MET", None: ""}[row.met]
    return f"{row.name:<44} {value:>8} {row.unit:<5} {against:<11} {verdict:<8} {limit:<13} {row.note}"


VERBS = [bench]
