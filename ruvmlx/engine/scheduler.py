"""This module does continuous batching: requests join and leave between two decode steps.

    scheduler.submit(request, sink, adapter)  # any number, also while others run
    while scheduler.step():
        ...                                   # ratings, new requests

One step reads at most one piece of a prompt, then decodes and draws one token of every running reply with the
same base LoRA. A step reads the weights once for these replies. Each reply has its own cache, sampler and
seed. Batching therefore changes a reply only by rounding errors, or by no bit with quantised weights on the
native backend. (Yu et al. 2022, "Orca"; prompts in pieces: Agrawal et al. 2024, "Sarathi-Serve")

`ReadingOrder` decides which prompt is read: a short prompt overtakes a long one, and, apart from the time for
one piece, no prompt is ready later than if all prompts of the same priority shared the speed equally. The
measured pace (tokens per second) gives the size of a piece. While replies run, a piece delays the next token
of each reply by at most about DELAY. After a piece, the scheduler decodes for some steps without a piece:
while n prompts are read, decoding gets 1/(n + 1) of the time. While no reply runs, a piece takes about ALONE
seconds. A new request waits for the end of this piece.

The replies of one step can have different adapters of the output head. Replies with different base LoRAs
cannot share a step, so they take turns.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from time import monotonic, perf_counter

from ..backends.base import HeadAdapter
from ..errors import RuvmlxError
from ..lora.base_lora import BaseLoRA
from .admission import Admission, Grant
from .best_of import BestOf
from .queue import Arrivals, Job, Sink, Ticket, cache_ids, has_decoding, reader_of
from .reading_order import ReadingOrder, ReadingPace
from .recorder import Recorder
from .run import EngineParts, Run
from .steps import decode_one, draw_all
from .types import NO_NEWS, Chunk, GenerationRequest

PLACES = 64  # a request can start while fewer than PLACES requests of its or a higher priority run
DELAY = 0.1  # seconds: about the longest delay of a running reply's next token by a piece of a prompt
SHARE = 0.5  # the planned time of a prompt's piece, divided by DELAY; below 1, as the measured pace varies
ALONE = 0.15  # seconds: the planned time of a piece of a prompt while no reply is being decoded


class Scheduler:
    """A scheduler serves requests on one engine, in the engine's thread. An error ends only the request in
    which it occurs, or the requests that share the failed step. Ctrl-C in a step removes all requests."""

    def __init__(self, engine: EngineParts, width: int = PLACES, delay: float | None = DELAY):
        """width: a request can start while fewer than `width` requests of its priority or a higher one run
        delay: seconds: about the longest delay of a running reply's next token by a piece of a prompt; None:
            read whole prompts, because no user waits for single tokens
        """
        self.engine, self.width, self._delay = engine, width, delay
        self._waiting: list[Ticket] = []  # in order of arrival
        self._active: list[Ticket] = []
        self.admission = Admission(engine)
        self._pace = ReadingPace()
        self._steps = 0  # the number of steps so far
        self._order = ReadingOrder()
        self._owed = 0.0  # seconds of decoding before the next piece of a prompt
        self._turn: BaseLoRA | None = None  # the base LoRA of the last step
        self._installed: list[BaseLoRA | None] = []  # [the base LoRA that the last step installed], or []
        self._home: BaseLoRA | None = None  # the base LoRA that the backend had before a step changed it

    # -- requests ------------------------------------------------------------------------------------

    def submit(
        self,
        request: GenerationRequest,
        sink: Sink,
        adapter: HeadAdapter | None = None,
        recorder: Recorder | None = None,
    ) -> Ticket:
        """Queue a request for one reply. The request is checked at its start; errors go to the sink."""
        return self.add(request, lambda: BestOf(self.engine, [request], adapter, [recorder]), sink)

    def add(
        self, request: GenerationRequest, begin: Callable[[], Job], sink: Sink, replies: int = 1
    ) -> Ticket:
        """Queue a request.

        begin: a function that makes the job; the scheduler calls it when the request starts
        replies: the number of replies that the job writes
        """
        ticket = Ticket(request, begin, sink, replies)
        self._waiting.append(ticket)
        return ticket

    def stream(
        self, request: GenerationRequest, begin: Callable[[], Job], replies: int = 1
    ) -> Iterator[Chunk]:
        """Yield the chunks of one request. Each step also serves the other requests.

        Several streams can take turns in one thread. A stream runs a step only if no other stream has run one
        since its last turn, so one step serves a round of turns. While other requests wait or run, a turn
        yields all that has arrived as one chunk, or NO_NEWS; no stream holds up the others.
        """
        arrived = Arrivals()
        seen = self._steps if not self else -1  # a stream that joins others leaves the first step to them
        ticket = self.add(request, begin, arrived, replies)
        try:
            while not arrived.over:
                beside = len(self) > 1
                if seen == self._steps:
                    self.step()
                seen = self._steps
                if beside:
                    yield arrived.drain_joined() or NO_NEWS
                else:
                    yield from arrived.drain()
            if (rest := arrived.drain_joined()) is not None:
                yield rest
            if arrived.error is not None:
                raise arrived.error
        finally:
            self._leave(ticket)
            if not self:
                self.rest()

    def __len__(self) -> int:
        """Return the number of requests that wait for their start or run."""
        return len(self._waiting) + len(self._active)

    @property
    def counts(self) -> tuple[int, int]:
        """Return the number of requests that run and the number of requests that wait."""
        return len(self._active), len(self._waiting)

    @property
    def sessions(self) -> set[str]:
        """Return the session ids of the requests that wait or run."""
        tickets = [*self._waiting, *self._active]
        return {t.request.session_id for t in tickets if t.request.session_id is not None}

    def _uses(self, session_id: str | None) -> bool:
        return session_id is not None and any(t.request.session_id == session_id for t in self._active)

    # -- steps ---------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Read at most one piece of a prompt, then decode one token of every running reply that uses the base
        LoRA of this step. Returns False if no request is left. An error that is raised ends all requests."""
        self._steps += 1
        try:
            self._admit()
            group = self._next_group()
            self._read(group)
            begun = perf_counter()
            self._decode(group)
            self._draw(group)
            self._owed -= perf_counter() - begun
        except BaseException as error:  # After, for example, Ctrl-C, the content of the KV caches is unknown.
            self.fail_all(error, keep=False)
            raise
        return len(self) > 0

    def rest(self) -> None:
        """Install the base LoRA that the backend had before the scheduler's steps, unless other code has
        installed a base LoRA since. Call `rest` before the backend does work outside the scheduler."""
        if self._installed and self.engine.backend.lora is self._installed[0] is not self._home:
            self.engine.backend.set_lora(self._home)
        self._installed = []

    def fail_all(self, error: BaseException, keep: bool = True) -> None:
        """End every request with the error `error`. keep: True if the KV caches of the requests are valid.
        If the end of one request raises another error, the other requests still end."""
        with ExitStack() as last:
            last.callback(self.rest)
            for ticket in reversed([*self._active, *self._waiting]):
                last.callback(self._end, ticket, error, keep)

    def drop_all(self) -> None:
        """Remove every request. The KV caches stay as they are."""
        for ticket in [*self._active, *self._waiting]:
            self._leave(ticket)

    # -- one step ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting requests by rank, then by arrival, but none whose session is in use. If a request
        waits for memory, those after it wait too, because they could take the free memory again and again. A
        cancelled request starts first and needs no place and no memory, because its start ends it."""
        ordered = sorted(self._waiting, key=lambda t: (not t.request.cancel.is_set(), -t.rank))
        for i, ticket in enumerate(ordered):
            if self._uses(ticket.request.session_id):
                continue
            if not (ticket.request.cancel.is_set() or self._has_place(ticket.request)):
                return
            if not self._start(ticket):
                self._end_waits(ordered[i:])
                return

    def _start(self, ticket: Ticket) -> bool:
        """Start a request, or report its error. Returns False if the request must wait for memory."""
        try:
            grant = self.admission.grant(
                ticket.request, ticket.replies, self._grants(), cache_ids(self._active)
            )
            if grant is None:
                return False
            ticket.job, ticket.grant = ticket.begin(), grant
            ticket.place = self._order.join(
                unread_tokens(self.engine, ticket.request), ticket.request.priority
            )
        except Exception as error:  # noqa: BLE001 - the error goes to the sink
            self._fail(ticket, error)
            return True
        for earlier in self._waiting[: self._waiting.index(ticket)]:
            earlier.overtaken += 1
        self._waiting.remove(ticket)
        self._active.append(ticket)
        return True

    def _end_waits(self, waiting: Sequence[Ticket]) -> None:
        """End the requests whose wait for memory exceeds a limit of their `patience`."""
        for i, ticket in enumerate(waiting):
            patience, waited = ticket.request.patience, monotonic() - ticket.arrived
            late = patience.seconds is not None and waited > patience.seconds
            if late or (patience.behind is not None and i >= patience.behind):
                try:
                    error: Exception = self.admission.refusal(
                        ticket.request, ticket.replies, self._grants(), cache_ids(self._active)
                    )
                except Exception as wrong:  # noqa: BLE001 - the error goes to the sink
                    error = wrong
                self._fail(ticket, error)

    def _grants(self) -> list[Grant]:
        return [ticket.grant for ticket in self._active]

    def _has_place(self, request: GenerationRequest) -> bool:
        """Return True if fewer than `width` requests of this request's priority or a higher one run."""
        return sum(t.request.priority >= request.priority for t in self._active) < self.width

    def _next_group(self) -> list[Ticket]:
        """Install the base LoRA whose turn is next, and return the requests that use it."""
        loras = list({id(t.job.lora): t.job.lora for t in self._active if t.job}.values())
        if not loras:
            return []
        last = next((i for i, lora in enumerate(loras) if lora is self._turn), -1)
        self._turn = loras[(last + 1) % len(loras)]
        self._install(self._turn)
        return [t for t in self._active if t.job and t.job.lora is self._turn]

    def _install(self, lora: BaseLoRA | None) -> None:
        backend = self.engine.backend
        if not self._installed or backend.lora is not self._installed[0]:
            self._home = backend.lora
        if backend.lora is not lora:
            backend.set_lora(lora)
        self._installed = [lora]

    def _read(self, group: Sequence[Ticket]) -> None:
        """Read a piece of the next prompt, unless replies must decode first. If `delay` is None, read all
        prompts of the group to their ends. End the prefill of cancelled requests."""
        readers = [ticket for ticket in group if not ticket.decoding]
        going = [ticket for ticket in readers if not ticket.request.cancel.is_set()]
        for ticket in readers:
            if ticket not in going:
                self._read_some(ticket)
        if self._delay is None:
            for ticket in going:
                while not ticket.decoding and ticket in self._active:
                    self._read_some(ticket)
        elif going and not (self._owed > 0 and has_decoding(self._active)):
            self._read_some(reader_of(min(going, key=lambda ticket: ticket.place.end), going))

    def _read_some(self, ticket: Ticket) -> None:
        assert ticket.job is not None
        try:
            run = ticket.reader = ticket.reader or ticket.job.start()
            run.use_steps(self._delay is not None or ticket.job.several or len(self._active) > 1)
            self._read_piece(ticket, run)
            if not run.unread:
                self._order.leave(ticket.place)
                ticket.job.join()
                ticket.decoding = True
        except Exception as error:  # noqa: BLE001 - the error goes to the sink
            self._fail(ticket, error)

    def _read_piece(self, ticket: Ticket, run: Run) -> None:
        seconds = SHARE * (self._delay or 0.0) if has_decoding(self._active) else ALONE
        most = None if self._delay is None else self._pace.piece(seconds)
        begun, before = perf_counter(), run.unread
        chunk = run.read_piece(most)
        tokens, seconds = before - run.unread, perf_counter() - begun
        self._order.count(ticket.place, tokens)
        if most is not None and tokens:
            self._pace.measure(tokens, seconds, most)
            self._owed = seconds / sum(not t.decoding for t in self._active)
        if chunk is not None:
            ticket.sink.take(chunk)

    def _decode(self, group: Sequence[Ticket]) -> None:
        """Decode the last tokens of two or more runs in one step. One run alone decodes in `_draw`."""
        waiting = [run for ticket in group for run in ticket.running if run.waits]
        if len(waiting) < 2:
            return
        try:
            decode_one(self.engine, waiting)
        except Exception as error:  # noqa: BLE001 - the error goes to the sinks
            self._fail_all_of(group, error)

    def _draw(self, group: Sequence[Ticket]) -> None:
        decoding = [ticket for ticket in group if ticket.decoding and ticket in self._active]
        runs = [run for ticket in decoding for run in ticket.running]
        for ticket in decoding:
            for run in ticket.running:
                run.use_steps(len(runs) > 1 or len(self._active) > 1)
        try:
            failed = draw_all(self.engine, runs)
        except Exception as error:  # noqa: BLE001 - the error goes to the sinks
            self._fail_all_of(decoding, error)
            return
        for ticket in decoding:
            errors = [error for run, error in failed if run in ticket.running]
            if errors:
                self._fail(ticket, errors[0])
            else:
                self._deliver(ticket)

    def _deliver(self, ticket: Ticket) -> None:
        assert ticket.job is not None
        try:
            if ticket.running:
                ticket.sink.take(ticket.job.next_chunk())
            if not ticket.running:
                last = ticket.job.end()
                self._active.remove(ticket)
                ticket.release()
                ticket.sink.take(last)
        except Exception as error:  # noqa: BLE001 - the error goes to the sink
            self._fail(ticket, error, keep=True)

    # -- leaving -------------------------------------------------------------------------------------

    def _fail_all_of(self, tickets: Sequence[Ticket], error: Exception) -> None:
        for ticket in tickets:
            if ticket.decoding:
                self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: Exception, keep: bool = False) -> None:
        # A traceback would keep the stack frames alive, and the frames would keep the caches alive.
        if isinstance(error, RuvmlxError):
            error.__traceback__ = None
        self._end(ticket, error, keep)

    def _end(self, ticket: Ticket, error: BaseException, keep: bool) -> None:
        """Remove a request, and tell its sink the error, also if the removal raises another error."""
        try:
            self._leave(ticket, keep)
        finally:
            ticket.sink.fail(error)

    def _leave(self, ticket: Ticket, keep: bool = True) -> None:
        """Remove a request. keep: False if the layers of its cache can hold different numbers of tokens."""
        self._order.leave(ticket.place)
        for held in (self._waiting, self._active):
            if ticket in held:
                held.remove(ticket)
                ticket.stop(keep)


def fits_into(scheduler: Scheduler, nbytes: int) -> bool:
    """Return True if all caches that cannot be evicted fit into `nbytes` bytes at their full lengths."""
    pinned = scheduler.admission.pinned_bytes(cache_ids(scheduler._active))
    return scheduler.admission.total(scheduler._grants()) + pinned <= nbytes


def replies_in_progress(scheduler: Scheduler) -> int:
    """Return the number of replies of the requests that run."""
    return sum(ticket.replies for ticket in scheduler._active)


def unread_tokens(engine: EngineParts, request: GenerationRequest) -> int:
    """Return the approximate number of tokens of the request's prompt that are in no KV cache in memory."""
    prompt = engine.prompt_ids(request)
    return len(prompt) - engine.sessions.known_tokens(request.session_id, prompt, request.cache_salt)
