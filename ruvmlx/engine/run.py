"""One request in the engine: prefill its prompt, then decode token by token.

A run holds all state of its request, so that several runs can take turns (batch.py).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast, runtime_checkable

import numpy as np

from ..backends.base import Backend, HeadAdapter
from ..errors import UsageError
from ..kernels.replies import ReplyWork
from ..models.model import Model
from ..models.thinking import opened_by
from ..sampling import check_sampling, log_softmax, top_ids
from ..tiers import PAGE
from .detokenize import StopStrings, StreamDecoder
from .sessions import Session, SessionManager
from .source import Source, StepSource, source
from .types import Chunk, GenerationRequest, GenerationResponse, TokenLogprob

# A prompt is read in pieces and can be cancelled between them.
FIRST_PIECE, LEAST_PIECE, PIECE_SECONDS = 512, 256, 2.0  # tokens, tokens, seconds


class Recorder(Protocol):
    def add(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> None:
        """Receive a token, with the hidden state [D] and the logits [V], adapter applied, that it was drawn
        from. Called once per token: at once if the backend returns logits, else at `Run.record`."""


@runtime_checkable
class WorkRecorder(Protocol):
    def work(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> list[ReplyWork]:
        """As Recorder.add, but returns the kernel call, to be run together with those of other recorders. At
        most one, because calls for one recorder must not run at the same time."""


class EngineParts(Protocol):
    """The parts of an engine that a run uses."""

    model: Model
    backend: Backend
    sessions: SessionManager

    def prompt_ids(self, request: GenerationRequest) -> list[int]: ...


class _Cancelled(Exception):
    """Raised inside a prefill to leave it between two chunks."""


class Run:
    """One request. Call `prefill`, then `draw` until the run is `over`, then `end`; `chunks` does all this.

    UsageError for a request that cannot be answered.
    """

    def __init__(
        self,
        engine: EngineParts,
        request: GenerationRequest,
        adapter: HeadAdapter | None = None,
        recorder: Recorder | None = None,
        steps: bool = False,
    ):
        """steps: the caller decodes the tokens and passes each step to `source` (batch.py)."""
        if request.max_new_tokens < 1:
            raise UsageError(f"max-tokens is {request.max_new_tokens}; it must be 1 or more.")
        check_sampling(request.sampling)
        self.engine, self.request, self.adapter, self.recorder = engine, request, adapter, recorder
        self.decoder = StreamDecoder(engine.model.tokenizer)
        self.stops = StopStrings(request.stop)
        self.prompt = engine.prompt_ids(request)
        room = engine.model.context - len(self.prompt)
        self.limit = min(request.max_new_tokens, room)
        self.drawn: list[int] = []  # ids of drawn tokens, with the end token
        self.recorded = 0  # number of drawn tokens that were recorded
        self.ids: list[int] = []
        self.text: list[str] = [self.decoder.go_on(request.begun)] if request.begun else []
        # What the template wrote of the reply: the tag that opens its thought.
        self._opening = "" if request.begun else opened_by(engine.model.tokenizer, self.prompt)
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None  # None while the run goes on
        self.started = self.first_token = time.perf_counter()
        self.session: Session = engine.sessions.get_or_create(request.session_id, self.prompt)
        self.cached = engine.sessions.rewind(self.session, self.prompt)
        self.source: Source = source(
            engine.backend, self.session.cache, adapter, request.sampling, self.limit, steps
        )

    def fork(self, request: GenerationRequest, recorder: Recorder | None = None) -> "Run":
        """A run of another request with the prompt that this run has just read: it reads nothing. Only for
        runs with `steps`."""
        other = Run(self.engine, request, self.adapter, recorder, steps=True)
        other.session, other.cached, other.started = self.session.fork(), len(self.prompt), self.started
        other.source = cast(StepSource, self.source).fork(other.session.cache, request.sampling)
        return other

    @property
    def over(self) -> bool:
        return self.finish_reason is not None

    def chunks(self) -> Iterator[Chunk]:
        with settled([self]):
            yield from self.prefill()
            while chunk := self.draw():
                yield chunk
        yield self.end()

    def prefill(self) -> Iterator[Chunk]:
        """Read the prompt, one piece at a time."""
        todo = self.prompt[self.cached :]
        try:
            start = 0
            while start < len(todo):
                self._raise_if_cancelled()
                piece = todo[start : start + self._piece(start)]
                self.session.tokens.extend(piece)
                self.source.prefill(piece, progress=lambda done: self._raise_if_cancelled())
                start += len(piece)
                yield Chunk("", 0, self.cached + start, len(self.prompt))
        except _Cancelled:
            self.finish_reason = "cancelled"

    def _piece(self, done: int) -> int:
        """Number of prompt tokens to read next: whole pages, about PIECE_SECONDS at the pace so far."""
        pace = done / max(time.perf_counter() - self.started, 1e-6)
        wanted = int(PIECE_SECONDS * pace) // PAGE * PAGE if done else FIRST_PIECE
        return min(max(wanted, LEAST_PIECE), self.engine.backend.chunk)

    def draw(self, record: bool = True) -> Chunk | None:
        """Draw the next token; returns its text, or None if the run is over. record: False: the caller
        records the token (batch.py)."""
        if self.request.cancel.is_set():
            self.finish_reason = self.finish_reason or "cancelled"
        if self.over:
            return None
        if self.ids:
            self.session.tokens.append(self.ids[-1])  # the backend reads it before the next one is drawn
        token = self.source.read()
        if not self.drawn:
            self.first_token = time.perf_counter()
        self.drawn.append(token)
        if token in self.engine.model.tokenizer.eos_ids and not self.request.ignore_eos:
            self.finish_reason = "stop"
        else:
            self.ids.append(token)
        if self.source.at_once and record:
            self.record()
        return None if self.over else self._accepted(token)

    def _accepted(self, token: int) -> Chunk:
        opening, self._opening = self._opening, ""
        text = opening + self.stops.add(self.decoder.add(token))
        self.text.append(text)
        if self.stops.hit:
            self.finish_reason = "stop"
        elif len(self.ids) >= self.limit:
            self.finish_reason = "length"
        return Chunk(text, len(self.ids), len(self.prompt), len(self.prompt))

    def draw_work(self) -> ReplyWork | None:
        """The kernel call that draws the next token, to be run before `draw`; None if there is none."""
        if self.over or self.request.cancel.is_set() or not isinstance(self.source, StepSource):
            return None
        return self.source.draw_work()

    def record(self) -> None:
        """Pass the tokens drawn since the last call to the recorder, and add their logprobs."""
        for drawn in self._unrecorded():
            if self.recorder is not None:
                self.recorder.add(*drawn)

    def record_work(self) -> list[ReplyWork]:
        """As `record`, but returns the kernel call of a WorkRecorder, to be run with those of other runs."""
        work: list[ReplyWork] = []
        for drawn in self._unrecorded():
            if isinstance(self.recorder, WorkRecorder):
                work += self.recorder.work(*drawn)
            elif self.recorder is not None:
                self.recorder.add(*drawn)
        return work

    def _unrecorded(self) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        if self.recorder is None and not self.request.logprobs:
            return
        for hidden, logits in self.source.drawn_from():
            token = self.drawn[self.recorded]
            if self.request.logprobs and self.recorded < len(self.ids):
                self.logprobs.append(_token_logprob(logits, token, self.request.logprobs))
            self.recorded += 1
            yield hidden, logits, token

    def end(self) -> Chunk:
        """Finish the run: returns the text that was held back, with the response."""
        self.sync()
        ended = time.perf_counter()
        self.record()
        tail = "" if self.stops.hit else self.stops.add(self.decoder.flush()) + self.stops.flush()
        self.text.append(tail)
        return Chunk(tail, len(self.ids), response=self._response(ended))

    def sync(self) -> None:
        """Undo a step that ran ahead, and cut the session's tokens to those in the cache: after a cancelled
        prefill they are fewer."""
        self.source.close()
        del self.session.tokens[self.session.cache.offset :]

    def forget_cache(self) -> None:
        if self.request.session_id is not None:
            self.engine.sessions.drop(self.request.session_id)

    def _raise_if_cancelled(self) -> None:
        if self.request.cancel.is_set():
            raise _Cancelled

    def _response(self, now: float) -> GenerationResponse:
        prefilled_at = self.source.prefilled_at
        prefill_s, decode_s = prefilled_at - self.started, now - prefilled_at
        cache = self.session.cache
        return GenerationResponse(
            request_id=self.request.request_id,
            session_id=self.request.session_id,
            text="".join(self.text),
            token_ids=self.ids,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            generation_tokens=len(self.ids),
            finish_reason=self.finish_reason or "length",
            ttft_ms=1e3 * max(0.0, self.first_token - self.started),
            latency_ms=1e3 * (now - self.started),
            prompt_tps=(len(self.prompt) - self.cached) / prefill_s if prefill_s > 0 else 0.0,
            generation_tps=len(self.ids) / decode_s if decode_s > 0 else 0.0,
            cache_tokens=cache.offset,
            kv=cache.stats(),
            logprobs=self.logprobs,
            examples=self.request.examples,
            route=self.request.route,
        )


@contextmanager
def settled(runs: Sequence[Run]) -> Iterator[None]:
    """On exit from the block, sync the runs in the list; after an exception, also drop their sessions."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        for run in runs:
            run.forget_cache()  # the cache's layers may hold different numbers of tokens
        raise
    finally:
        for run in runs:
            run.sync()


def _token_logprob(logits: np.ndarray, token: int, k: int) -> TokenLogprob:
    logprobs = log_softmax(logits)
    top = [(int(i), float(logprobs[i])) for i in top_ids(logprobs, k)]
    return TokenLogprob(token, float(logprobs[token]), top)
