"""This module defines a reply of the public API, as a whole and while the model writes it."""

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import InitVar, dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..engine.types import Chunk, GenerationResponse
from ..errors import UsageError
from ..models.text.thinking import split
from .arguments import check_text, kind_of
from .types import Rating

if TYPE_CHECKING:
    from ..runtime import Runtime

T = TypeVar("T")


class ReplyOwner(Protocol):
    """The methods of a LocalModel (model.py) that its replies use."""

    def rate(self, reply: "Reply | str", rating: str | int, note: str = "") -> Rating: ...

    def _submit(self, work: Callable[["Runtime"], T], cancel: threading.Event | None = None) -> Future[T]: ...

    def _call(self, work: Callable[["Runtime"], T]) -> T: ...


@dataclass(frozen=True)
class Reply:
    """One reply of the model. The store has the reply under its id.

    finish_reason: "stop", "length" (a limit or a loop) or "cancelled". prompt_tps, generation_tps: tokens
    per second. ttft_ms: milliseconds to the first token. examples: ids of the liked replies in the prompt.
    adapter: name of the adapter that learns from the reply's rating (usually it wrote the reply); None: the
        model wrote the reply without an adapter, and the adapter in use learns.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    generation_tokens: int
    prompt_tps: float
    generation_tps: float
    ttft_ms: float
    examples: tuple[str, ...]
    adapter: str | None
    _model: InitVar[ReplyOwner | None] = None  # no field, so that `dataclasses.asdict` leaves it out

    def __post_init__(self, _model: ReplyOwner | None) -> None:
        object.__setattr__(self, "_model", _model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy or a pickle of this reply: all attributes except the model. A model
        cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "_model"}

    @property
    def answer(self) -> str:
        """Return the text without the thinking part that some models write before the answer."""
        return split(self.text).answer

    def rate(self, rating: str | int, note: str = "") -> Rating:
        """Rate this reply "up", "down" or 1 to 5. The adapter learns at once. See `LocalModel.rate`."""
        return self._owner.rate(self, rating, note)

    @property
    def _owner(self) -> ReplyOwner:
        """The model that wrote this reply. Raises UsageError if this reply is a copy without a model."""
        owner: ReplyOwner | None = getattr(self, "_model", None)
        if owner is None:
            raise UsageError("a copy of a reply has no model; rate it by `rate` of an open model.")
        return owner

    def __str__(self) -> str:
        return self.text


class ChunkQueue(SimpleQueue[Chunk | None]):
    """The chunks of one reply that the caller has not read yet. After the last chunk, the queue has None.

    tell: a function that `add` calls after it has put a chunk or None into the queue. `AsyncReplyStream` sets
        this function, because it cannot block until a chunk is in the queue.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[], None] = lambda: None

    def add(self, chunk: Chunk | None) -> None:
        self.put(chunk)
        self.tell()


class ReplyStream(Iterator[str]):
    """An iterator over the pieces of one reply's text. The model writes on even if the caller reads no piece.

    `reply` is the whole reply. `stop`, the end of a `with` block, and garbage collection end the reply early;
    the store keeps the text so far, and the user can rate it.
    """

    def __init__(self, model: ReplyOwner, begin: Callable[["Runtime", threading.Event], Iterator[Chunk]]):
        self._model, self._chunks, self._cancel = model, (chunks := ChunkQueue()), threading.Event()
        self._response: GenerationResponse | None = None
        self._ended = False
        self._written = model._submit(_piped_chunks(begin, chunks, self._cancel), self._cancel)
        self._written.add_done_callback(lambda _: chunks.add(None))
        weakref.finalize(self, self._cancel.set)

    def __next__(self) -> str:
        while not self._ended:
            if text := self._record_chunk(self._chunks.get()):
                return text
        raise StopIteration

    def _record_chunk(self, chunk: Chunk | None) -> str:
        """Record that the caller has read this chunk. Return the text of the chunk, which can be "".

        chunk: None at the end of the reply. Then, if an error ended the reply, raise this error.
        """
        if chunk is None:
            self._ended = True
            self._chunks.add(None)  # another thread can wait for the end, too
            self._written.result()
            return ""
        self._response = chunk.response or self._response
        return chunk.text

    def stop(self) -> None:
        """End the reply before it is complete."""
        self._cancel.set()

    @property
    def reply(self) -> Reply:
        """Wait for the end of the reply and return the reply. If an error ended the reply, raises this error;
        if `next` has raised the error before, raises UsageError."""
        try:
            for _ in self:
                pass
        except KeyboardInterrupt:  # a shell keeps the traceback and so the stream: the reply would go on
            self.stop()
            raise
        if self._response is None:
            raise UsageError("this reply was ended by an error and has no text; ask again.")
        return _reply_of(self._response, self._model)

    def __enter__(self) -> "ReplyStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _piped_chunks(
    begin: Callable[["Runtime", threading.Event], Iterator[Chunk]],
    chunks: ChunkQueue,
    cancel: threading.Event,
) -> Callable[["Runtime"], None]:
    """Return a function for the runtime's thread that queues a reply's chunks."""

    def write(runtime: "Runtime") -> None:
        for chunk in begin(runtime, cancel):
            chunks.add(chunk)

    return write


def id_of(reply: Reply | str) -> str:
    """Return the id of a reply. Raises UsageError for anything else, such as a `Turn` of a chat."""
    found = reply.id if isinstance(reply, Reply) else reply
    if not isinstance(found, str):
        raise UsageError(
            f"a reply is a Reply or its id; got {kind_of(found)}. A Turn has the id as `turn.reply_id`."
        )
    check_text(found, "the id of a reply")
    return found


def writer_of(reply: Reply | str) -> str | None:
    """Return the name of the adapter that learns from a reply, or None if no adapter is known."""
    return reply.adapter if isinstance(reply, Reply) else None


def _reply_of(done: GenerationResponse, model: ReplyOwner) -> Reply:
    return Reply(
        done.request_id, done.text, tuple(done.token_ids), done.finish_reason, done.prompt_tokens,
        done.generation_tokens, done.prompt_tps, done.generation_tps, done.ttft_ms, done.examples,
        done.adapter, model,
    )  # fmt: skip
