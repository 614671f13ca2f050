"""A request in the scheduler: the job that writes its reply, the sink that receives it, and its waiting
time."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Protocol

from ..lora.base_lora import BaseLoRA
from .admission import Grant
from .reading_order import Place
from .run import Run
from .types import Chunk, GenerationRequest

# after this many later requests have started first, a waiting request counts as one priority higher
OVERTAKEN = 8


class Sink(Protocol):
    """Receives the reply to one request. Called in the engine's thread."""

    def take(self, chunk: Chunk) -> None:
        """Receive the next chunk. The last one has the response."""

    def fail(self, error: BaseException) -> None:
        """Receive the error that ended the request. Nothing follows."""


class Job(Protocol):
    """One reply to a request, or several replies of which one is chosen.

    lora: the base LoRA to run with
    several: whether there are several replies
    runs: all replies
    running: the replies that are being decoded
    """

    @property
    def lora(self) -> BaseLoRA | None: ...

    @property
    def several(self) -> bool: ...

    @property
    def runs(self) -> list[Run]: ...

    @property
    def running(self) -> list[Run]: ...

    def start(self) -> Run:
        """Return the run that reads the prompt."""

    def join(self) -> None:
        """Fill `running`. The prompt has been read."""

    def next_chunk(self) -> Chunk:
        """Handle one new token of each of `running`: remove the runs that are over."""

    def end(self) -> Chunk: ...


class Ticket:
    """A request in the scheduler.

    replies: the number of replies to the request
    arrived: when the request came (time.monotonic())
    overtaken: how many later requests started before this one
    job, grant: set when the request is admitted
    place: its place in the order in which prompts are read
    decoding: whether its prompt has been read
    """

    def __init__(self, request: GenerationRequest, begin: Callable[[], Job], sink: Sink, replies: int = 1):
        self.request, self.begin, self.sink, self.replies = request, begin, sink, replies
        self.arrived, self.overtaken = monotonic(), 0
        self.job: Job | None = None
        self.grant, self.place = Grant(), Place(0.0, 1.0)
        self.reader: Run | None = None
        self.decoding = False

    @property
    def rank(self) -> int:
        """Requests of a higher rank start first."""
        return self.request.priority + self.overtaken // OVERTAKEN

    @property
    def running(self) -> list[Run]:
        return self.job.running if self.job is not None and self.decoding else []


def reader_of(ticket: Ticket, going: Sequence[Ticket]) -> Ticket:
    """Return the request that already reads this request's prompt, or the request itself. A prompt is read
    once, because `Admission.total` counts its pages once."""
    same = (t for t in going if t.reader and t.grant.prompt == ticket.grant.prompt is not None)
    return next(same, ticket)


class Arrivals:
    """A sink that keeps the chunks of one request or of several."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self.error: BaseException | None = None
        self.over = False

    def take(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.over = chunk.response is not None

    def fail(self, error: BaseException) -> None:
        self.error, self.over = error, True

    def drain(self) -> Iterator[Chunk]:
        """Yield the chunks that have arrived since the last call."""
        while self._chunks:
            yield self._chunks.popleft()
