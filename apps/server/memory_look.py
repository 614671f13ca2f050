"""The memory of one open model, and what waits for it."""

from typing import NamedTuple

from ruvmlx.host.host import Host
from ruvmlx.memory.memory_plan import Purpose
from ruvmlx.platform.memory import MemoryUse
from ruvmlx.runtime import Runtime


class MemoryLook(NamedTuple):
    """held: of all models together. waiting: replies that wait for a place or for memory. adapter: in use by
    the first of them, as NAME@VERSION; None: none."""

    held: MemoryUse
    purposes: list[Purpose]
    waiting: int
    adapter: str | None


async def look_between(host: Host) -> MemoryLook:
    """Ask an open model, between the steps of its replies. Ends the work that it does while nobody asks."""
    return await host.call_between(look_at_runtime)


def look_at_runtime(runtime: Runtime) -> MemoryLook:
    """In the runtime's thread."""
    waiting = runtime.writer.scheduler.counts[1]
    return MemoryLook(runtime.held(), runtime.memory_purposes(), waiting, runtime.adapter_label)
