"""Requests, chunks and responses: what crosses between the engine and the apps."""

import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..kv.cache import KVStats
from ..models.model import Message
from ..sampling import Sampling


@dataclass(frozen=True)
class Begun:
    """A reply that is gone on with: its words, and its last tokens, which may end within a character."""

    text: str
    tail: tuple[int, ...]


@dataclass
class GenerationRequest:
    """One reply wanted: from `messages`, or `prompt` (raw text), or `input_ids`, which win over both."""

    messages: Sequence[Message] | None = None
    prompt: str | None = None
    input_ids: Sequence[int] | None = None
    session_id: str | None = None  # sessions keep their KV cache between requests
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    max_new_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0  # > 0: the K most likely tokens are reported with every token
    begun: Begun | None = None  # `input_ids` end with it; the response's text begins with it
    untouched: bool = False  # the reply is made without anything that was learned
    examples: tuple[str, ...] = ()  # replies that the runtime put into the prompt, by id
    route: Any = None  # the router's choice (sona/optional/router.py); None: there was nothing to choose
    cancel: threading.Event = field(default_factory=threading.Event)  # set it from any thread to stop


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at temperature 1, the adapter applied."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class GenerationResponse:
    request_id: str
    session_id: str | None
    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int  # of the prompt, already in the session's KV cache
    generation_tokens: int
    finish_reason: str  # "stop" | "length" | "cancelled"
    ttft_ms: float
    latency_ms: float
    prompt_tps: float  # newly prefilled tokens per second
    generation_tps: float
    cache_tokens: int  # in the session's KV cache now
    kv: KVStats
    logprobs: list[TokenLogprob] = field(default_factory=list)
    examples: tuple[str, ...] = ()  # replies that were shown to the model first, by id
    route: Any = None  # the request's


@dataclass(frozen=True)
class Chunk:
    """A piece of a reply. Text is whole UTF-8 and may be empty; the last chunk alone has `response`."""

    text: str
    generated: int = 0  # tokens so far
    prefilled: int = 0  # prompt tokens done so far, while the prompt is being read
    prompt_tokens: int = 0
    response: GenerationResponse | None = None
