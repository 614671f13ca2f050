"""This module answers GET /v1/ps, which lists the open models, and POST /v1/stop, which closes a model or the
server."""

import time
from typing import Annotated

from msgspec import Meta, Struct

from ruvmlx.platform.memory import resident

from .endpoint import Answer, Call, Endpoint
from .memory_looks import look_at_model
from .memory_share import PooledModel


class OpenModel(Struct):
    """An open model. need_bytes: the planned memory; null if the model was opened without a plan.
    model_bytes: the bytes of the weights and the working memory now. kv_bytes: the bytes of the KV caches
    now. kv_limit_bytes: the limit of the model's KV caches; 0: no limit. idle_seconds: the time since the
    model's last request; 0 while a request uses the model. requests: the number of the model's requests in
    progress. replies: the number of the model's replies in progress or waiting."""

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
    """All open models. planned_bytes: the planned memory of the program and all open models. limit_bytes: the
    maximum of planned_bytes; 0: not known. resident_bytes: the memory of the server's process."""

    models: list[OpenModel]
    planned_bytes: int
    limit_bytes: int
    resident_bytes: int


class StopBody(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/stop."""

    model: Annotated[str | None, Meta(description="The model to close; null: the server ends.")] = None


class StopAnswer(Struct):
    """The answer of POST /v1/stop. model: the name of the closed model; null: the server ends. was_open: true
    if the model was open before."""

    model: str | None
    was_open: bool


async def ps(call: Call) -> Answer:
    """Return the open models, their memory, and the numbers of their requests."""
    found = [await _row(call, model) for model in call.models.open_models]
    share = call.models.share
    return OpenModels(
        [row for row in found if row is not None], call.models.plan_bytes, share.limit, resident()
    )


async def _row(call: Call, model: PooledModel) -> OpenModel | None:
    """Return the row of an open model for GET /v1/ps. Return None if the server has closed the model in the
    meantime."""
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
    """Close a model as soon as no request uses it. If the request names no model, end the server."""
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
