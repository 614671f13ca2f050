"""This module runs the suites (groups of measurements) of `ruvmlx bench`. The module makes a report of the
suites' rows, of facts about the machine, and of the slowdown of the machine during the run."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ruvmlx.backends.sharded.place import ranks
from ruvmlx.models.load import load_model
from ruvmlx.progress import duration

from . import chat, energy, kernels, kv, learning, load, machine, model, serving
from .machine import Limits, Thermometer
from .peers import Peers, peers
from .rows import Row, refuse_impossible
from .stage import OnStage

NAMES = ("kernels", "model", "kv", "serving", "learning", "load", "chat")
CONTEXTS = {"quick": (256,), "whole": (256, 1024, 4096, 8000)}
LONG = {"quick": 1024, "whole": 4096}
ROUNDS = {"quick": 8, "whole": 12}

QUICK_SECONDS = {  # {suite: approximate seconds of a quick run with the starter model on two idle cores}
    "kernels": 4, "model": 10, "kv": 22, "serving": 28, "learning": 33, "load": 4, "chat": 9,
}  # fmt: skip

Log = Callable[[str], None]
Show = Callable[[Sequence[Mapping[str, Any]]], None]


@dataclass(frozen=True)
class BenchPlan:
    """The plan of a run.

    suites: the names of the suites
    model: the path of a model's folder or file
    wanted: the names of the peers (other runtimes) to measure
    rounds, contexts: the number of rounds, and the numbers of context tokens; None for the defaults
    """

    suites: Sequence[str]
    model: str
    backend: str
    threads: int
    wanted: Sequence[str] = ()
    quick: bool = False
    rounds: int | None = None
    contexts: Sequence[int] | None = None

    @property
    def size(self) -> str:
        return "quick" if self.quick else "whole"


def run(plan: BenchPlan, say: Log, show: Show = lambda rows: None) -> dict[str, Any]:
    """Run the suites of the plan, and return the report as data for JSON.

    say: a function that gets each line of progress
    show: a function that gets the rows of each finished suite
    """
    started, warmth = time.monotonic(), Thermometer()

    def log(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - started), 60)
        say(f"{minutes}:{seconds:02d}  {line}")

    limits = machine.limits(plan.threads)
    warmth.read()
    log(f"the machine reads {limits.memory / 1e9:.1f} GB/s and multiplies {limits.products / 1e9:.0f} G/s")
    rows: list[dict[str, Any]] = []
    if plan.quick:
        log(f"{duration(sum(QUICK_SECONDS[name] for name in plan.suites))} on an idle machine; on this one:")
    begun = time.monotonic()
    with peers(plan.wanted, plan.model, plan.threads) as others:
        for place, name in enumerate(plan.suites):
            log(f"{name}:")
            limits = limits.or_more(machine.limits(plan.threads))
            found = _SUITES[name](plan, limits, others, log)
            new = [{"suite": name, **refuse_impossible(row).facts} for row in found]
            rows += new
            show(new)
            warmth.read()
            done, left = plan.suites[: place + 1], plan.suites[place + 1 :]
            if plan.quick and left:
                log(f"about {duration(seconds_left(done, left, time.monotonic() - begun))} left")
    return {
        "rows": rows,
        "machine": machine.facts(plan.threads),
        "limits": asdict(limits),
        "model": Path(plan.model).name,
        "weights": load_model(plan.model).bytes,
        "drift": round(warmth.drift, 3),
        "throttled": warmth.is_throttled,
        "settings": machine.environment(),
        "quick": plan.quick,
        "seconds": round(time.monotonic() - started, 1),
    }


def seconds_left(done: Sequence[str], left: Sequence[str], seconds: float) -> float:
    """Estimate the remaining seconds of a quick run from the speed so far. done: the finished suites, which
    took `seconds` seconds; left: the suites that have not run yet."""
    pace = seconds / sum(QUICK_SECONDS[name] for name in done)
    return pace * sum(QUICK_SECONDS[name] for name in left)


def _kernels(plan: BenchPlan, limits: Limits, others: Peers, log: Log) -> list[Row]:
    return kernels.run(limits, plan.quick, log)


def _model(plan: BenchPlan, limits: Limits, others: Peers, log: Log) -> list[Row]:
    with (
        _ours(plan) as ours,
        _player("memory", nbytes=ours.facts["weights_bytes"], threads=plan.threads) as memory,
        _player("products", threads=plan.threads) as products,
    ):
        contexts = plan.contexts or CONTEXTS[plan.size]
        rows = model.run(ours, memory, products, others, limits, contexts, _rounds(plan), log)
        if ranks() > 1:  # the other rows need over a thousand steps, minutes over a slow connection
            return rows
        ours.call("fill", model.prompt(64))
        spent = energy.row(lambda: len(ours.call("decode", model.prompt(256))), 4)
        several = model.best_of(ours, 3)
        return [*rows, several, model.resident(ours), spent]


def _kv(plan: BenchPlan, limits: Limits, others: Peers, log: Log) -> list[Row]:
    with _ours(plan, kv="tiered") as tiered, _ours(plan, kv="f16") as f16:
        long = min(LONG[plan.size], tiered.facts["max_context"] // 2)
        return kv.run({"tiered": tiered, "f16": f16}, others, long, _rounds(plan), log)


def _serving(plan: BenchPlan, limits: Limits, others: Peers, log: Log) -> list[Row]:
    with _player("serving", model=plan.model, backend=plan.backend, threads=plan.threads) as ours:
        return serving.run(ours, others, _rounds(plan), plan.quick, log)


def _learning(plan: BenchPlan, limits: Limits, others: Peers, log: Log) -> list[Row]:
    return learning.run(plan.model, plan.backend, plan.threads, plan.quick, log)


def _load(plan: BenchPlan, limits: Limits, others: Peers, log: Log) -> list[Row]:
    return load.run(plan.model, plan.backend, plan.threads, not plan.quick, plan.wanted, log)


def _chat(plan: BenchPlan, limits: Limits, others: Peers, log: Log) -> list[Row]:
    how = "alone" if tuple(plan.suites) == ("chat",) and not plan.quick else plan.size
    return chat.run(plan.model, plan.backend, plan.threads, how, log)


_SUITES = {
    "kernels": _kernels,
    "model": _model,
    "kv": _kv,
    "serving": _serving,
    "learning": _learning,
    "load": _load,
    "chat": _chat,
}


def _rounds(plan: BenchPlan) -> int:
    return plan.rounds or ROUNDS[plan.size]


def _ours(plan: BenchPlan, **settings: Any) -> AbstractContextManager[OnStage]:
    return _player("ruvmlx", model=plan.model, backend=plan.backend, threads=plan.threads, **settings)


@contextmanager
def _player(kind: str, **settings: Any) -> Iterator[OnStage]:
    player = OnStage(kind, **settings)
    try:
        yield player
    finally:
        player.leave()
