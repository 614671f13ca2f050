"""GET /: a page with a chat and what runs. GET /v1/status: what runs."""

import base64
import hashlib
import re
import time
from functools import cache
from pathlib import Path

from msgspec import Struct

from ruvmlx import __version__

from .endpoint import Answer, Call, Endpoint, PlainText
from .memory_look import MemoryLook
from .memory_looks import idle_work_of, look_at
from .serving import NO_ADAPTER, RecentRequest


class MemoryPurpose(Struct):
    """Bytes for one purpose. planned: when the model was opened. limit: 0 for none."""

    name: str
    planned: int
    used: int
    limit: int


class MemoryInUse(Struct):
    """Bytes. total_bytes: of this machine."""

    model_bytes: int
    kv_bytes: int
    adapter_bytes: int
    resident_bytes: int
    total_bytes: int
    purposes: list[MemoryPurpose]


class ServerStatus(Struct):
    """adapter: the one in use, as NAME@VERSION, or none. tokens_per_second: of the newest reply; null before
    the first. requests: with the same API key, the newest first. idle_work: what it does while nobody asks:
    preparing (replies for their ratings), training, measuring (the KV cache); null: nothing.
    """

    version: str
    model: str
    adapter: str
    uptime_seconds: float
    replies_in_progress: int
    tokens_per_second: float | None
    memory: MemoryInUse
    requests: list[RecentRequest]
    idle_work: str | None


async def status(call: Call) -> Answer:
    """What runs: the model, its memory, the last requests of this API key and their pace. No words of
    users."""
    serving = call.serving
    look = await look_at(call.models)
    recent = [request for salt, request in reversed(serving.recent) if salt == call.salt]
    pace = next((r.tokens_per_second for r in recent if r.tokens_per_second is not None), None)
    age = time.time() - serving.started
    return ServerStatus(
        __version__,
        serving.model_name,
        look.adapter or NO_ADAPTER,
        age,
        serving.waiting,
        pace,
        _in_use(look),
        recent,
        idle_work_of(call.models) or None,
    )


def _in_use(look: MemoryLook) -> MemoryInUse:
    held = look.held
    purposes = [MemoryPurpose(row.name, row.planned, row.used, row.limit) for row in look.purposes]
    return MemoryInUse(held.model, held.kv, held.adapters, held.resident, held.budget, purposes)


async def page(call: Call) -> Answer:
    """A page for people: a chat with thumbs, what was learned, and what runs."""
    return _page()


@cache
def _page() -> PlainText:
    """One file of three, and a policy that allows its own script and style, requests to this server, and no
    more."""
    text, style, script = (
        (Path(__file__).parent / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    text = text.replace("<style></style>", f"<style>\n{style}</style>")
    text = text.replace("<script></script>", f"<script>\n{script}</script>")
    policy = [
        "default-src 'none'",
        f"script-src {_digest(text, 'script')}",
        f"style-src {_digest(text, 'style')}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = [
        ("content-security-policy", "; ".join(policy)),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-cache"),
    ]
    return PlainText(text, "text/html; charset=utf-8", headers)


def _digest(text: str, tag: str) -> str:
    """The only element with this tag, as a source of a Content-Security-Policy."""
    [inside] = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


ENDPOINTS = [
    Endpoint(
        "GET", "/", page, "A page with a chat and what runs.", PlainText,
        is_open=True, media_type="text/html", is_look=True,
    ),
    Endpoint("GET", "/v1/status", status, "What runs, as the page shows it.", ServerStatus, is_look=True),
]  # fmt: skip
