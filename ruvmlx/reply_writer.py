"""Writes replies: prepares the request, streams the reply, commits it so that it can be rated."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .context_window import ContextWindow, question_of
from .engine import Chunk, GenerationRequest, GenerationResponse, LLMInferenceEngine, Sampling
from .engine.affordable import AUTO, affordable
from .engine.batch import generate_many
from .engine.best_of import BestOf, Score, requests_for
from .engine.run import Run
from .errors import StoreBusy
from .learning import Learning
from .models.thinking import ThoughtCounter, opened_by
from .sampling import check_sampling
from .settings import Settings
from .sona.answer_trace import AnswerTrace
from .sona.judge import CandidateReply
from .sona.optional.routing import made_by
from .sona.signal import Pace
from .sona.trace import Trace
from .sona.user_taste import reply_features
from .store import ReplyRow, Store
from .tier_review import TierReview

SAVE_EVERY = 1.0  # seconds of a reply that may be lost when the process is killed

Traced = Mapping[str, Trace | None]  # by reply id


class ReplyWriter:
    """Writes replies with the adapter in use, and with liked examples if the settings ask for them."""

    def __init__(
        self,
        store: Store,
        engine: LLMInferenceEngine,
        settings: Settings,
        learning: Learning,
        tiers: TierReview,
    ):
        """UsageError for invalid sampling settings."""
        self.engine, self.window = engine, ContextWindow(engine.model)
        self.last_reply_id: str | None = None
        self._store, self._model, self._settings = store, engine.model, settings
        self._learning, self._tiers = learning, tiers
        self._pace = Pace()
        check_sampling(self.sampling())

    def sampling(self, **given: Any) -> Sampling:
        """Values given here > the settings > the model's own > defaults. None means not given."""
        own = {k: v for k, v in self._model.default_sampling.items() if k in Sampling.__dataclass_fields__}
        if "top_k" in own:
            own["top_k"] = int(own["top_k"])
        asked = {k: v for k, v in (self._settings.sampling | given).items() if v is not None}
        return Sampling(**(own | asked))

    def generate(self, request: GenerationRequest, session_id: str | None = None) -> Iterator[Chunk]:
        """Stream one reply and commit it, so that it can be rated.

        session_id: the chat that the reply belongs to. The text of a stopped reply is kept. With best of n,
        the reply that the user's taste picks streams, and the others are committed beside it.
        """
        request = self.prepared(request, routed=True)
        untouched = request.untouched or (request.route is not None and not request.route.adapter)
        learner = self._learning.learner
        saved_at = time.monotonic()
        requests = requests_for(request, self._count(request))
        # Creating a trace installs the base LoRA, and the block below may remove it: create traces first.
        traces = {r.request_id: self._new_trace(untouched) for r in requests}
        score = self._score(request) if len(requests) > 1 else None
        with made_by(learner, untouched):
            replies = BestOf(
                self.engine,
                requests,
                learner.micro if learner and not untouched else None,
                [self._recorder(request, trace) for trace in traces.values()],
                score,
            )
            for chunk in replies.chunks():
                if chunk.response is not None:
                    self._commit_all(replies, chunk.response, traces, session_id)
                elif session_id is not None and time.monotonic() - saved_at > SAVE_EVERY:
                    self._save_draft(session_id, replies.leader, traces)
                    saved_at = time.monotonic()
                yield chunk

    def _count(self, request: GenerationRequest) -> int:
        """Number of replies to write; one where all would be equal, or where a reply is continued."""
        alone = request.begun is not None or request.untouched or request.sampling.temperature == 0
        count = 1 if alone else request.best_of or self._settings.best_of
        if count != AUTO:
            return int(count)
        return affordable(self.engine) if self._learning.judge() is not None else 1

    def _score(self, request: GenerationRequest) -> Score | None:
        """A function that predicts the user's stars for replies; None before the first rating."""
        judge, question = self._learning.judge(), question_of(request)
        if judge is None:
            return None

        def score(runs: Sequence[Run]) -> np.ndarray:
            return judge.score(
                [CandidateReply(question, "".join(run.text), run.finish_reason or "") for run in runs]
            )

        return score

    def answer(self, request: GenerationRequest) -> GenerationResponse:
        """One reply with the adapter in use; it is not stored."""
        request = self.prepared(request)
        learner = self._learning.learner
        if learner is not None:
            learner.sync()
        return self.engine.generate(request, learner.micro if learner else None)

    def answers(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResponse]:
        """Like `answer` for many requests, several at a time; in the order in which they finish."""
        prepared = [self.prepared(request) for request in requests]
        learner = self._learning.learner
        if learner is not None:
            learner.sync()
        return generate_many(self.engine, prepared, learner.micro if learner else None)

    def prepared(self, request: GenerationRequest, routed: bool = False) -> GenerationRequest:
        """The request as token ids, with its examples; UsageError if it is empty or too long.

        routed: let the router, if it is on, choose adapter and examples.
        """
        if request.input_ids is not None:
            return request
        thinking = {"on": True, "off": False}.get(self._settings.thinking, request.thinking)
        request = replace(request, thinking=thinking)
        request = replace(request, input_ids=self.engine.prompt_ids(request))
        if request.untouched:
            return request
        if routed:
            request.route = self._learning.route(request)
        wanted = self._settings.examples and (request.route is None or request.route.examples)
        if wanted and self._learning.learner is not None and request.messages is not None:
            request = self._with_examples(request)
        if request.route is not None and not request.examples:
            request.route = request.route.without_examples()
        return request

    def _with_examples(self, request: GenerationRequest) -> GenerationRequest:
        """Insert liked replies to similar questions as turns right before the question, so that the earlier
        turns' KV cache stays valid. They take at most a quarter of the context, and no room of the reply."""
        assert self._learning.learner is not None and request.messages is not None
        messages, context = list(request.messages), self.window.size
        free = context - len(request.input_ids or ()) - min(request.max_new_tokens, context // 4)
        found = self._learning.learner.rating_index.examples(
            question_of(request),
            self._settings.examples,
            min(context // 4, free),
            size=lambda example: sum(map(self.window.message_size, example.messages)),
            known=[m.content for m in messages if m.role == "user"],
        )
        at = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
        messages[at:at] = [m for example in found for m in example.messages]
        used = tuple(example.reply_id for example in found)
        longer = replace(request, messages=messages, input_ids=None, examples=used)
        return replace(longer, input_ids=self.engine.prompt_ids(longer)) if found else request

    def _new_trace(self, untouched: bool) -> Trace | None:
        """An empty trace for the next reply; None without an adapter."""
        learner = self._learning.learner
        if learner is None:
            return None
        learner.sync()
        return learner.trace(untouched)

    def _recorder(self, request: GenerationRequest, trace: Trace | None) -> Trace | AnswerTrace | None:
        """Where the tokens go that ratings will move: all of the reply, or its answer alone."""
        if trace is None or self._settings.rate_thoughts:
            return trace
        tokenizer, prompt = self._model.tokenizer, request.input_ids or ()
        begun = request.begun.text if request.begun else opened_by(tokenizer, prompt)
        return AnswerTrace(trace, ThoughtCounter(tokenizer, begun))

    def _reply_row(
        self, run: Run, trace: Trace | None, response: GenerationResponse | None = None, **values: Any
    ) -> ReplyRow:
        """Columns that are not named here come by their names from the response (there is none before the
        reply is complete), the request, its sampling, the trace or the model."""
        request, learner = run.request, self._learning.learner
        question = question_of(request)
        return ReplyRow.of(
            response,
            run.recorder,
            request,
            request.sampling,
            self._model,
            id=request.request_id,
            model=self._model.name,
            adapter=learner.history.name if learner else None,
            adapter_version=trace.version if trace else 0,  # a rating may have changed the version since
            prompt_ids=list(request.input_ids or []),
            sampled_ids=list(run.drawn),
            prompt=question,
            query=learner.rating_index.known_state(question) if learner else None,
            logprob=trace.logprob if trace and trace.tokens else None,
            **values,
        )

    def _save_draft(self, session_id: str, run: Run, traces: Traced) -> None:
        """Save the reply so far, in case the process is killed. If the store is busy, the reply goes on."""
        run.record()
        begun: dict[str, Any] = {"text": "".join(run.text), "finish_reason": "cancelled"}
        reply = self._reply_row(run, traces[run.request.request_id], **begun)
        with contextlib.suppress(StoreBusy):
            self._store.drafts.put(session_id, reply)

    def _commit_all(
        self, replies: BestOf, best: GenerationResponse, traces: Traced, session_id: str | None
    ) -> None:
        """Commit the replies to one question, the best one last: it is shown, and is "last" for ratings."""
        question = self._store.messages.head(session_id) if session_id is not None else None
        for run, response in zip(replies.others, best.others, strict=True):
            self._commit(run, response, traces, session_id, beside=best.request_id)
            if session_id is not None:
                self._store.messages.set_head(session_id, question)
        # In a batch, the time for a token says nothing of this reply.
        pace = 1.0 if best.others else self._pace.ratio(best.latency_ms, best.generation_tokens)
        reply = self._commit(replies.leader, best, traces, session_id, latency_ratio=pace)
        if self._learning.learner is not None and traces[reply.id] is not None:
            self._learning.learner.rating_index.committed(reply)

    def _commit(
        self,
        run: Run,
        response: GenerationResponse,
        traces: Traced,
        session_id: str | None,
        **values: Any,
    ) -> ReplyRow:
        trace, route = traces[run.request.request_id], run.request.route
        reply = self._reply_row(run, trace, response, **values)
        features = reply_features(reply.prompt, reply.text, reply.finish_reason).to_bytes()
        kv = self._tiers.observed(response.session_id, response)
        routed = route.row(reply.id, reply.fingerprint, reply.adapter) if route else None
        self._store.replies.add(replace(reply, features=features), session_id, kv, routed)
        self.last_reply_id = reply.id
        learner = self._learning.learner
        if learner is not None and trace is not None:
            learner.traces.keep(reply.id, trace)
        return reply
