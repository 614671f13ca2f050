"""This module defines requests, chunks and responses: the data that the engine and the apps exchange."""

import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..kv.cache import KVStats
from ..models.config.model import Message, Tools
from ..models.text.tool_calls import ParsedCall
from ..sampling import Sampling, log_softmax, top_ids
from .grammar import Constraint

INTERACTIVE = 1  # the priority of a request from a chat, where a person waits for the reply


@dataclass(frozen=True)
class Begun:
    """An unfinished reply that the engine continues.

    text: the text of the reply so far
    tail: the last token ids of `text`; the bytes of these tokens can end inside a character
    """

    text: str
    tail: tuple[int, ...]


@dataclass(frozen=True)
class Patience:
    """The limits of a request's wait for memory. If the wait exceeds a limit, the request ends with the error
    MemoryBusy.

    seconds: the maximum wait; None: no limit
    behind: the maximum number of requests that wait before this one; None: no limit
    """

    seconds: float | None = None
    behind: int | None = None


@dataclass
class GenerationRequest:
    """A request for one reply to `messages` or `prompt` (raw text). `input_ids` override both."""

    messages: Sequence[Message] | None = None
    prompt: str | None = None
    input_ids: Sequence[int] | None = None
    # the token ids of `messages` or `prompt`, if the caller has encoded them
    encoded: Sequence[int] | None = None
    # the id of the session, which keeps its KV cache between requests; None: no session
    session_id: str | None = None
    # the id of the chat message that the reply answers; None: the last message of the chat's branch
    question_id: int | None = None
    cache_salt: str = ""  # requests share KV caches only if their salts are equal
    tenant: str = ""  # the owner of the reply; on a server only the owner is allowed to rate the reply
    resumable: bool = False  # True if the KV cache can go to disk although the request has no session
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    max_new_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None  # the rule that the reply must fit; None: any reply is allowed
    tools: Tools = ()  # the functions that the model is allowed to call, for the chat template (tools.py)
    # True: the text contains the marks of tool calls even if the marks are special tokens
    shows_calls: bool = False
    # the user's message that the reply answers, if ratings of the reply must not change the adapter: tool
    # results follow that message, or the reply continues a reply that teaches nothing; else None
    asked: str | None = None
    # True: the model must think first; False: it must not; None: the chat template decides
    thinking: bool | None = None
    logprobs: int = 0  # the number of most likely tokens to report with every token
    # additional variables for the chat template
    template_values: Mapping[str, Any] = field(default_factory=dict)
    opening: str = ""  # text with which the reply to `messages` begins; the response's text follows this text
    # The unfinished reply that the engine must continue. `input_ids` end with the reply's tokens; the
    # response starts with its text.
    begun: Begun | None = None
    # token ids that the caller expects in the reply; they change only the speed of the reply
    predicted: Sequence[int] = ()
    untouched: bool = False  # True: answer without any adapter
    # The number of replies of which a judge picks one. "auto": auto_best_of.py chooses the number; None: the
    # setting `best_of` decides.
    best_of: int | str | None = None
    examples: tuple[str, ...] = ()  # the ids of the replies that are in the prompt as examples
    # the way to generate the reply that the router chose (sona/optional/router.py); None: no router chose
    route: Any = None
    adapter_id: str | None = None  # the name of the adapter; "": no adapter; None: the current adapter
    # the maximum number of prompt tokens in one step, set by admission; None: the backend's own maximum
    prefill_chunk: int | None = None
    # a request of a higher priority starts earlier and its prompt is read faster; running requests of a lower
    # priority do not use up the places for it
    priority: int = 0
    patience: Patience = Patience()
    # set this event from any thread to stop the reply
    cancel: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token, and of the likeliest tokens at its place (`top`), at temperature 1
    and with the adapter applied."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprob(logits: np.ndarray, token: int, k: int) -> TokenLogprob:
    """Return the log-probability of a token, and of the k likeliest tokens, from logits [V]."""
    logprobs = log_softmax(logits)
    top = [(int(i), float(logprobs[i])) for i in top_ids(logprobs, k)]
    return TokenLogprob(token, float(logprobs[token]), top)


@dataclass(frozen=True)
class GenerationResponse:
    request_id: str
    session_id: str | None
    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int  # the number of prompt tokens that the session's KV cache already had
    generation_tokens: int
    finish_reason: str  # "stop" | "length" | "cancelled"
    ttft_ms: float
    latency_ms: float
    prompt_tps: float  # prompt tokens per second in the prefill, without cached tokens
    generation_tps: float
    cache_tokens: int  # the number of tokens in the session's KV cache after the reply
    kv: KVStats
    drafted: int = 0  # the number of guessed tokens that were checked (drafts.py)
    accepted: int = 0  # the number of guessed tokens that were right and after which the reply went on
    logprobs: list[TokenLogprob] = field(default_factory=list)
    examples: tuple[str, ...] = ()  # the ids of the replies that were in the prompt as examples
    route: Any = None  # the way to generate the reply that the router chose; copied from the request
    # the choice of the model that wrote the reply (sona/optional/selector.py); None: the user chose the model
    choice: Any = None
    # the other replies that best of n wrote together with this reply
    others: tuple["GenerationResponse", ...] = ()
    # the user's stars for this reply as best of n predicts them; None: no best of n, or no ratings yet
    predicted_stars: float | None = None
    stopped_by: str | None = None  # the stop string that ended the reply
    # The maximum number of reply tokens: the requested number, or less if the context has less room.
    limit: int | None = None
    # True: the reply almost only repeated itself, until the engine or the limit of tokens ended it;
    # finish_reason is usually "length"
    repeats: bool = False
    # name of the adapter that learns from the reply, and that wrote the reply unless adapter_version is 0;
    # None: no adapter
    adapter: str | None = None
    adapter_version: int = 0
    # the tool calls; set only in a chat, where `text` does not contain them
    calls: tuple[ParsedCall, ...] = ()
    # the estimated quality of the reply, 0 to 1, and its parts (optimizer/quality.py); None: no estimate
    quality: float | None = None
    quality_parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def ending(self) -> str:
        """Return the reason why the reply ended, as the program shows it to people: "repeats" or the
        finish_reason."""
        return "repeats" if self.repeats else self.finish_reason


@dataclass(frozen=True)
class Chunk:
    """A piece of a reply. `text` is complete UTF-8 and can be empty. Only the last chunk has a `response`.

    note: a line for the user. Before the first text, the line is about the model that writes the reply. Later
    lines are about a judge or a part of the machine that failed.
    """

    text: str
    generated: int = 0  # tokens generated so far
    prefilled: int = 0  # prompt tokens read so far, during prefill
    prompt_tokens: int = 0
    response: GenerationResponse | None = None
    replies: int = 1  # the number of replies that are being written at the same time
    # The logprobs of the tokens since the last chunk, if the request asks for them.
    logprobs: tuple[TokenLogprob, ...] = ()
    note: str = ""


NO_NEWS = Chunk("")  # what a reply yields if a step served only other replies (Scheduler.stream)
