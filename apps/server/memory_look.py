"""This module asks one open model for its memory use, its number of waiting replies and its adapter."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ruvmlx.host.host import Host
from ruvmlx.memory.memory_plan import Purpose
from ruvmlx.platform.memory import MemoryUse
from ruvmlx.runtime import Runtime


class TuningLook(NamedTuple):
    """What the optimizer of an open model knows, or the sums of several models. tokens_per_second: the median
    speed of the newest undisturbed replies; 0: not known. kv_level: the level by which memory pressure lowers
    the bits of KV caches. actions: {(knob, outcome): number of actions since the model was opened}."""

    tokens_per_second: float = 0.0
    kv_level: int = 0
    actions: Mapping[tuple[str, str], int] = {}


class MemoryLook(NamedTuple):
    """The answer of an open model, or the sums of several models' answers. held: the memory use. waiting: the
    number of replies that cannot begin yet, because the maximum number of replies is in progress or memory is
    full. adapter: the adapter version that the model (of several models, the first) uses, as NAME@VERSION, or
    None without an adapter."""

    held: MemoryUse
    purposes: list[Purpose]
    waiting: int
    adapter: str | None
    tuning: TuningLook = TuningLook()


async def look_between(host: Host) -> MemoryLook:
    """Ask an open model for its memory use, between two steps of its replies. The call ends the idle work of
    all models of the server."""
    return await host.call_between(look_at_runtime, is_use=False)


def look_at_runtime(runtime: Runtime) -> MemoryLook:
    """Return the memory use of a runtime. Only the runtime's thread can call this function."""
    waiting = runtime.writer.scheduler.counts[1]
    held, purposes = runtime.memory_use(), runtime.memory_purposes()
    return MemoryLook(held, purposes, waiting, runtime.learning.label, _look_at_tuning(runtime))


def _look_at_tuning(runtime: Runtime) -> TuningLook:
    optimizer, pool = runtime.optimizer, runtime.backend.pool
    speed, level = optimizer.monitor.speed() or 0.0, pool.level if pool is not None else 0
    return TuningLook(speed, level, dict(optimizer.log.counts))


def sum_tuning(looks: Sequence[TuningLook]) -> TuningLook:
    """Return the speed of the first model, the highest level, and the sums of the actions."""
    actions: Counter[tuple[str, str]] = Counter()
    for look in looks:
        actions.update(look.actions)
    speed = looks[0].tokens_per_second if looks else 0.0
    return TuningLook(speed, max((look.kv_level for look in looks), default=0), actions)
