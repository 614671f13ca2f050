"""This module defines the row of a table that describes an endpoint of the server. The server makes its
routes and the OpenAPI document from this table."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import ApiError, ErrorShape, anthropic_error, openai_error
from .keys import salt_digest
from .openai_answers import ErrorAnswer

if TYPE_CHECKING:
    from .model_pool import ModelPool
    from .serving import Serving


EVENTS = "text/event-stream"


@dataclass(frozen=True)
class Waiting:
    """The parts of a streamed answer besides its events. failed: a function that makes the last event of the
    stream from an error that occurs after the first event or keep-alive. keep_alive: the bytes that the
    server sends to the client after some seconds without an event."""

    failed: Callable[[ApiError], bytes]
    keep_alive: bytes = b": the reply is being prepared\n\n"
    media_type: str = EVENTS


@dataclass(frozen=True)
class EventStream:
    """A streamed answer: server-sent events or lines of JSON."""

    events: AsyncGenerator[bytes, None]
    waiting: Waiting


@dataclass(frozen=True)
class PlainText:
    """An answer that is not JSON. headers: the headers of the answer besides Content-Type and
    Content-Length."""

    text: str
    media_type: str = "text/plain; charset=utf-8"
    headers: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Call:
    """One request to an endpoint. The server has checked and decoded the request.

    serving: the open model that the body names. If the body has `model: null`, `serving` is the server's
    first model. If the endpoint's body has no field `model`, or if `Endpoint.opens` returns False for the
    body, `serving` is also the first model, and this model can be closed. models: all models of the server.
    body: a struct of the endpoint's type, or None. names: the values of the path's variables. salt: two
    requests share KV caches only if their salts are equal. facts: numbers for the log and for the list of
    recent requests, without text of a user. is_anthropic: True if the request has the header
    `anthropic-version`, which asks for Anthropic's form. query: a struct of the endpoint's type, or None.
    ignored: fields of the body that change nothing; a header of the answer names these fields. arrived: the
    time (time.monotonic_ns()) when the server had read the request; the model of the request opens after it.
    """

    serving: "Serving"
    models: "ModelPool"
    body: Any
    names: dict[str, str]
    salt: str
    facts: dict[str, float] = field(default_factory=dict)
    is_anthropic: bool = False
    query: Any = None
    ignored: list[str] = field(default_factory=list)
    arrived: int = field(default_factory=time.monotonic_ns)

    def salt_for(self, user: str | None) -> str:
        """Return the salt of the KV caches for one user of this API key. user: the name of the user that the
        client sent."""
        return salt_digest(self.salt, user) if user else self.salt


Answer = Any  # an EventStream, a PlainText, or a value that msgspec sends as JSON
Handler = Callable[[Call], Awaitable[Answer]]


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of the server.

    path: the path in Starlette's notation. body, answer: the structs of the request and the answer. query:
    the struct of the URL's query string; None: the server ignores the query string. event: the struct of a
    streamed event. is_open: True if a client needs no API key. errors: a function that makes the body of an
    error in the form that the endpoint's clients read; error_body: the struct of this body. statuses: the
    error statuses that this endpoint can send besides the statuses that openapi.py adds to every endpoint.
    media_type: the type of a PlainText; event_type: the type of a stream. links: OpenAPI's Link Objects,
    which name requests that can follow the answer. anthropic_answer: the struct of the answer to a request
    with the header `anthropic-version`, if this struct is not `answer`. opens: a function that returns True
    if the server opens the model that a body names. waiting: a function that returns the `Waiting` of a
    streamed answer, which the client gets while the model opens; None: no stream. is_control: True if the
    endpoint refuses web pages and needs a key of the chat app. is_private: True if the endpoint needs a key
    of the chat app and refuses all web pages except the server's own page. embeds: True if the body's `model`
    can be `embedding`, the name of the machine's embedding model. is_look: True if a request to this endpoint
    does not end the server's idle work.
    """

    method: str
    path: str
    handle: Handler
    summary: str
    answer: Any
    body: Any = None
    query: Any = None
    event: Any = None
    is_open: bool = False
    errors: ErrorShape = openai_error
    error_body: type = ErrorAnswer
    statuses: tuple[int, ...] = ()
    media_type: str = "text/plain"
    event_type: str = EVENTS
    links: Sequence[Mapping[str, Any]] = ()
    anthropic_answer: Any = None
    opens: Callable[[Any], bool] = lambda body: True
    waiting: "Callable[[Any], Waiting | None]" = lambda body: None
    is_control: bool = False
    is_private: bool = False
    embeds: bool = False
    is_look: bool = False


def error_shape(endpoint: Endpoint | None, headers: Mapping[str, str]) -> ErrorShape:
    """Return the function that writes an error in the form of the client's API.

    A client of Anthropic's API sends the header `anthropic-version`. This client gets Anthropic's form from
    an endpoint with an `anthropic_answer`, and for an unknown path. All other requests get the form of the
    endpoint, or OpenAI's form for an unknown path. endpoint: None for an unknown path.
    """
    if "anthropic-version" in headers and (endpoint is None or endpoint.anthropic_answer is not None):
        return anthropic_error
    return endpoint.errors if endpoint is not None else openai_error
