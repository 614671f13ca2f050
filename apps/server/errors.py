"""This module defines errors that the server sends to clients. An error has an HTTP status, a line of text,
and, if a field of the request is wrong, the name of this field."""

import re
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ruvmlx.errors import (
    AdapterMismatch,
    BadPrompt,
    CacheTooLarge,
    Interrupted,
    MemoryBusy,
    ModelClosed,
    ModelNotFound,
    NotFound,
    PromptTooLong,
    RuvmlxError,
    StoreBusy,
    UsageError,
)
from ruvmlx.memory.load_plan import NotEnoughMemory
from ruvmlx.settings import home

if TYPE_CHECKING:
    from .requestlog import RequestLog

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES = {**TYPES, 408: "timeout_error", 413: "request_too_large", 503: "overloaded_error"}
PROMPTS = ("messages", "input", "prompt", "content")  # the names of the fields that have the prompt
RETRY_SECONDS = 1  # seconds: the default of the header Retry-After, for errors that pass with time


def _without_data_folder(text: str) -> str:
    """Return the text without the path of the data folder. A file in the data folder keeps its own name in
    the text. The path can contain the user's name, and a client of the server must not learn this name."""
    path = rf"(?<![\w.-]){re.escape(str(home()))}(/|(?![\w-]))"  # not a part of another path
    return re.sub(path, lambda found: "" if found[1] else "the data folder", text)


class ApiError(RuvmlxError):
    """An error that the server sends to the client. param: the name of the field that is wrong. code: a fixed
    word that programs can test. anthropic: the message for Anthropic's clients, which look for certain words;
    None if `message` has these words."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        anthropic: str | None = None,
    ):
        super().__init__(_without_data_folder(message))
        self.status, self.param, self.code = status, param, code
        self.anthropic = _without_data_folder(anthropic or message)
        self.seconds = RETRY_SECONDS  # seconds after which the client can try again, for 429 and 503

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "server_error" if self.status >= 500 else TYPES[400])

    @property
    def retry_after(self) -> int | None:
        """The seconds after which the client can send the same request again, for the statuses 429 and 503.
        None: the error has another status."""
        return self.seconds if self.status in (429, 503) else None


_STATUSES: list[tuple[type[RuvmlxError], int]] = [
    (UsageError, 400),
    (CacheTooLarge, 400),
    (NotFound, 404),
    (ModelNotFound, 404),
    (AdapterMismatch, 409),
    (StoreBusy, 503),
    (MemoryBusy, 503),
    (NotEnoughMemory, 503),
    (Interrupted, 503),
    (ModelClosed, 503),
]


_CODES: list[tuple[type[RuvmlxError], str]] = [
    (CacheTooLarge, "cache_too_large"),
    (MemoryBusy, "memory_busy"),
    (Interrupted, "stopping"),
    (ModelClosed, "opening"),
]


def stopping_error() -> ApiError:
    """Return the error for a request that the server does not answer because it stops."""
    return ApiError(503, "the server is stopping.", code="stopping")


def busy(message: str, seconds: int) -> ApiError:
    """Return the error for too many requests at once. seconds: the estimated time until the server can accept
    the request."""
    error = ApiError(429, message, code="busy")
    error.seconds = seconds
    return error


def api_error(error: RuvmlxError, param: str | None = None) -> ApiError:
    """Return the ApiError for an error of ruvmlx. param: the name of the request's field that caused the
    error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return _too_long(error, param or "messages")
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    if isinstance(error, CacheTooLarge):
        param = "max_tokens"
    return ApiError(status, str(error), param if status == 400 else None, code)


def request_error(error: RuvmlxError, body: Any) -> ApiError:
    """Convert an error of a request into an ApiError, and return the ApiError. If the error is a BadPrompt,
    the ApiError names the field of the body that has the prompt.

    body: the body of the request, or the struct of this body
    """
    prompt = next((name for name in PROMPTS if hasattr(body, name)), None)
    return api_error(error, prompt if isinstance(error, BadPrompt) else None)


def _too_long(error: PromptTooLong, param: str) -> ApiError:
    """Return the error for a prompt that is too long. Coding agents look for the words of this error and then
    shorten the conversation. Agents that use Anthropic's form also read the two numbers of tokens in the
    message."""
    return ApiError(
        400,
        f"This model's maximum context length is {error.limit + 1} tokens: {error}",
        param,
        "context_length_exceeded",
        f"prompt is too long: {error.tokens} tokens > {error.limit} maximum",
    )


@dataclass(frozen=True)
class InternalError:
    """A failure that the client did not cause. The client gets only `id`; the log gets `id` and `where`.

    where: the class of the error, and the last six files and line numbers through which the error passed. The
    text of the error is left out, because it can contain text of the user.
    """

    id: str
    where: str

    @classmethod
    def of(cls, error: BaseException) -> "InternalError":
        frames = traceback.extract_tb(error.__traceback__)[-6:]
        path = " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames)
        return cls(uuid.uuid4().hex[:12], f"{type(error).__name__} at {path}")

    def write_to(self, log: "RequestLog") -> None:
        log.write("error", {"id": self.id, "where": self.where})

    @property
    def answer(self) -> ApiError:
        return ApiError(500, f"internal error {self.id}; the server's log says where.", code="internal_error")


ErrorShape = Callable[[ApiError], dict[str, Any]]
# After an error with these details, the tool runner of Anthropic's client sends the whole conversation again,
# without the field `thread`.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form."""
    facts = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return {"error": facts}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form. If a field of the request is wrong, `param` has the
    name of this field. If the request needs a thread (a conversation that the server keeps), `details` says
    that the server has no threads."""
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else TYPES[400])
    facts: dict[str, Any] = {"type": kind, "message": error.anthropic, "param": error.param}
    facts["code"] = error.code
    if (error.param, error.code) == ("thread", "unsupported_parameter"):
        facts["details"] = _NO_THREADS
    return {"type": "error", "error": facts}
