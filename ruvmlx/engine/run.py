"""This module runs one request: it reads the prompt (prefill), then decodes the reply token by token."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import numpy as np

from ..backends.base import HeadAdapter, Holding, Step, Streaming
from ..errors import UsageError
from ..kernels.replies import ReplyWork
from ..models.config.model import Model
from ..models.text.thinking import opened_by
from ..models.text.tool_calls import shown_marks
from ..sampling import check_sampling
from ..tiers import PAGE
from .constraint import Matcher, matcher_for
from .detokenize import StopStrings, StreamDecoder
from .drafts import DraftCounts, DraftParts, new_drafts
from .reading_order import PANEL
from .recorder import Recorder, WorkRecorder
from .repetition import Repetition, is_repeated_prose
from .session import Session
from .sessions import SessionManager
from .side_change import RunCancelled, on_living_side
from .source import Source, StepSource, needs_steps, source
from .types import Chunk, GenerationRequest, GenerationResponse, TokenLogprob, token_logprob

# The engine reads a prompt in pieces: first FIRST_PIECE tokens, then about as many as take PIECE_SECONDS, but
# at least LEAST_PIECE and at most a prefill chunk. The chat can show progress between two pieces.
FIRST_PIECE, LEAST_PIECE, PIECE_SECONDS = 512, 256, 2.0  # tokens, tokens, seconds


class EngineParts(DraftParts, Protocol):
    """The attributes of an engine that a run uses."""

    model: Model
    sessions: SessionManager

    def prompt_ids(self, request: GenerationRequest) -> list[int]: ...


class Run:
    """A run answers one request, and has all state of this request. Call `prefill`, then `draw` until
    `is_over` is true, then `end`. The method `chunks` makes all these calls.

    Raises UsageError if the request cannot be answered.
    """

    def __init__(
        self,
        engine: EngineParts,
        request: GenerationRequest,
        adapter: HeadAdapter | None = None,
        recorder: Recorder | None = None,
        steps: bool = False,
        session: Session | None = None,
    ):
        """steps: True if the caller decodes the tokens and passes each step to `take` (scheduler.py)
        session: a session of this run alone that has read the whole prompt; None: the engine finds one
        """
        if request.max_new_tokens < 1:
            raise UsageError(f"max-tokens is {request.max_new_tokens}; it must be 1 or more.")
        check_sampling(request.sampling)
        self.engine, self.request, self.adapter, self.recorder = engine, request, adapter, recorder
        tokenizer = engine.model.tokenizer
        shown = shown_marks(tokenizer) if request.shows_calls else None
        self.decoder = StreamDecoder(tokenizer, shown, not request.opening)
        self.stops = StopStrings(request.stop)
        self.prompt = engine.prompt_ids(request)
        self._prefill_chunk = min(request.prefill_chunk or engine.backend.chunk, engine.backend.chunk)
        self.limit = min(request.max_new_tokens, engine.model.context - len(self.prompt))
        self.drawn: list[int] = []  # ids of the drawn tokens; the end token is one of them
        self.recorded = 0  # the number of drawn tokens that the recorder has received
        self.ids: list[int] = []
        self.shared = False  # True if this run is a fork, or if the caller computed one of its decode steps
        self._read = self._fed = 0  # number of prompt tokens read by this run; number of `ids` in the session
        self._can_stream = isinstance(engine.backend, Streaming) and engine.backend.streams
        self._was_beside_others = False  # True if other runs waited while this run read a piece
        self.text: list[str] = [self.decoder.go_on(request.begun)] if request.begun else []
        # The start of the reply that the chat template wrote at the end of the prompt, for example "<think>".
        self._opening = "" if request.begun or request.opening else opened_by(tokenizer, self.prompt)
        self.rule = self._new_rule()
        self.repetition = self._new_repetition()
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None  # the reason why the run has ended; None while the run goes on
        self.started = self.first_token = time.perf_counter()
        self._prefilled_at: float | None = None  # end of the prefill, if an earlier source read the prompt
        self.session: Session = session or engine.sessions.get_or_create(
            request.session_id, self.prompt, request.cache_salt, request.resumable
        )
        try:
            self.cached = len(self.prompt) if session else engine.sessions.rewind(self.session, self.prompt)
            self.drafts = new_drafts(engine, self.prompt, request.predicted, self.rule)
            self.source: Source = self._new_source(steps)
        except BaseException:  # no run ends this session, and a session of a run can never be evicted
            engine.sessions.forget(self.session)
            raise

    def fork(self, request: GenerationRequest, recorder: Recorder | None = None) -> "Run":
        """Return a run for a request that continues after the same prompt. This run must have steps=True."""
        session = self.engine.sessions.fork(self.session)
        try:
            other = Run(self.engine, request, self.adapter, recorder, steps=True, session=session)
            other.started, other.shared = self.started, True
            source = cast(StepSource, self.source)
            other.source = source.fork(session.cache, request.sampling, other.rule, other.drafts)
        except BaseException:  # as in `__init__`: no run ends this session
            self.engine.sessions.forget(session)
            raise
        return other

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    def chunks(self) -> Iterator[Chunk]:
        with sync_at_exit([self]):
            yield from self.prefill()
            while chunk := self.draw():
                yield chunk
        yield self.end()

    def prefill(self) -> Iterator[Chunk]:
        """Read the prompt, one piece at a time."""
        while chunk := self.read_piece():
            yield chunk

    @property
    def unread(self) -> int:
        """Return the number of prompt tokens that are not yet read."""
        return 0 if self.is_over else len(self.prompt) - self.cached - self._read

    def read_piece(self, most: int | None = None) -> Chunk | None:
        """Read the next piece of the prompt. Returns None if the whole prompt has been read, or if the run
        was cancelled.

        most: about the maximum number of tokens, so that other runs do not wait long; None: no maximum
        """
        if not self.unread:
            return None
        size = self._size_alone() if most is None else self._size_beside_others(most)
        at = self.cached + self._read
        piece = self.prompt[at : at + size]
        try:
            self.raise_if_cancelled()
            self.session.tokens.extend(piece)
            on_living_side(
                [self], lambda: self.source.prefill(piece, progress=lambda done: self.raise_if_cancelled())
            )
        except RunCancelled:
            self.finish_reason = "cancelled"
            return None
        self._read += len(piece)
        return Chunk("", 0, at + len(piece), len(self.prompt))

    def _size_alone(self) -> int:
        """Return the number of prompt tokens to read next if no other run waits: first FIRST_PIECE, then
        about as many as take PIECE_SECONDS, but at least LEAST_PIECE. Limit the number to a prefill chunk,
        or, after a piece beside other runs, to the rest of the prefill chunk."""
        done, most = self._read, self._prefill_chunk
        pace = done / max(time.perf_counter() - self.started, 1e-6)
        wanted = int(PIECE_SECONDS * pace) // PAGE * PAGE if done else FIRST_PIECE
        # Complete a partly read prefill chunk first: the cache then has the same bits as after whole chunks.
        rest = most - done % most if self._was_beside_others else most
        return min(max(wanted, LEAST_PIECE), rest)

    def _size_beside_others(self, most: int) -> int:
        """Return the number of prompt tokens to read next if other runs wait: PANEL to about `most`
        tokens, or the rest of the prefill chunk or of the prompt if the rest is short."""
        done, cache = self._read % self._prefill_chunk, self.session.cache
        rest = min(self._prefill_chunk - done, self.unread)
        if done == 0 and isinstance(cache, Holding):
            cache.hold(rest)
        self._was_beside_others = True
        parts = min(-(-rest // max(most, PANEL)), max(1, rest // PANEL))
        size = -(-rest // parts)
        # The size is a multiple of PANEL, unless too few tokens would be left.
        size = min(size + -size % PANEL, max(most, size) // PANEL * PANEL)
        return rest if parts == 1 else min(size, rest - PANEL)

    def draw(self, record: bool = True) -> Chunk | None:
        """Draw the next token and return its text, or None if the run is over or the token is the end token.
        record: False if the caller records the token (scheduler.py)."""
        if self.request.cancel.is_set():
            self.finish_reason = self.finish_reason or "cancelled"
        if self.is_over:
            return None
        self._feed()  # The backend must read the last token before the next token is drawn.
        try:
            token = on_living_side([self], lambda: self.source.read())
        except RunCancelled:
            self.finish_reason = "cancelled"
            return None
        if not self.drawn:
            self.first_token = time.perf_counter()
        self.drawn.append(token)
        if token in self.engine.model.tokenizer.eos_ids and not self.request.ignore_eos:
            self.finish_reason = "stop"
        else:
            self.ids.append(token)
        if self.source.at_once and record:
            self.record()
        return None if self.is_over else self._accept_token(token)

    def _accept_token(self, token: int) -> Chunk:
        opening, self._opening = self._opening, ""
        if self.repetition is not None:
            self.repetition.add(token)
        text = opening + self.stops.add(self.decoder.add(token))
        self.text.append(text)
        if self.stops.hit or (self.rule is not None and self.rule.is_complete):
            self.finish_reason = "stop"
        elif len(self.ids) >= self.limit or self.repeats:
            self.finish_reason = "length"
        return Chunk(text, len(self.ids), len(self.prompt), len(self.prompt))

    def _feed(self) -> None:
        """Add the newest tokens to the session, because the backend now reads them into the cache."""
        self.session.tokens += self.ids[self._fed :]
        self._fed = len(self.ids)

    @property
    def waits(self) -> bool:
        """Return True if the caller must decode the last token in a batch and pass the step to `take`."""
        return isinstance(self.source, StepSource) and self.source.waits and not self._ends

    @property
    def _ends(self) -> bool:
        return self.is_over or self.request.cancel.is_set()

    def take(self, step: Step) -> None:
        """Give the decode step of the last token to this run, which draws its next token from the step. The
        caller ran the decode step, possibly in a batch with other runs."""
        self._feed()
        self.shared = True
        cast(StepSource, self.source).take(step)

    def use_steps(self, steps: bool) -> None:
        """Choose who decodes the next tokens. steps=True: the caller decodes them (`waits`, `take`);
        steps=False: the backend's own token stream decodes them, if the backend has a stream."""
        source = self.source
        if needs_steps(self.request.sampling, self.rule):
            return
        if isinstance(source, StepSource):
            other = not steps and self._can_stream
            # `possible` is false if this source holds a decode step from which the next token must be drawn.
            possible = source.waits or self.unread
        else:
            other, possible = steps, bool(self.drawn or self.unread)
        if other and possible and not self.is_over:
            self.switch(steps)

    def switch(self, steps: bool) -> None:
        """Let another source draw the next tokens. steps: as in `use_steps`."""
        self.record()
        self.source.close()
        if self.drawn:
            self._prefilled_at = self._prefilled_at or self.source.prefilled_at
        self.source = self._new_source(steps)
        if self.ids:
            if not steps:
                self._feed()
            self.source.resume(self.ids[-1])

    def _new_source(self, steps: bool) -> Source:
        left, sampling = self.limit - len(self.ids), self.request.sampling
        return source(
            self.engine.backend, self.session.cache, self.adapter, sampling, left, steps,
            self.rule, self.drafts, len(self.drawn),
        )  # fmt: skip

    def _new_rule(self) -> Matcher | None:
        """Return the matcher of the request's constraint, which starts at the first token of the reply."""
        constraint = self.request.constraint
        if constraint is None:
            return None
        if self.request.begun is not None or self.request.opening:
            raise UsageError("a reply cannot be continued under a constraint; ask again without one.")
        return matcher_for(self.engine.model, constraint, self._opening)

    def _new_repetition(self) -> Repetition | None:
        """Return a detector of replies that repeat themselves. Return None if the request ignores the end
        token, continues a reply, or has a constraint."""
        goes_on = self.request.ignore_eos or self.request.begun is not None
        return None if goes_on or self.rule is not None else Repetition()

    @property
    def repeats(self) -> bool:
        """Return True if the newest tokens of the reply almost only repeat earlier tokens. Then the reply
        ends."""
        return self.repetition is not None and self.repetition.is_loop

    def draw_work(self) -> ReplyWork | None:
        """Return the kernel call that draws the next token; run this call before `draw`. Return None if
        `draw` itself draws the token."""
        if self._ends or not isinstance(self.source, StepSource):
            return None
        return self.source.draw_work()

    def record(self) -> None:
        """Pass the tokens drawn since the last call to the recorder, and add their logprobs."""
        for drawn in self._record_pending():
            if self.recorder is not None:
                self.recorder.add(*drawn)

    def record_work(self) -> list[ReplyWork]:
        """Do the work of `record`, but return the kernel calls of a WorkRecorder without running them. The
        caller runs these calls together with the calls of other runs."""
        work: list[ReplyWork] = []
        for drawn in self._record_pending():
            if isinstance(self.recorder, WorkRecorder):
                work += self.recorder.work(*drawn)
            elif self.recorder is not None:
                self.recorder.add(*drawn)
        return work

    def _record_pending(self) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        if self.recorder is None and not self.request.logprobs:
            return
        for hidden, logits in self.source.drawn_from():
            token = self.drawn[self.recorded]
            if self.request.logprobs and self.recorded < len(self.ids):
                self.logprobs.append(token_logprob(logits, token, self.request.logprobs))
            self.recorded += 1
            yield hidden, logits, token

    def end(self) -> Chunk:
        """End the run. Return the last chunk: it has the text that the run held back, and the response."""
        self.sync()
        ended = time.perf_counter()
        self.record()
        tail = "" if self.stops.hit else self.stops.flush()
        self.text.append(tail)
        return Chunk(tail, len(self.ids), response=self._response(ended))

    def sync(self) -> None:
        """Close the source (a token stream then undoes steps after the last token), and end the session, so
        that other requests can use the cache, which a cancelled prefill has filled only in part."""
        try:
            self.source.close()
        except BaseException:
            self.forget_cache()  # the cache can hold steps after the last token
            raise
        self.engine.sessions.done(self.session)

    def forget_cache(self) -> None:
        self.engine.sessions.forget(self.session)

    def raise_if_cancelled(self) -> None:
        if self.request.cancel.is_set():
            raise RunCancelled

    def _response(self, now: float) -> GenerationResponse:
        prefilled_at = (self._prefilled_at or self.source.prefilled_at) if self.drawn else now
        prefill_s, decode_s = prefilled_at - self.started, now - prefilled_at
        cache, text = self.session.cache, "".join(self.text)
        counts = self.drafts.counts if self.drafts else DraftCounts()
        is_cut = self.repetition is not None and len(self.ids) >= self.limit
        return GenerationResponse(
            request_id=self.request.request_id,
            session_id=self.request.session_id,
            text=text,
            token_ids=self.ids,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            generation_tokens=len(self.ids),
            finish_reason=self.finish_reason or "length",
            ttft_ms=1e3 * max(0.0, self.first_token - self.started),
            latency_ms=1e3 * (now - self.started),
            prompt_tps=self._read / prefill_s if prefill_s > 0 else 0.0,
            generation_tps=len(self.ids) / decode_s if decode_s > 0 else 0.0,
            cache_tokens=cache.offset,
            drafted=counts.drafted,
            accepted=counts.accepted,
            kv=cache.stats(),
            logprobs=self.logprobs[: self.stops.shown_count],
            examples=self.request.examples,
            route=self.request.route,
            stopped_by=self.stops.hit,
            limit=self.limit,
            repeats=self.repeats or (is_cut and is_repeated_prose(self.ids, text)),
        )


@contextmanager
def sync_at_exit(runs: Sequence[Run]) -> Iterator[None]:
    """At the end of the `with` block, call `sync` of each run, which ends the run's session. After an error
    or Ctrl-C, first drop the KV caches of the runs."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        for run in runs:
            run.forget_cache()  # the layers of the cache can now hold different numbers of tokens
        raise
    finally:
        for run in runs:
            run.sync()
