"""This module describes a request in the scheduler: the job that writes its reply, the sink that receives the
reply, and the waiting time."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic
from typing import Protocol

from ..lora.base_lora import BaseLoRA
from .admission import Grant
from .reading_order import Place
from .run import Run
from .types import Chunk, GenerationRequest

# Each time that OVERTAKEN later requests have started before a waiting request, the rank of the waiting
# request rises by one.
OVERTAKEN = 8


class Sink(Protocol):
    """A sink receives the reply to one request. The scheduler calls the sink in the engine's thread."""

    def take(self, chunk: Chunk) -> None:
        """Receive the next chunk of the reply. The last chunk has the response."""

    def fail(self, error: BaseException) -> None:
        """Receive the error that ended the request. After `fail` the sink receives no more calls."""


class Job(Protocol):
    """A job writes one reply to a request, or several replies of which one is chosen.

    lora: the base LoRA with which the backend runs the replies
    several: True if the job writes more than one reply
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
        """Begin the first reply, and return its run, which reads the prompt."""

    def join(self) -> None:
        """Start the replies other than the first one, and put all replies into `running`. Call `join` only
        after the whole prompt was read."""

    def next_chunk(self) -> Chunk:
        """Update the job after each run in `running` has drawn one token. Return the next chunk for the sink.
        Remove the runs that are over from `running`."""

    def end(self) -> Chunk: ...


class Ticket:
    """A request that waits or runs in the scheduler.

    replies: the number of replies to the request
    arrived: the time when the request arrived (time.monotonic())
    overtaken: the number of later requests that started before this request
    job, grant: the job that writes the replies, and the memory that the job can hold; both are set when the
        request starts
    place: the place of the request in the order in which prompts are read
    decoding: True if the whole prompt has been read, so that the replies are decoded
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
        """Return the rank of the request; requests of a higher rank start first."""
        return self.request.priority + self.overtaken // OVERTAKEN

    @property
    def running(self) -> list[Run]:
        return self.job.running if self.job is not None and self.decoding else []

    def stop(self, keep: bool) -> None:
        """End the runs and drop the job. keep: False if the layers of a cache can hold different numbers of
        tokens."""
        with ExitStack() as last:  # if a run fails, the other runs still end
            last.callback(self.release)
            for run in self.job.runs if self.job else ():
                last.callback(run.sync)
                if not keep:
                    last.callback(run.forget_cache)

    def release(self) -> None:
        """Drop the job and its KV caches. The stream of the request keeps this ticket until the next turn of
        the stream, and the memory of the caches must be free before."""
        self.job = self.reader = None


def reader_of(ticket: Ticket, going: Sequence[Ticket]) -> Ticket:
    """Return the request in `going` that already reads the same prompt as `ticket`. If there is no such
    request, return `ticket`. Two requests must not read the same prompt at the same time, because
    `Admission.total` counts the pages of the prompt once."""
    same = (t for t in going if t.reader and t.grant.prompt == ticket.grant.prompt is not None)
    return next(same, ticket)


def cache_ids(tickets: Sequence[Ticket]) -> set[int]:
    """Return the Python ids (`id`) of the KV caches that the requests of `tickets` use."""
    jobs = [ticket.job for ticket in tickets if ticket.job]
    return {id(run.session.cache) for job in jobs for run in job.runs}


def has_decoding(tickets: Sequence[Ticket]) -> bool:
    """Return True if at least one request of `tickets` has read its prompt and writes its reply."""
    return any(ticket.decoding for ticket in tickets)


class Arrivals:
    """A sink that keeps the chunks of one or several requests until `drain` returns the chunks."""

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

    def drain_joined(self) -> Chunk | None:
        """Return the chunks of one request that have arrived since the last call as one chunk, or None if no
        chunk has arrived."""
        chunks = list(self.drain())
        if len(chunks) < 2:
            return chunks[0] if chunks else None
        return replace(
            chunks[-1],
            text="".join(chunk.text for chunk in chunks),
            logprobs=tuple(token for chunk in chunks for token in chunk.logprobs),
            note=" ".join(chunk.note for chunk in chunks if chunk.note),
        )
