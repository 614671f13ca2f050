"""This module writes replies: it prepares the request, streams the reply, and commits it so that it can be
rated."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..engine import Chunk, GenerationRequest, GenerationResponse, LLMInferenceEngine, Sampling
from ..engine.auto_best_of import AUTO, affordable
from ..engine.batch import generate_many
from ..engine.best_of import BestOf, Score, requests_for
from ..engine.context_window import ContextWindow, question_of
from ..engine.run import Run
from ..engine.scheduler import replies_in_progress
from ..kv_tuning.tier_review import TierReview
from ..models.text.thinking import ThoughtCounter, opened_by
from ..optimizer.optimizer import RealtimeOptimizer
from ..sampling import check_sampling, recommended_options
from ..settings import Settings
from ..sona.answer_trace import AnswerTrace
from ..sona.judge import CandidateReply
from ..sona.learner import Learner
from ..sona.trace import Trace
from ..store import Store
from .learning import Learning
from .stored_replies import ReplyArchive, StoredReplies

# the number of replies for which the memory has room; the number of replies that the user asked for
FEWER = (
    "The memory for KV caches has room for {} of {} replies. Raise kv_budget, or lower max_tokens or best_of."
)

Chunks = Generator[Chunk, None, None]  # the chunks of a reply; `close` ends the reply early


class ReplyWriter:
    """A reply writer writes replies with the adapter in use, or with the adapter that a request names. If the
    settings ask for examples, the prompt shows liked replies to similar questions, if the store has any.

    archive: the archive that records replies and failed requests
    """

    def __init__(
        self,
        store: Store,
        engine: LLMInferenceEngine,
        settings: Settings,
        learning: Learning,
        tiers: TierReview,
        optimizer: RealtimeOptimizer,
    ):
        """Raise UsageError if the sampling settings are invalid."""
        self.engine, self.scheduler = engine, optimizer.scheduler
        self.window = ContextWindow(engine.model, self.scheduler.admission.longest)
        self._store, self._model, self._settings = store, engine.model, settings
        self._learning, self._tiers = learning, tiers
        self.archive = ReplyArchive(
            store, engine.model, tiers, optimizer, lambda: replies_in_progress(self.scheduler)
        )
        check_sampling(self.sampling())

    @property
    def last_reply_id(self) -> str | None:
        """Return the id of the newest reply of this runtime."""
        return self.archive.last_reply_id

    def sampling(self, **given: Any) -> Sampling:
        """Return the sampling values. The values in `given` override the settings, the settings override the
        model's recommended values, and these override the defaults. A value None has no effect."""
        own = recommended_options(self._model.default_sampling)
        asked = {k: v for k, v in (self._settings.sampling | given).items() if v is not None}
        return Sampling(**(own | asked))

    def generate(self, request: GenerationRequest, session_id: str | None = None) -> Chunks:
        """Stream one reply and commit it, so that it can be rated. Several replies can take turns
        (`Scheduler.stream`). Raises UsageError in this call if the request is empty or too long.

        session_id: the chat that the reply belongs to. The text of a stopped reply is kept. With best of n,
            the user sees the reply that fits the user's taste, and the other replies are committed beside it.
        """
        request = self.prepare_request(request, routed=True)
        with self.archive.noting_failure(request):
            count, note = self._count(request, self._learning.of(request.adapter_id))
        chunks = self.scheduler.stream(request, lambda: self._begin(request, session_id, count, note), count)
        return self._chunks_or_failure(request, chunks)

    def _chunks_or_failure(self, request: GenerationRequest, chunks: Iterator[Chunk]) -> Chunks:
        with self.archive.noting_failure(request):
            yield from chunks

    def _begin(
        self, request: GenerationRequest, session_id: str | None, count: int, note: str
    ) -> StoredReplies:
        """Return the job of a request whose turn has come. The job uses the adapter's weights at the time of
        this call. count, note: as `_count` returns them"""
        learner = self._learning.of(request.adapter_id)
        if learner is not None:
            learner.rating_index.read_ahead(question_of(request))
            learner.active.measure_ahead()
        untouched = request.untouched or (request.route is not None and not request.route.adapter)
        requests = requests_for(request, count)
        with self._learning.in_its_place(learner):
            traces = {r.request_id: learner.trace(untouched) if learner else None for r in requests}
            adapted = learner if not untouched else None
            replies = BestOf(
                self.engine,
                requests,
                adapted.micro if adapted else None,
                [self._recorder(request, trace) for trace in traces.values()],
                self._score(request, learner) if len(requests) > 1 else None,
                adapted.active.combined_lora if adapted else None,
                note,
            )
        return StoredReplies(self.archive, replies, learner, traces, session_id)

    def _recorder(self, request: GenerationRequest, trace: Trace | None) -> Trace | AnswerTrace | None:
        """Return the recorder of the tokens to which a rating applies: all tokens of the reply if the setting
        `rate_thoughts` is on, else only the tokens after the model's thinking."""
        if trace is None or self._settings.rate_thoughts:
            return trace
        tokenizer, prompt = self._model.tokenizer, request.input_ids or ()
        begun = request.begun.text if request.begun else request.opening or opened_by(tokenizer, prompt)
        return AnswerTrace(trace, ThoughtCounter(tokenizer, begun))

    def _count(self, request: GenerationRequest, learner: Learner | None) -> tuple[int, str]:
        """Return the number of replies to write: one if all replies would be equal (temperature 0), if the
        request continues a reply, if it asks for the untouched model, or, with "auto", before the first
        rating. The number is lower if the memory has no room for so many replies; if the user has asked for
        more, also return a line that says so."""
        alone = request.begun is not None or request.untouched or request.sampling.temperature == 0
        asked = 1 if alone else request.best_of or self._settings.best_of
        if asked == AUTO:
            wanted = affordable(self.engine) if self._learning.judge(learner) is not None else 1
        else:
            wanted = int(asked)
        count = self.scheduler.admission.most_replies(request, wanted)
        return count, FEWER.format(count, wanted) if count < wanted and asked != AUTO else ""

    def _score(self, request: GenerationRequest, learner: Learner | None) -> Score | None:
        """Return a function that predicts, for unfinished or finished replies, how many stars the user would
        give. Return None before the first rating."""
        judge, question = self._learning.judge(learner), question_of(request)
        if judge is None:
            return None

        def score(runs: Sequence[Run]) -> np.ndarray:
            return judge.score(
                [CandidateReply(question, "".join(run.text), run.finish_reason or "") for run in runs]
            )

        return score

    def answer(self, request: GenerationRequest) -> GenerationResponse:
        """Return one reply with the adapter in use. The reply is not stored."""
        request = self.prepare_request(request)
        learner = self._learning.learner
        if learner is not None:
            learner.sync()
        return self.engine.generate(request, learner.micro if learner else None)

    def answers(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResponse]:
        """Answer many requests as `answer` does, several at a time. Yield each reply when it is finished."""
        prepared = [self.prepare_request(request) for request in requests]
        learner = self._learning.learner
        if learner is not None:
            learner.sync()
        return generate_many(self.engine, prepared, learner.micro if learner else None)

    def prepare_request(self, request: GenerationRequest, routed: bool = False) -> GenerationRequest:
        """Return the request with its token ids; examples (liked replies) are added to the prompt if the
        settings ask for them. Raises UsageError if the text is empty or too long, and CacheTooLarge if memory
        can never hold it.

        routed: True: the router, if it is on, chooses whether the reply uses the adapter and examples
        """
        if request.input_ids is not None:
            return request
        with self.archive.noting_failure(request):
            return self._prepare(request, routed)

    def _prepare(self, request: GenerationRequest, routed: bool) -> GenerationRequest:
        request = self.encode_request(request)
        request = replace(request, input_ids=request.encoded, encoded=None)
        self.scheduler.admission.check(request)
        if request.untouched:
            return request
        if routed and request.adapter_id is None:
            request.route = self._learning.route(request)
        wanted = (
            self._settings.examples
            and request.asked is None
            and (request.route is None or request.route.examples)
        )
        learner = self._learning.of(request.adapter_id) if wanted and request.adapter_id else None
        if request.adapter_id is None:
            learner = self._learning.learner
        if wanted and learner is not None and request.messages is not None:
            request = self._with_examples(request, learner)
        if request.route is not None and not request.examples:
            request.route = request.route.without_examples()
        return request

    def encode_request(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with the token ids of its text. Raises UsageError if the text is empty or too
        long. Any thread can call this method, so that the engine's thread does not wait for the encoding of a
        long text, which takes seconds."""
        if request.input_ids is not None or request.encoded is not None:
            return request
        thinking = {"on": True, "off": False}.get(self._settings.thinking, request.thinking)
        request = replace(request, thinking=thinking)
        return replace(request, encoded=self.engine.prompt_ids(request))

    def _with_examples(self, request: GenerationRequest, learner: Learner) -> GenerationRequest:
        """Insert liked replies to similar questions as turns directly before the question, so that the KV
        cache of the earlier turns stays valid. The examples take at most a quarter of the context, and leave
        free the room of the reply."""
        assert request.messages is not None
        messages, context = list(request.messages), self.window.size
        free = context - len(request.input_ids or ()) - min(request.max_new_tokens, context // 4)
        found = learner.rating_index.examples(
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
