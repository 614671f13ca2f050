"""This module asks one open model for its memory use, its number of waiting replies and its adapter."""

from typing import NamedTuple

from ruvmlx.host.host import Host
from ruvmlx.memory.memory_plan import Purpose
from ruvmlx.platform.memory import MemoryUse
from ruvmlx.runtime import Runtime


class MemoryLook(NamedTuple):
    """The answer of an open model, or the sums of several models' answers. held: the memory use. waiting: the
    number of replies that cannot begin yet, because the maximum number of replies is in progress or memory is
    full. adapter: the adapter version that the model (of several models, the first) uses, as NAME@VERSION, or
    None without an adapter."""

    held: MemoryUse
    purposes: list[Purpose]
    waiting: int
    adapter: str | None


async def look_between(host: Host) -> MemoryLook:
    """Ask an open model for its memory use, between two steps of its replies. The call ends the idle work of
    all models of the server."""
    return await host.call_between(look_at_runtime)


def look_at_runtime(runtime: Runtime) -> MemoryLook:
    """Return the memory use of a runtime. Only the runtime's thread can call this function."""
    waiting = runtime.writer.scheduler.counts[1]
    return MemoryLook(runtime.memory_use(), runtime.memory_purposes(), waiting, runtime.learning.label)
