"""This module adds up the memory of all open models and names their idle work. The status, the web page and
the metrics show these facts."""

from ruvmlx.memory.memory_plan import sum_purposes
from ruvmlx.platform.cpu import total_memory
from ruvmlx.platform.memory import MemoryUse, peak, resident

from .memory_look import MemoryLook, look_at_runtime, sum_tuning
from .model_pool import ModelPool, PooledModel


def idle_work_of(models: ModelPool) -> str:
    """Return the name of the idle work of the first open model that does idle work or waits to do it, or ""
    if there is no such model."""
    return next((model.serving.idle_work for model in models.open_models if model.serving.idle_work), "")


async def look_at(models: ModelPool) -> MemoryLook:
    """Ask each open model with `look_at_model`, and return the sums of the answers, with the adapter of the
    first open model. If no model is open, the adapter is the one that the server's first model had when
    the server closed this model."""
    found = [await look_at_model(models, model) for model in models.open_models]
    looks = [look for look in found if look is not None]
    if len(looks) == 1:
        return looks[0]
    kinds = ("model", "kv", "adapters", "kv_budget")
    sums = {kind: sum(getattr(look.held, kind) for look in looks) for kind in kinds}
    held = MemoryUse(**sums, resident=resident(), peak=peak(), budget=total_memory())
    last = models.first.serving.last_look
    adapter = looks[0].adapter if looks else last and last.adapter
    purposes = sum_purposes([look.purposes for look in looks], held.resident)
    tuning = sum_tuning([look.tuning for look in looks])
    return MemoryLook(held, purposes, sum(look.waiting for look in looks), adapter, tuning)


async def look_at_model(models: ModelPool, model: PooledModel) -> MemoryLook | None:
    """Ask an open model for its memory use, between two steps of its replies. Return None if the model is
    closed. While any model does idle work, return this model's newest earlier answer, because a question to
    the model would end the work."""
    serving = model.serving
    if idle_work_of(models) and serving.last_look is not None:
        return serving.last_look
    found = await models.look(model, look_at_runtime)
    serving.last_look = found or serving.last_look
    return found
