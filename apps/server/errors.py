"""Errors as clients see them: a status, one line, and the field that is wrong."""

import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ruvmlx.errors import (
    AdapterMismatch,
    CacheTooLarge,
    Interrupted,
    MemoryBusy,
    ModelNotFound,
    NotFound,
    PromptTooLong,
    RuvmlxError,
    StoreBusy,
    UsageError,
)
from ruvmlx.memory.load_plan import NotEnoughMemory

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
RETRY_SECONDS = 1  # the Retry-After of errors that pass, where nothing better is known


class ApiError(RuvmlxError):
    """An answer with an error status. param: the field that is wrong; code: a word that programs may test;
    anthropic: the message in the words that Anthropic's clients look for, if it is another."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        anthropic: str | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.anthropic = anthropic or message
        self.seconds = RETRY_SECONDS  # after which it may succeed, where a status says to try again

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "server_error" if self.status >= 500 else TYPES[400])

    @property
    def retry_after(self) -> int | None:
        """Seconds after which the same request may succeed."""
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
]


_CODES: list[tuple[type[RuvmlxError], str]] = [
    (CacheTooLarge, "cache_too_large"),
    (MemoryBusy, "memory_busy"),
    (Interrupted, "stopping"),
]


def busy(message: str, seconds: int) -> ApiError:
    """Too many requests; seconds: until it may be answered."""
    error = ApiError(429, message, code="busy")
    error.seconds = seconds
    return error


def api_error(error: RuvmlxError, param: str | None = None) -> ApiError:
    """One of our own errors as an answer. param: the field that a wrong request is about."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return _too_long(error)
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    if isinstance(error, CacheTooLarge):
        param = "max_tokens"
    return ApiError(status, str(error), param if status == 400 else None, code)


def _too_long(error: PromptTooLong) -> ApiError:
    """Agents shorten the conversation when they find these words, and the numbers in Anthropic's."""
    return ApiError(
        400,
        f"This model's maximum context length is {error.limit + 1} tokens: {error}",
        "messages",
        "context_length_exceeded",
        f"prompt is too long: {error.tokens} tokens > {error.limit} maximum",
    )


@dataclass(frozen=True)
class InternalError:
    """A failure that is not the client's fault. The client gets `id`; the log gets `id` and `where`.

    where: class of the error and the functions that it passed. Its text is left out: it may quote the user.
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


def openai_error(error: ApiError) -> dict[str, Any]:
    """The body of an error as OpenAI's clients read it."""
    facts = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return {"error": facts}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The body of an error as Anthropic's clients read it; the message names the field that is wrong."""
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else TYPES[400])
    facts = {"type": kind, "message": error.anthropic, "param": error.param, "code": error.code}
    return {"type": "error", "error": facts}
