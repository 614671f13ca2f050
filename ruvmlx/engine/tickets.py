"""A request in the scheduler: what writes its reply, who receives it, and how long it has waited."""

from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Protocol

from ..lora.base_lora import BaseLoRA
from .admission import Grant
from .reading_order import Place
from .run import Run
from .types import Chunk, GenerationRequest

OVERTAKEN = 8  # later requests that start first, until a waiting one counts as of the next higher priority


class Sink(Protocol):
    """Receives one request's reply. Called in the engine's thread."""

    def take(self, chunk: Chunk) -> None:
        """The next chunk; the last one has the response."""

    def fail(self, error: BaseException) -> None:
        """The request ended with an error; nothing follows."""


class Job(Protocol):
    """The reply to one request, or several replies of which one is chosen. lora: the base LoRA that it runs
    under. runs: all; running: those to decode."""

    @property
    def lora(self) -> BaseLoRA | None: ...

    @property
    def several(self) -> bool: ...

    @property
    def runs(self) -> list[Run]: ...

    @property
    def running(self) -> list[Run]: ...

    def start(self) -> Run:
        """The run that reads the prompt."""

    def join(self) -> None:
        """The prompt is read: fill `running`."""

    def drawn(self) -> Chunk:
        """Each of `running` has drawn a token: take those out that are over."""

    def end(self) -> Chunk: ...


class Ticket:
    """A request in the scheduler. replies: that are written to it. arrived: a time of `monotonic`. job,
    grant, place: once it is admitted; place: in the order in which prompts are read. decoding: its prompt is
    read. overtaken: by later requests."""

    def __init__(self, request: GenerationRequest, begin: Callable[[], Job], sink: Sink, replies: int = 1):
        self.request, self.begin, self.sink, self.replies = request, begin, sink, replies
        self.arrived, self.overtaken = monotonic(), 0
        self.job: Job | None = None
        self.grant, self.place = Grant(), Place(0.0, 1.0)
        self.reader: Run | None = None
        self.decoding = False

    @property
    def rank(self) -> int:
        """Those of a higher rank start first."""
        return self.request.priority + self.overtaken // OVERTAKEN

    @property
    def running(self) -> list[Run]:
        return self.job.running if self.job is not None and self.decoding else []


class Arrivals:
    """A sink that keeps what arrives, of one request or of several."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self.error: BaseException | None = None
        self.over = False

    def take(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.over = chunk.response is not None

    def fail(self, error: BaseException) -> None:
        self.error, self.over = error, True

    def taken(self) -> Iterator[Chunk]:
        """What has arrived since the last call."""
        while self._chunks:
            yield self._chunks.popleft()
