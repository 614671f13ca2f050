"""LLMInferenceEngine: a request in, a stream of chunks out.

It knows tokens, caches and time; it does not know ratings. A `recorder`, when given, sees every step
(hidden state, logits, drawn token): that is where the learning loop takes its trace.
"""

import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from ..backends.base import Backend, HeadAdapter, Step
from ..errors import UsageError
from ..kv.policy import TierPolicy
from ..models.base import Model
from .detokenize import StopStrings, StreamDecoder
from .sampler import Sampler, log_softmax, top_ids
from .sessions import Session, SessionManager
from .types import Chunk, GenerationRequest, GenerationResponse, TokenLogprob

PREFILL_CHUNK = 256  # tokens between two progress reports


class Recorder(Protocol):
    def add(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> None: ...


class _Cancelled(Exception):
    """Raised inside a prefill to leave it between two chunks."""


class LLMInferenceEngine:
    """Runs one request at a time on one backend, in the thread that built the backend."""

    def __init__(self, model: Model, backend: Backend, policy: TierPolicy | None = None):
        """policy: precision of the KV cache by age; None is the backend's plain cache."""
        self.model = model
        self.backend = backend
        self.sessions = SessionManager(backend, policy)

    def prompt_ids(self, request: GenerationRequest) -> list[int]:
        """Token ids of the prompt; UsageError when it is empty or longer than the context."""
        tokenizer = self.model.tokenizer
        if request.input_ids is not None:  # encoded already
            ids = self._checked_ids(request.input_ids)
        elif request.messages is not None:
            if not any(m.content.strip() for m in request.messages if m.role == "user"):
                raise UsageError("the prompt is empty; give some text.")
            ids = tokenizer.encode_chat(request.messages)
        else:
            if not (request.prompt or "").strip():
                raise UsageError("the prompt is empty; give some text.")
            ids = tokenizer.encode(request.prompt or "")
        limit = self.model.config.max_context
        if len(ids) >= limit:
            raise UsageError(
                f"the prompt is {len(ids)} tokens; {self.model.name} reads at most {limit - 1} "
                "and needs room for a reply. Shorten it."
            )
        return ids

    def _checked_ids(self, input_ids) -> list[int]:
        ids, vocab = [int(i) for i in input_ids], self.model.config.vocab_size
        if not ids:
            raise UsageError("the prompt is empty; give some token ids.")
        if min(ids) < 0 or max(ids) >= vocab:
            raise UsageError(f"token ids run from 0 to {vocab - 1}; got {min(ids)} to {max(ids)}.")
        return ids

    def stream(
        self,
        request: GenerationRequest,
        adapter: HeadAdapter | None = None,
        recorder: Recorder | None = None,
    ) -> Iterator[Chunk]:
        """Yield prefill progress, then text; the last chunk carries the response."""
        if request.max_new_tokens < 1:
            raise UsageError(f"max-tokens is {request.max_new_tokens}; it must be 1 or more.")
        yield from _Run(self, request, adapter, recorder).chunks()

    def generate(
        self,
        request: GenerationRequest,
        adapter: HeadAdapter | None = None,
        recorder: Recorder | None = None,
    ) -> GenerationResponse:
        """The whole reply at once."""
        for chunk in self.stream(request, adapter, recorder):
            last = chunk
        assert last.response is not None
        return last.response


class _Run:
    """One request on its way through the engine."""

    def __init__(self, engine: LLMInferenceEngine, request: GenerationRequest, adapter, recorder):
        self.engine, self.request, self.adapter, self.recorder = engine, request, adapter, recorder
        self.sampler = Sampler(request.sampling)
        self.decoder = StreamDecoder(engine.model.tokenizer)
        self.stops = StopStrings(request.stop)
        self.prompt = engine.prompt_ids(request)
        room = engine.model.config.max_context - len(self.prompt)
        self.limit = min(request.max_new_tokens, room)
        self.ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = "length"
        self.cached = 0
        self.started = time.perf_counter()
        self.first_token = self.prefilled_at = self.started

    def chunks(self) -> Iterator[Chunk]:
        session = self.engine.sessions.get_or_create(self.request.session_id)
        self.cached = self.engine.sessions.rewind(session, self.prompt)
        try:
            step = yield from self._prefill(session)
            yield from self._decode(session, step)
        except _Cancelled:
            self.finish_reason = "cancelled"
        except (Exception, KeyboardInterrupt):
            self._forget_cache()  # its layers may hold different numbers of tokens
            raise
        finally:
            _sync(session)
        tail = "" if self.stops.hit else self.stops.add(self.decoder.flush()) + self.stops.flush()
        self.text.append(tail)
        yield Chunk(tail, len(self.ids), response=self._response(session))

    def _prefill(self, session: Session):
        """Read the prompt, a piece at a time; returns the last Step."""
        todo = self.prompt[self.cached :]
        for start in range(0, len(todo), PREFILL_CHUNK):
            self._raise_if_cancelled()
            piece = todo[start : start + PREFILL_CHUNK]
            session.tokens.extend(piece)
            step = self.engine.backend.prefill(
                piece, session.cache, self.adapter, progress=lambda done: self._raise_if_cancelled()
            )
            yield Chunk("", 0, self.cached + start + len(piece), len(self.prompt))
        self.prefilled_at = time.perf_counter()
        return step

    def _decode(self, session: Session, step: Step) -> Iterator[Chunk]:
        tokenizer = self.engine.model.tokenizer
        while True:
            self._raise_if_cancelled()
            token = self.sampler(step.logits)
            if not self.ids:
                self.first_token = time.perf_counter()
            if self.recorder is not None:
                self.recorder.add(step.hidden, step.logits, token)
            if token in tokenizer.eos_ids and not self.request.ignore_eos:
                self.finish_reason = "stop"
                return
            yield self._accept(token, step)
            if self.stops.hit:
                self.finish_reason = "stop"
                return
            if len(self.ids) >= self.limit:
                return
            session.tokens.append(token)
            step = self.engine.backend.decode(token, session.cache, self.adapter)

    def _accept(self, token: int, step: Step) -> Chunk:
        self.ids.append(token)
        if self.request.logprobs:
            self.logprobs.append(_token_logprob(step.logits, token, self.request.logprobs))
        text = self.stops.add(self.decoder.add(token))
        self.text.append(text)
        return Chunk(text, len(self.ids), len(self.prompt), len(self.prompt))

    def _raise_if_cancelled(self) -> None:
        if self.request.cancel.is_set():
            raise _Cancelled

    def _forget_cache(self) -> None:
        if self.request.session_id is not None:
            self.engine.sessions.drop(self.request.session_id)

    def _response(self, session: Session) -> GenerationResponse:
        now = time.perf_counter()
        prefill_s = self.prefilled_at - self.started
        decode_s = now - self.prefilled_at
        return GenerationResponse(
            request_id=self.request.request_id,
            session_id=self.request.session_id,
            text="".join(self.text),
            token_ids=self.ids,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            generation_tokens=len(self.ids),
            finish_reason=self.finish_reason,
            ttft_ms=1e3 * max(0.0, self.first_token - self.started),
            latency_ms=1e3 * (now - self.started),
            prompt_tps=(len(self.prompt) - self.cached) / prefill_s if prefill_s > 0 else 0.0,
            generation_tps=len(self.ids) / decode_s if decode_s > 0 else 0.0,
            cache_tokens=session.cache.offset,
            kv=session.cache.stats(),
            logprobs=self.logprobs,
            examples=self.request.examples,
        )


def _sync(session: Session) -> None:
    """A stopped prefill leaves fewer tokens in the cache than were asked for: believe the cache."""
    del session.tokens[session.cache.offset :]


def _token_logprob(logits: np.ndarray, token: int, k: int) -> TokenLogprob:
    logprobs = log_softmax(logits)
    top = [(int(i), float(logprobs[i])) for i in top_ids(logprobs, k)]
    return TokenLogprob(token, float(logprobs[token]), top)
