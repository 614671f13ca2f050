"""One request on its way through the engine: its prompt is read, then it grows token by token.

A run holds everything that belongs to its request alone, so that several may take turns (batch.py).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..backends.base import HeadAdapter, Step
from ..errors import UsageError
from .detokenize import StopStrings, StreamDecoder
from .sampler import Sampler, log_softmax, top_ids
from .sessions import Session
from .types import Chunk, GenerationRequest, GenerationResponse, TokenLogprob

if TYPE_CHECKING:
    from .engine import LLMInferenceEngine

PREFILL_CHUNK = 256  # tokens between two progress reports


class Recorder(Protocol):
    def add(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> None: ...


class _Cancelled(Exception):
    """Raised inside a prefill to leave it between two chunks."""


class Run:
    """`prefill`, then `draw` a token and hand the backend's answer to it over as `step`, until it is `over`;
    then `end`. `chunks` does all that. UsageError for a request that cannot be answered."""

    def __init__(
        self,
        engine: "LLMInferenceEngine",
        request: GenerationRequest,
        adapter: HeadAdapter | None = None,
        recorder: Recorder | None = None,
    ):
        if request.max_new_tokens < 1:
            raise UsageError(f"max-tokens is {request.max_new_tokens}; it must be 1 or more.")
        self.engine, self.request, self.adapter, self.recorder = engine, request, adapter, recorder
        self.sampler = Sampler(request.sampling)
        self.decoder = StreamDecoder(engine.model.tokenizer)
        self.stops = StopStrings(request.stop)
        self.prompt = engine.prompt_ids(request)
        room = engine.model.config.max_context - len(self.prompt)
        self.limit = min(request.max_new_tokens, room)
        self.ids: list[int] = []
        self.text: list[str] = [self.decoder.go_on(request.begun)] if request.begun else []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None  # while it goes on
        self.step: Step | None = None  # what the model said last
        self.started = time.perf_counter()
        self.first_token = self.prefilled_at = self.started
        self.session: Session = engine.sessions.get_or_create(request.session_id, self.prompt)
        self.cached = engine.sessions.rewind(self.session, self.prompt)

    @property
    def over(self) -> bool:
        return self.finish_reason is not None

    def chunks(self) -> Iterator[Chunk]:
        with settled([self]):
            yield from self.prefill()
            while chunk := self.draw():
                yield chunk
                if self.over:
                    break
                self.step = self.engine.backend.decode(self.fed(), self.session.cache, self.adapter)
        yield self.end()

    def prefill(self) -> Iterator[Chunk]:
        """Read the prompt, a piece at a time."""
        todo = self.prompt[self.cached :]
        try:
            for start in range(0, len(todo), PREFILL_CHUNK):
                self._raise_if_cancelled()
                piece = todo[start : start + PREFILL_CHUNK]
                self.session.tokens.extend(piece)
                self.step = self.engine.backend.prefill(
                    piece, self.session.cache, self.adapter, progress=lambda done: self._raise_if_cancelled()
                )
                yield Chunk("", 0, self.cached + start + len(piece), len(self.prompt))
            self.prefilled_at = time.perf_counter()
        except _Cancelled:
            self.finish_reason = "cancelled"

    def draw(self) -> Chunk | None:
        """The next token's text; None when there is no token."""
        if self.request.cancel.is_set():
            self.finish_reason = "cancelled"
        if self.over:
            return None
        assert self.step is not None
        token = self.sampler(self.step.logits)
        if not self.ids:
            self.first_token = time.perf_counter()
        if self.recorder is not None:
            self.recorder.add(self.step.hidden, self.step.logits, token)
        if token in self.engine.model.tokenizer.eos_ids and not self.request.ignore_eos:
            self.finish_reason = "stop"
            return None
        return self._accepted(token, self.step)

    def _accepted(self, token: int, step: Step) -> Chunk:
        self.ids.append(token)
        if self.request.logprobs:
            self.logprobs.append(_token_logprob(step.logits, token, self.request.logprobs))
        text = self.stops.add(self.decoder.add(token))
        self.text.append(text)
        if self.stops.hit:
            self.finish_reason = "stop"
        elif len(self.ids) >= self.limit:
            self.finish_reason = "length"
        return Chunk(text, len(self.ids), len(self.prompt), len(self.prompt))

    def fed(self) -> int:
        """The token drawn last, on its way into the cache."""
        self.session.tokens.append(self.ids[-1])
        return self.ids[-1]

    def end(self) -> Chunk:
        """What was held back, and the response."""
        self.sync()
        tail = "" if self.stops.hit else self.stops.add(self.decoder.flush()) + self.stops.flush()
        self.text.append(tail)
        return Chunk(tail, len(self.ids), response=self._response())

    def sync(self) -> None:
        """A stopped prefill leaves fewer tokens in the cache than were asked for: believe the cache."""
        del self.session.tokens[self.session.cache.offset :]

    def forget_cache(self) -> None:
        if self.request.session_id is not None:
            self.engine.sessions.drop(self.request.session_id)

    def _raise_if_cancelled(self) -> None:
        if self.request.cancel.is_set():
            raise _Cancelled

    def _response(self) -> GenerationResponse:
        now = time.perf_counter()
        prefill_s = self.prefilled_at - self.started
        decode_s = now - self.prefilled_at
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
    """However the block ends, the sessions of the runs that are then in the list are sound."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        for run in runs:
            run.forget_cache()  # its layers may hold different numbers of tokens
        raise
    finally:
        for run in runs:
            run.sync()


def _token_logprob(logits: np.ndarray, token: int, k: int) -> TokenLogprob:
    logprobs = log_softmax(logits)
    top = [(int(i), float(logprobs[i])) for i in top_ids(logprobs, k)]
    return TokenLogprob(token, float(logprobs[token]), top)
