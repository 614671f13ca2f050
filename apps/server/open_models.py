"""GET /v1/ps and POST /v1/stop: the open models, and the end of one of them or of the server."""

import time
from typing import Annotated

from msgspec import Meta, Struct

from ruvmlx.platform.memory import resident

from .endpoint import Answer, Call, Endpoint
from .memory_looks import look_at_model
from .memory_share import PooledModel


class OpenModel(Struct):
    """An open model. need_bytes: by the plan; null: it was opened without one. model_bytes, kv_bytes: in use.
    kv_limit_bytes: that its KV caches may take; 0: no limit. idle_seconds: since its last request; 0 while
    it is used. requests: that it answers; replies: that are being written by it.
    """

    model: str
    is_first: bool
    adapter: str | None
    need_bytes: int | None
    model_bytes: int
    kv_bytes: int
    kv_limit_bytes: int
    idle_seconds: float
    requests: int
    replies: int


class OpenModels(Struct):
    """planned_bytes: of the program and all open models, by the plan. limit_bytes: that they may take; 0: not
    known. resident_bytes: that the process takes."""

    models: list[OpenModel]
    planned_bytes: int
    limit_bytes: int
    resident_bytes: int


class StopBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/stop."""

    model: Annotated[str | None, Meta(description="The model to close; null: the server ends.")] = None


class StopAnswer(Struct):
    """model: the one that is closed now; null: the server ends. was_open: it was open."""

    model: str | None
    was_open: bool


async def ps(call: Call) -> Answer:
    """The open models, their memory, and what they do."""
    found = [await _row(call, model) for model in call.models.open_models]
    share = call.models.share
    return OpenModels(
        [row for row in found if row is not None], call.models.plan_bytes, share.limit, resident()
    )


async def _row(call: Call, model: PooledModel) -> OpenModel | None:
    """None: it was closed meanwhile."""
    look = await look_at_model(call.models, model)
    if look is None:
        return None
    held = look.held
    idle = 0.0 if not model.is_idle else time.monotonic() - model.used_at
    need = model.need.total if model.need else None
    serving = model.serving
    return OpenModel(
        serving.model_name, model is call.models.first, look.adapter, need, held.model, held.kv,
        held.kv_budget, round(idle, 1), model.users, serving.writing,
    )  # fmt: skip


async def stop(call: Call) -> Answer:
    """Close a model when nobody uses it any more, or end the server."""
    name = call.body.model
    if name is None:
        call.models.end()
        return StopAnswer(None, True)
    model = await call.models.find(name)
    was_open = model.is_open
    await call.models.close(model)
    return StopAnswer(model.serving.model_name, was_open)


ENDPOINTS = [
    Endpoint("GET", "/v1/ps", ps, "List the open models.", OpenModels, is_look=True),
    Endpoint(
        "POST", "/v1/stop", stop, "Close a model, or end the server.", StopAnswer, body=StopBody,
        statuses=(404,), opens=lambda body: False, is_control=True,
    ),
]  # fmt: skip
