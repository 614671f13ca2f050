"""This module answers GET / with the web page, which has a chat and the server's status. The module also
answers GET /v1/status with the status alone."""

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
    """The bytes of memory for one purpose. planned: the bytes in the memory plan, for weights and KV caches;
    for other purposes an estimate, a budget or the bytes in use. limit: the maximum number of bytes; 0: no
    limit, or not known."""

    name: str
    planned: int
    used: int
    limit: int


class MemoryInUse(Struct):
    """The memory in use, as numbers of bytes. total_bytes: the memory of this machine."""

    model_bytes: int
    kv_bytes: int
    adapter_bytes: int
    resident_bytes: int
    total_bytes: int
    purposes: list[MemoryPurpose]


class ServerStatus(Struct):
    """The server's status. adapter: the adapter version in use, as NAME@VERSION, or none. requests: the
    requests with the same API key among the server's last 50 requests other than GET, the newest first.
    tokens_per_second: the decode speed of the newest reply among these requests; null if there is none.
    idle_work: the work that the server does while no request runs: preparing (replies for their ratings),
    training, or measuring (the KV cache); null if the server does none of this work."""

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
    """Return the server's status: the model, the memory, and the last requests of this API key with their
    speed. The answer has no text of users."""
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
    """Return the web page, which has a chat with rating buttons, a list of what the model learned, and the
    server's status."""
    return _page()


@cache
def _page() -> PlainText:
    """Join the HTML, CSS and JavaScript files into one page. The page's Content-Security-Policy allows only
    the page's own script and style, and requests to this server."""
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
    """Return the digest of the content of the only element with this tag, in the form of a
    Content-Security-Policy source. The browser runs a script only if its digest is in the policy."""
    [inside] = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


ENDPOINTS = [
    Endpoint(
        "GET", "/", page, "A page with a chat and what runs.", PlainText,
        is_open=True, media_type="text/html", is_look=True,
    ),
    Endpoint("GET", "/v1/status", status, "What runs, as the page shows it.", ServerStatus, is_look=True),
]  # fmt: skip
