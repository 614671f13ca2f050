"""Requests, chunks and responses: the data that the engine and the apps exchange."""

import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..grammar import Constraint
from ..kv.cache import KVStats
from ..models.model import Message, Tools
from ..sampling import Sampling

INTERACTIVE = 1  # priority of a chat: somebody looks at the screen


@dataclass(frozen=True)
class Begun:
    """A reply to continue: its text and its last token ids, which may end inside a character."""

    text: str
    tail: tuple[int, ...]


@dataclass(frozen=True)
class Patience:
    """How long a request waits for memory before it ends with MemoryBusy: at most so many seconds, and not at
    all behind so many others. None: no limit."""

    seconds: float | None = None
    behind: int | None = None


@dataclass
class GenerationRequest:
    """A request for one reply to `messages`, or `prompt` (raw text), or `input_ids`, which override both."""

    messages: Sequence[Message] | None = None
    prompt: str | None = None
    input_ids: Sequence[int] | None = None
    encoded: Sequence[int] | None = None  # ids of `messages` or `prompt`, where they are known already
    session_id: str | None = None  # sessions keep their KV cache between requests
    question_id: int | None = None  # of the message of the chat that the reply follows; None: the last one
    cache_salt: str = ""  # requests share KV caches only if their salts are equal
    tenant: str = ""  # whose the reply is; a server lets only them rate it
    resumable: bool = False  # without a session: its KV cache may go to disk, as those of sessions do
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    max_new_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None  # which replies are allowed
    tools: Tools = ()  # what the model may call, for the chat template (tools.py)
    shows_calls: bool = False  # the text has the marks of tool calls, also if they are special tokens
    thinking: bool | None = None  # whether the model is to think first; None: its template's own choice
    logprobs: int = 0  # how many of the most likely tokens to report with every token
    template_values: Mapping[str, Any] = field(default_factory=dict)  # more variables for the chat template
    opening: str = ""  # text with which the reply to `messages` begins; the response's text follows it
    begun: Begun | None = None  # `input_ids` end with its tokens; the response's text starts with its text
    untouched: bool = False  # answer without any adapter
    # Replies to write, of which a judge picks one; "auto": affordable.py; None: as the settings say.
    best_of: int | str | None = None
    examples: tuple[str, ...] = ()  # ids of the replies that are in the prompt as examples
    route: Any = None  # the router's choice (sona/optional/router.py); None without a router
    adapter_id: str | None = None  # name of the adapter that answers; "": none; None: the one in use
    chunk: int | None = None  # most prompt tokens to read at a time, set by admission; None: the backend's
    priority: int = 0  # a higher one is read earlier and waits for no place of a lower one
    patience: Patience = Patience()
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
    cached_tokens: int  # prompt tokens that the session's KV cache held already
    generation_tokens: int
    finish_reason: str  # "stop" | "length" | "cancelled"
    ttft_ms: float
    latency_ms: float
    prompt_tps: float  # newly prefilled tokens per second
    generation_tps: float
    cache_tokens: int  # tokens in the session's KV cache now
    kv: KVStats
    logprobs: list[TokenLogprob] = field(default_factory=list)
    examples: tuple[str, ...] = ()  # ids of the replies that were in the prompt as examples
    route: Any = None  # the request's route
    others: tuple["GenerationResponse", ...] = ()  # written with this one, and not chosen
    stopped_by: str | None = None  # the stop string that ended it
    limit: int | None = (
        None  # the most tokens that it could have: what was asked for, or the room that there was
    )
    repeats: bool = False  # it was ended, with the finish_reason "length", because it only repeated itself
    adapter: str | None = None  # name of the adapter that wrote it and learns from it; None: no adapter
    adapter_version: int = 0

    @property
    def ending(self) -> str:
        """Why it ended, for people: its finish_reason, or "repeats"."""
        return "repeats" if self.repeats else self.finish_reason


@dataclass(frozen=True)
class Chunk:
    """A piece of a reply. `text` is complete UTF-8 and may be empty; only the last chunk has `response`."""

    text: str
    generated: int = 0  # tokens generated so far
    prefilled: int = 0  # prompt tokens read so far, during prefill
    prompt_tokens: int = 0
    response: GenerationResponse | None = None
    replies: int = 1  # that are being written at the same time
    logprobs: tuple[
        TokenLogprob, ...
    ] = ()  # of the tokens since the last chunk, if the request asks for them
