"""This module commits finished replies, so that they can be rated, and saves unfinished replies as drafts.
A request that ends without a reply becomes a row of the witness log (a log of events, store/audit_log.py)."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..backends.base import preserve_lora
from ..engine import Chunk, GenerationResponse
from ..engine.best_of import BestOf
from ..engine.context_window import question_of
from ..engine.run import Run
from ..engine.types import GenerationRequest
from ..errors import PromptTooLong, StoreBusy, StoreError
from ..kv_tuning.tier_review import TierReview
from ..lora.base_lora import BaseLoRA
from ..models.config.model import Model
from ..optimizer.monitor import LoadWatch
from ..optimizer.optimizer import RealtimeOptimizer
from ..sona.learner import Learner
from ..sona.signal import Pace
from ..sona.trace import Trace
from ..sona.user_taste import reply_features
from ..store import ReplyRow, Store
from .lost_sides import note_lost_sides
from .tool_turns import calls_to_json, split_calls

SAVE_EVERY = 1.0  # seconds: if the process is killed, a chat's reply loses the text of about this time
# The maximum number of attempts to commit a reply. Each attempt waits up to 5 s for the store's lock, so that
# a long transaction of another process does not lose the reply. The last attempt raises StoreBusy.
COMMIT_ATTEMPTS = 8

Traced = Mapping[str, Trace | None]  # reply id -> trace of the reply


class ReplyArchive:
    """An archive writes the replies of one runtime into the store."""

    def __init__(
        self,
        store: Store,
        model: Model,
        tiers: TierReview,
        optimizer: RealtimeOptimizer,
        in_progress: Callable[[], int],
    ):
        """in_progress: a function that returns the number of replies that are being written"""
        self.store, self._model, self._tiers = store, model, tiers
        self.optimizer, self._in_progress = optimizer, in_progress
        self.pace = Pace()
        self.last_reply_id: str | None = None

    def row(
        self,
        run: Run,
        learner: Learner | None,
        trace: Trace | None,
        response: GenerationResponse | None = None,
        **values: Any,
    ) -> ReplyRow:
        """Return the stored row of a reply. The fields that this method does not name come from other objects
        with a field of the same name: the response (None before the reply is complete), the request, its
        sampling, the trace or the model."""
        request, question = run.request, question_of(run.request)
        return ReplyRow.of(
            response,
            run.recorder,
            request,
            request.sampling,
            self._model,
            id=request.request_id,
            model=self._model.name,
            adapter=learner.history.name if learner else None,
            # the version with which the reply began; a rating during the reply can make a newer version
            adapter_version=trace.version if trace else 0,
            prompt_ids=list(request.input_ids or []),
            sampled_ids=list(run.drawn),
            prompt=question,
            query=learner.rating_index.known_state(question) if learner else None,
            logprob=trace.logprob if trace and trace.tokens else None,
            **values,
        )

    def commit(
        self,
        run: Run,
        learner: Learner | None,
        trace: Trace | None,
        response: GenerationResponse,
        session_id: str | None,
        others: float = 0.0,
        **values: Any,
    ) -> ReplyRow:
        """Store a complete reply. others: the number of cores that other programs kept busy meanwhile"""
        route = run.request.route
        reply = self.row(run, learner, trace, response, **values)
        teaching = reply_features(reply.prompt, reply.text, reply.finish_reason).data
        text, calls = split_calls(self._model.tokenizer, run.request, reply.text)
        # The words of a tool's result must not change the weights, so a reply that calls a tool or reads a
        # tool's result is stored without features.
        teaches = not (response.repeats or run.request.asked is not None or calls)
        replies = max(self._in_progress(), 1 + run.shared)
        kv = replace(self._tiers.observation(response.session_id, response), replies=replies, others=others)
        routed = route.row(reply.id, reply.fingerprint, reply.adapter) if route else None
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                self.store.replies.add(
                    replace(reply, features=teaching if teaches else b""),
                    session_id,
                    kv,
                    routed,
                    question=run.request.question_id,
                    shown=text if calls else None,
                    calls=calls_to_json(calls),
                )
                break
            except StoreBusy:
                if attempt + 1 == COMMIT_ATTEMPTS:
                    raise
        self.last_reply_id = reply.id
        if learner is not None and trace is not None:
            learner.traces.keep(reply.id, trace)
        self.optimizer.observe(kv, response)
        return reply

    def note_failure(self, request: GenerationRequest, error: BaseException) -> None:
        """Record in the witness log that a request got no reply. Only the error's class is recorded, because
        the error's text can quote words. If the store cannot be written, the caller still gets the original
        error."""
        prompt = request.input_ids or request.encoded
        refused = error.tokens if isinstance(error, PromptTooLong) else None
        facts = {
            "request": request.request_id,
            "model": self._model.fingerprint,
            "adapter": None if request.untouched else request.adapter_id,
            "error": type(error).__name__,
            "prompt_tokens": len(prompt) if prompt is not None else refused,
        }
        with contextlib.suppress(StoreError):
            self.store.witness.note("failure", facts)

    def note_cache_failures(self) -> None:
        """Record in the witness log the errors that ended a write of a KV cache to disk."""
        for error in self.optimizer.scheduler.engine.sessions.disk.take_failures():
            with contextlib.suppress(StoreError):
                self.store.witness.note("cache_failure", {"model": self._model.fingerprint, "error": error})

    @contextlib.contextmanager
    def noting_failure(self, request: GenerationRequest) -> Iterator[None]:
        """If the `with` block raises an error, record in the witness log that this error ended the request,
        and raise the error again."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            self.note_failure(request, error)
            raise


class StoredReplies:
    """A job for the scheduler (engine/queue.py) that also stores its replies. The job writes the replies to
    one request, and commits the replies when they are complete. learner: the learner of the adapter that
    writes the replies; None: no adapter. traces: {reply id: trace}.
    session_id: the chat's id; None: no chat."""

    def __init__(
        self,
        archive: ReplyArchive,
        replies: BestOf,
        learner: Learner | None,
        traces: Traced,
        session_id: str | None,
    ):
        self._archive, self._replies, self._learner = archive, replies, learner
        self._traces, self._session_id = traces, session_id
        self._saved_at = time.monotonic()
        self._load = LoadWatch.begin()
        self.start, self.join = replies.start, replies.join

    @property
    def lora(self) -> BaseLoRA | None:
        return self._replies.lora

    @property
    def several(self) -> bool:
        return self._replies.several

    @property
    def runs(self) -> list[Run]:
        return self._replies.runs

    @property
    def running(self) -> list[Run]:
        return self._replies.running

    def next_chunk(self) -> Chunk:
        """Return the next chunk after each running reply has drawn a token. In a chat, save a draft of the
        leading reply at most once in SAVE_EVERY seconds."""
        chunk = self._replies.next_chunk()
        if self._session_id is not None and time.monotonic() - self._saved_at > SAVE_EVERY:
            self._save_draft(self._session_id, self._replies.leader)
            self._saved_at = time.monotonic()
        return chunk

    def end(self) -> Chunk:
        """Commit all replies of the job; the replies must be complete or stopped."""
        chunk = self._replies.end()
        assert chunk.response is not None
        response = self._archive.optimizer.with_quality(
            question_of(self._replies.leader.request), chunk.response, self._learner
        )
        self._archive.note_cache_failures()
        lost = note_lost_sides(self._archive.store, self._archive.optimizer.scheduler.engine)
        note = " ".join(filter(None, [chunk.note, lost]))
        chunk = replace(chunk, response=self._with_adapter(response), note=note)
        assert chunk.response is not None
        # The commit lets the learner install its LoRA. `preserve_lora` gives the backend its earlier LoRA
        # again.
        with preserve_lora(self._learner.backend) if self._learner else contextlib.nullcontext():
            self._commit_all(chunk.response)
        return chunk

    def _with_adapter(self, response: GenerationResponse) -> GenerationResponse:
        """Return the response with the name and version of its adapter; version 0: the model wrote the reply
        without trained weights."""
        if self._learner is None:
            return response
        trace = self._traces[response.request_id]
        version = trace.version if trace else 0
        return replace(response, adapter=self._learner.history.name, adapter_version=version)

    def _save_draft(self, session_id: str, run: Run) -> None:
        """Save the text of the reply so far as a draft, because the process could be killed. If the store is
        busy, save nothing."""
        run.record()
        begun: dict[str, Any] = {"text": "".join(run.text), "finish_reason": "cancelled"}
        if run.request.asked is not None:  # the prompt has a tool's result, so the reply must not teach
            begun["features"] = b""
        reply = self._archive.row(run, self._learner, self._traces[run.request.request_id], **begun)
        with contextlib.suppress(StoreBusy):
            self._archive.store.drafts.put(session_id, reply, run.request.question_id)

    def _commit_all(self, best: GenerationResponse) -> None:
        """Commit the replies to one question. The best reply is committed last: the user sees the best reply,
        and a rating of the reply "last" must apply to the best reply."""
        for run, response in zip(self._replies.others, best.others, strict=True):
            self._commit(run, response, beside=best.request_id)
        # In a batch, the time for a token also depends on the other replies, so it is not recorded.
        shared, pace = self._replies.leader.shared, self._archive.pace
        ratio = 1.0 if shared else pace.ratio(best.latency_ms, best.generation_tokens)
        reply = self._commit(self._replies.leader, best, latency_ratio=ratio)
        if self._learner is not None and self._traces[reply.id] is not None:
            self._learner.rating_index.queue_reply(reply)

    def _commit(self, run: Run, response: GenerationResponse, **values: Any) -> ReplyRow:
        trace = self._traces[run.request.request_id]
        return self._archive.commit(
            run, self._learner, trace, response, self._session_id, self._load.others(), **values
        )
