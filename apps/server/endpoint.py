"""What an endpoint is: a row of a table from which the routes and the OpenAPI document are made."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import ApiError, ErrorShape, openai_error
from .keys import salt_digest
from .openai_answers import ErrorAnswer

if TYPE_CHECKING:
    from .model_pool import ModelPool
    from .serving import Serving


EVENTS = "text/event-stream"


@dataclass(frozen=True)
class Waiting:
    """What a stream has besides its events. failed: an error after the first event, as events. keep_alive:
    what is sent in a time of silence.
    """

    failed: Callable[[ApiError], bytes]
    keep_alive: bytes = b": the reply is being prepared\n\n"
    media_type: str = EVENTS


@dataclass(frozen=True)
class EventStream:
    """An answer of server-sent events, or of lines."""

    events: AsyncGenerator[bytes, None]
    waiting: Waiting


@dataclass(frozen=True)
class PlainText:
    """An answer that is not JSON. headers: those to send besides Content-Type and Content-Length."""

    text: str
    media_type: str = "text/plain; charset=utf-8"
    headers: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Call:
    """One request to an endpoint, checked and decoded.

    serving: the model that the body names, open; where its `model` is null, the first one. For a body without
    such a field, the first one, which may be closed. models: all. body: of the endpoint's type, or None.
    names: what the path names. salt: caches are shared only between requests with equal salts. facts: for the
    log and the metrics; numbers only, no words of users. is_anthropic: the client reads Anthropic's form.
    query: of the endpoint's type, or None. ignored: fields of the body that change nothing, for a header.
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

    def salt_for(self, user: str | None) -> str:
        """The salt of one user of this API key."""
        return salt_digest(self.salt, user) if user else self.salt


Answer = Any  # EventStream, PlainText, or a msgspec struct, which is sent as JSON
Handler = Callable[[Call], Awaitable[Answer]]


@dataclass(frozen=True)
class Endpoint:
    """path: as Starlette writes it. body, answer: structs; event: the struct of a streamed event. query: the
    struct of what the URL has behind its `?`; None: that is not read. is_open: no API key is asked for.
    errors: how its clients read errors; error_body: the struct of that. statuses: errors that it answers with
    besides those that all endpoints have. media_type: of a PlainText; event_type: of a stream. links: what to
    do with the answer, as OpenAPI's Link Objects. anthropic_answer: the answer where the header
    `anthropic-version` is sent, if it is another. opens: whether the model that a body names is opened for
    it. waiting: what a client gets that streams, while its model is being opened; None: it does not stream.
    is_control: it is not for web pages, and needs a key of the chat app. is_private: it needs such a key,
    too; of web pages, only the server's own may ask. embeds: in its body `embedding` names the machine's
    embedding model. is_look: it does not end what the models do while nobody asks.
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
