"""The memory of all open models, as the status, the page and the metrics show it."""

from typing import NamedTuple

from ruvmlx.memory.memory_plan import Purpose, sum_purposes
from ruvmlx.platform.cpu import total_memory
from ruvmlx.platform.memory import MemoryUse, peak, resident
from ruvmlx.runtime import Runtime

from .model_pool import ModelPool


class MemoryLook(NamedTuple):
    """held: of all models together. waiting: replies that wait for a place or for memory. adapter: in use by
    the first of them, as NAME@VERSION; None: none."""

    held: MemoryUse
    purposes: list[Purpose]
    waiting: int
    adapter: str | None


async def look_at(models: ModelPool) -> MemoryLook:
    """Ask all open models, between the steps of their replies."""
    found = [await models.look(model, _look) for model in models.open_models]
    looks = [look for look in found if look is not None]
    if len(looks) == 1:
        return looks[0]
    kinds = ("model", "kv", "adapters", "kv_budget")
    sums = {kind: sum(getattr(look.held, kind) for look in looks) for kind in kinds}
    held = MemoryUse(**sums, resident=resident(), peak=peak(), budget=total_memory())
    adapter = looks[0].adapter if looks else None
    purposes = sum_purposes([look.purposes for look in looks], held.resident)
    return MemoryLook(held, purposes, sum(look.waiting for look in looks), adapter)


def _look(runtime: Runtime) -> MemoryLook:
    waiting = runtime.writer.scheduler.counts[1]
    return MemoryLook(runtime.held(), runtime.memory_purposes(), waiting, runtime.adapter_label)
