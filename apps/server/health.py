"""This module answers GET /health and GET /metrics."""

from typing import Literal

from msgspec import Struct

from .endpoint import Answer, Call, Endpoint, PlainText
from .memory_looks import idle_work_of, look_at
from .metrics import Labels, family
from .serving import IDLE_WORK

WORK = "1 while the server does this work, because nobody asks."
ACTIONS = "Actions of the optimizer since the models were opened, by what it changed and how it ended."
MEMORY = "Memory by purpose: planned when the model was opened, in use, and the limit (0: none)."


class Health(Struct):
    """The answer of GET /health. status: "ok" if the server answers."""

    status: Literal["ok"]


async def health(call: Call) -> Answer:
    """Return the status "ok", which shows that the server can answer. This request needs no API key."""
    return Health("ok")


async def metrics(call: Call) -> Answer:
    """Return counters since the server's start and the memory in use, in the format of Prometheus."""
    serving = call.serving
    models = call.models
    held, purposes, queued, _, tuning = await look_at(models)
    gauges: dict[str, tuple[str, float]] = {
        "ruvmlx_replies_in_progress": ("Replies being written, or waiting for their turn.", serving.waiting),
        "ruvmlx_queue_length": ("Replies that wait for a place or for memory.", queued),
        "ruvmlx_model_bytes": ("Weights and working memory.", held.model),
        "ruvmlx_kv_bytes": ("KV caches in memory.", held.kv),
        "ruvmlx_adapter_bytes": ("Loaded adapters.", held.adapters),
        "ruvmlx_resident_bytes": ("The whole process.", held.resident),
        "ruvmlx_tokens_per_second": ("Median of undisturbed replies; 0: too few.", tuning.tokens_per_second),
        "ruvmlx_kv_level": ("How far memory lowers the bits of KV caches; 0: not.", tuning.kv_level),
        "ruvmlx_open_models": ("Models that are open.", len(models.open_models)),
        "ruvmlx_models_planned_bytes": ("The program and all open models, by the plan.", models.plan_bytes),
        "ruvmlx_models_limit_bytes": ("That they may take; 0: not known.", models.share.limit),
        "ruvmlx_start_time_seconds": ("When the server started.", serving.started),
    }
    by_purpose: dict[Labels, float] = {
        (("kind", kind), ("purpose", row.name)): float(getattr(row, kind))
        for row in purposes
        for kind in ("planned", "used", "limit")
    }
    working: dict[Labels, float] = {
        (("work", name),): float(idle_work_of(models) == name) for name in IDLE_WORK
    }
    text = serving.metrics.text(gauges) + family("ruvmlx_memory_bytes", MEMORY, by_purpose)
    text += family("ruvmlx_idle_work", WORK, working)
    acted: dict[Labels, float] = {
        (("knob", knob), ("outcome", outcome)): float(count)
        for (knob, outcome), count in tuning.actions.items()
    }
    text += family("ruvmlx_optimizer_actions", ACTIONS, acted)
    return PlainText(text, "text/plain; version=0.0.4; charset=utf-8")


ENDPOINTS = [
    Endpoint("GET", "/health", health, "Whether the server answers.", Health, is_open=True, is_look=True),
    Endpoint("GET", "/metrics", metrics, "Counts and memory, for Prometheus.", PlainText, is_look=True),
]
