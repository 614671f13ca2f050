"""Everything one user has open: store, model, engine and learner, behind plain calls for the apps.

A Runtime belongs to the thread that opened it (MLX binds its streams to threads). From any other thread only
the `cancel` event of a request may be set.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import settings as config
from .backends.base import Backend
from .backends.select import asked_policy, cache_policy, describe, open_backend
from .context_window import Turn, question_of
from .conversations import Chatting
from .engine import Chunk, GenerationRequest, GenerationResponse, LLMInferenceEngine, Sampling
from .engine.batch import generate_many
from .errors import NotFound, StoreBusy, UsageError
from .kv.disk import CacheFolder
from .lora.residency import Residency, Resident
from .models.model import Model
from .pausing import Stopped, stop_when
from .platform.cpu import total_memory
from .platform.memory import Held, peak, resident
from .progress import QUIET, Watch
from .sampling import check_sampling
from .sona.adapter_history import LearnStatus
from .sona.learner import Learner
from .sona.loops import Loops
from .sona.optional.routing import Routing, made_by
from .sona.optional.tier_measurement import KVLoop, KVStatus, TierHistory
from .sona.rating_index import MemoryStatus, check_examples
from .sona.signal import Pace
from .sona.state import RatingResult
from .sona.trace import Trace
from .sona.wiring import open_learner
from .store import NamedRow, ReplyRow, Store

if TYPE_CHECKING:
    from .sona.background import TrainingSettings
    from .sona.optional.router import RouterStatus

SAVE_EVERY = 1.0  # seconds of a reply that may be lost when the process is killed

__all__ = ["LearnStatus", "LearningState", "MemoryStatus", "RatingResult", "Runtime", "Turn"]


@dataclass(frozen=True)
class Rated:
    """A rating in force, and the question of its reply."""

    reply_id: str
    rating: str
    note: str
    question: str


@dataclass(frozen=True)
class LearningState:
    """What one adapter learned. missing: ratings until the background loop is due; recent: newest first."""

    adapter: str
    status: LearnStatus
    memory: MemoryStatus
    missing: int
    recent: list[Rated]


class Runtime(Chatting):
    """Open one with `Runtime.open`; close it when done (or use it as a context manager)."""

    def __init__(
        self,
        store: Store,
        model: Model,
        backend: Backend,
        adapter: str | None,
        sampling: Mapping[str, Any] | None = None,
        kv: str | None = None,
        examples: int = 0,
        learn: bool = True,
        implicit: bool = False,
        kv_tiers: str | None = None,
        kv_limit: float | None = None,
        router: bool = False,
        targets: str = "head",
        kv_disk: int | None = None,
        watch: Watch = QUIET,
    ):
        self.store, self.model, self.backend = store, model, backend
        self.examples, self._implicit = check_examples(examples), implicit
        self._flags = dict(sampling or {})
        check_sampling(self.sampling())
        known = TierHistory(store, model.fingerprint, backend.name, asked_policy(kv, kv_tiers))
        self._kv = KVLoop(known, model, backend, kv_limit)
        self._folder = None if kv_disk is None else CacheFolder.beside(store.path, kv_disk << 20)
        policy = cache_policy(kv, backend, kv_tiers) and known.policy
        self.engine = LLMInferenceEngine(model, backend, policy, self._folder)
        self._adapters = Residency(
            lambda name: open_learner(store, model, backend, name, learn, implicit, targets, self._watch),
            lambda x: x.active.nbytes,
        )
        self._watch = watch
        self.learner = self._adapters.get(adapter) if adapter else None
        self._watch = QUIET  # later ones are loaded without a word: nothing is measured then
        self._routing = Routing(store, model.fingerprint, self.examples > 0) if router else None
        self._pace = Pace()
        self.last_reply_id: str | None = None
        self._loops: Loops | None = None
        self.tidy_chats()

    @classmethod
    def open(
        cls,
        model: str | None = None,
        backend: str = "auto",
        adapter: str | None = "default",
        threads: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        kv: str | None = None,
        kv_budget: int | None = None,
        examples: int = 0,
        learn: bool = True,
        implicit: bool = False,
        kv_tiers: str | None = None,
        kv_limit: float | None = None,
        router: bool = False,
        targets: str = "head",
        kv_disk: int | None = None,
        watch: Watch = QUIET,
    ) -> "Runtime":
        """Open the store, load the model, take up the adapter. Seconds; raises RuvmlxError.

        sampling: what the user asked for by name ("temperature", ...), for every reply.
        kv: "tiered" or "f16"; None or "auto" is what was measured to be best (`review_kv`), where the backend
        has tiers. kv_tiers: "HOT,WARM", lengths of the tiers in tokens, whatever was measured. kv_limit: nats
        per token that they may cost. kv_budget: MiB for all KV caches.
        examples: up to so many liked replies to similar questions are put before each message.
        learn: False records ratings, for examples and for later, but leaves the weights as they are.
        implicit: what is done with unrated replies (`notice`) counts a little, too.
        router: whether a reply is made with what was learned, and with examples, is chosen for each, by what
        ratings and latency say of such conversations.
        targets: which matrices a rating changes (lora/targets.py).
        kv_disk: MiB of chats' KV caches that are kept beside the store until they are gone on with; None
        leaves what is there alone.
        watch: told what will be used, and of the progress; it may raise to stop. NotEnoughMemory is raised
        before weights are fetched or read.
        """
        from .plan import Planning

        choice = describe(backend, threads)
        store = Store(config.store_file())
        try:
            planning = Planning(watch, choice, model)
            loaded = planning.load(model)
            budget = (kv_budget or 0) << 20
            opened = open_backend(backend, planning.counted(loaded), threads, budget, planning)
            return cls(
                store, loaded, opened, adapter, sampling, kv, examples, learn, implicit, kv_tiers, kv_limit,
                router, targets, kv_disk, watch,
            )  # fmt: skip
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        self._close_loops()
        try:
            for learner in self._adapters.loaded():
                learner.rating_index.flush()
            self.delete_put_away()
            self.engine.sessions.keep_all()
        finally:
            self.store.close()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    @property
    def adapter_label(self) -> str | None:
        """ "default@3": the adapter and its version; None without one."""
        return f"{self.learner.history.name}@{self.learner.version}" if self.learner else None

    def sampling(self, **given) -> Sampling:
        """Values given here > those given to `open` > the model's own > defaults. None means not given."""
        own = {k: v for k, v in self.model.default_sampling.items() if k in Sampling.__dataclass_fields__}
        if "top_k" in own:
            own["top_k"] = int(own["top_k"])
        asked = {k: v for k, v in (self._flags | given).items() if v is not None}
        return Sampling(**(own | asked))

    # -- generation ----------------------------------------------------------------------------------

    def generate(self, request: GenerationRequest, session_id: str | None = None) -> Iterator[Chunk]:
        """Stream one reply and commit it, so that it can be rated.

        `session_id`: the chat that the reply belongs to. A reply that was stopped is kept as far as it got.
        """
        request = self._prepared(request, routed=True)
        untouched = request.untouched or (request.route is not None and not request.route.adapter)
        trace = self._new_trace(untouched)
        adapter = self.learner.micro if self.learner and not untouched else None
        words, saved_at = [request.begun.text if request.begun else ""], time.monotonic()
        with made_by(self.learner, untouched):
            run = self.engine.run(request, adapter, trace)
            for chunk in run.chunks():
                words.append(chunk.text)
                if chunk.response is not None:
                    done = chunk.response
                    row = self._reply_row(request, done.text, done.finish_reason, run.drawn, trace)
                    self._commit(request, done, row, trace, session_id)
                elif session_id is not None and time.monotonic() - saved_at > SAVE_EVERY:
                    run.record()
                    row = self._reply_row(request, "".join(words), "cancelled", run.drawn, trace)
                    self._save_draft(session_id, row)
                    saved_at = time.monotonic()
                yield chunk

    def answer(self, request: GenerationRequest) -> GenerationResponse:
        """One reply by what was learned so far; nothing of it is kept."""
        request = self._prepared(request)
        if self.learner is not None:
            self.learner.sync()
        return self.engine.generate(request, self.learner.micro if self.learner else None)

    def answers(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResponse]:
        """Many replies, several at a time, as `answer` gives each; in the order in which they finish."""
        prepared = [self._prepared(request) for request in requests]
        if self.learner is not None:
            self.learner.sync()
        return generate_many(self.engine, prepared, self.learner.micro if self.learner else None)

    def _prepared(self, request: GenerationRequest, routed: bool = False) -> GenerationRequest:
        """The request as token ids, with its examples; UsageError when it is empty or too long.

        routed: the router, where it is on, chooses how the reply is made.
        """
        if request.input_ids is not None:
            return request
        request = replace(request, input_ids=self.engine.prompt_ids(request))
        if request.untouched:
            return request
        if routed and self._routing is not None and self.learner is not None:
            request.route = self._routing.choose(self.learner, request)
        wanted = self.examples and (request.route is None or request.route.examples)
        if wanted and self.learner is not None and request.messages is not None:
            request = self._with_examples(request)
        if request.route is not None and not request.examples:
            request.route = request.route.without_examples()
        return request

    def _with_examples(self, request: GenerationRequest) -> GenerationRequest:
        """Liked replies to similar questions, as turns right before the question: the KV cache of what came
        before them stays good. In no more than a quarter of the context, nor what the reply needs."""
        assert self.learner is not None and request.messages is not None
        messages, context = list(request.messages), self.model.config.max_context
        free = context - len(request.input_ids or ()) - min(request.max_new_tokens, context // 4)
        found = self.learner.rating_index.examples(
            question_of(request),
            self.examples,
            min(context // 4, free),
            size=lambda example: sum(map(self._size, example.messages)),
            known=[m.content for m in messages if m.role == "user"],
        )
        at = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
        messages[at:at] = [m for example in found for m in example.messages]
        used = tuple(example.reply_id for example in found)
        longer = replace(request, messages=messages, input_ids=None, examples=used)
        return replace(longer, input_ids=self.engine.prompt_ids(longer)) if found else request

    def _new_trace(self, untouched: bool) -> Trace | None:
        """None where nothing is learned."""
        if self.learner is None:
            return None
        self.learner.sync()
        return self.learner.trace(untouched)

    def _reply_row(
        self,
        request: GenerationRequest,
        text: str,
        finish_reason: str,
        drawn: list[int],
        trace: Trace | None,
    ) -> ReplyRow:
        question = question_of(request)
        return ReplyRow(
            id=request.request_id,
            model=self.model.name,
            fingerprint=self.model.fingerprint,
            adapter=self.learner.history.name if self.learner else None,
            adapter_version=trace.version if trace else 0,  # a rating may have come in since
            prompt_ids=list(request.input_ids or []),
            sampled_ids=list(drawn),
            prompt=question,
            text=text,
            finish_reason=finish_reason,
            query=self.learner.rating_index.known_state(question) if self.learner else None,
            logprob=trace.logprob if trace else None,
            examples=request.examples,
        )

    def _save_draft(self, session_id: str, reply: ReplyRow) -> None:
        """What is written so far outlives the process. Where it cannot be saved, the reply goes on."""
        with contextlib.suppress(StoreBusy):
            self.store.drafts.put(session_id, reply)

    def _commit(
        self,
        request: GenerationRequest,
        response: GenerationResponse,
        reply: ReplyRow,
        trace: Trace | None,
        session_id: str | None,
    ) -> None:
        pace = self._pace.ratio(response.latency_ms, response.generation_tokens)
        reply = replace(reply, latency_ratio=pace)
        kv = self._kv.observed(response, self.engine.sessions.policy_of(request.session_id))
        route = request.route.row(reply.id, reply.fingerprint, reply.adapter) if request.route else None
        self.store.replies.add(reply, session_id, kv, route)
        self.last_reply_id = reply.id
        if self.learner is not None and trace is not None:
            self.learner.traces.keep(reply.id, trace)
            self.learner.rating_index.committed(reply)

    def settle(self, cancel: threading.Event | None = None) -> None:
        """Prepare the newest reply for its rating: what is done while the user reads.

        Where ratings change more than the output head, that takes seconds; `cancel` is looked at every few
        tens of milliseconds. What is missing then is done at the next call, or when the reply is rated.
        """
        if self.learner is not None:
            if self.learner.targets.places or self.learner.layer_lora:
                self._settle_layers(self.learner, cancel)
            else:
                self.learner.settle()
            if self._routing is not None:
                self._routing.of(self.learner).sync()

    def _settle_layers(self, learner: Learner, cancel: threading.Event | None) -> None:
        with contextlib.suppress(Stopped):
            learner.settle(stop_when(cancel))

    # -- learning ------------------------------------------------------------------------------------

    def rate(self, reply_id: str, rating: str, note: str = "") -> RatingResult:
        return self._learner().rate(reply_id, rating, note)

    def notice(self, reply_id: str, what: str) -> bool:
        """The user "copied", "regenerated", "edited" ... a reply. Heeded, and then True, only where
        `implicit_feedback` is on; a rating of the reply counts instead. What another model wrote says nothing
        of this one."""
        if self.learner is None:
            return False
        reply = self.store.replies.get(reply_id)
        return reply.fingerprint == self.model.fingerprint and self.learner.rating_index.noticed(reply, what)

    def memory(self) -> MemoryStatus:
        """Rated questions that are remembered, and the patterns that they form."""
        return self._learner().rating_index.status()

    def learning(self, recent: int = 8) -> LearningState:
        """All that is shown of it: the state, and the newest ratings."""
        learner = self._learner()
        history = learner.history
        rated = [
            Rated(r.reply_id, r.rating, r.note, self.store.replies.get(r.reply_id).prompt)
            for r in history.ratings()[: -recent - 1 : -1]
        ]
        return LearningState(
            history.name, history.status(), learner.rating_index.status(), history.missing(), rated
        )

    def undo(self) -> LearnStatus:
        return self._learner().history.undo()

    def rollback(self, version: int) -> LearnStatus:
        return self._learner().history.rollback(version)

    def status(self) -> LearnStatus:
        return self._learner().history.status()

    def consolidate(
        self,
        progress: Callable[[int, int, float], None] | None = None,
        cancel: threading.Event | None = None,
        settings: "TrainingSettings | None" = None,
    ) -> dict[str, Any]:
        """Train a base LoRA on the ratings and use it, if it passes the gate; says what came of it.

        progress(steps done, steps, loss). `cancel` is looked at every few tens of milliseconds; what was
        stopped goes on where it was at the next call, in another process too.
        """
        report = self.loops.consolidate(progress, cancel, settings)
        if self._routing is not None and not (cancel is not None and cancel.is_set()):
            report |= {"router": self._routing.of(self._learner()).train(cancel)}
        return report

    def deepen(
        self,
        progress: Callable[[int, int], None] | None = None,
        cancel: threading.Event | None = None,
        anchor: bool = True,
    ) -> dict[str, Any]:
        """Hold on to what was learned (unless `anchor` is False) and put the memory in order; says what came
        of it.

        `consolidate` does so by itself once a week and where a new task began, with an anchor if it trains
        under EWC. progress(replies measured, replies). It can be stopped, and goes on, as `consolidate`.
        """
        return self.loops.deepen(progress, cancel, anchor)

    def background_due(self) -> bool:
        """Should `consolidate` be called when nobody waits?"""
        return self.learner is not None and self.loops.due()

    @property
    def loops(self) -> Loops:
        """Those of the adapter in use."""
        if self._loops is None:
            self._loops = Loops(self._learner(), self.model)
        return self._loops

    def _close_loops(self) -> None:
        if self._loops is not None:
            self._loops.close()
        self._loops = None

    def router_status(self) -> "RouterStatus | None":
        """What the router chose and learned; None where it is off."""
        return self._routing.of(self._learner()).status() if self._routing is not None else None

    # -- the KV cache --------------------------------------------------------------------------------

    def review_kv(self, cancel: threading.Event | None = None) -> dict[str, Any]:
        """Measure what KV policies cost on the newest long replies; choose one for caches made from now on.

        `cancel` is looked at every few tens of milliseconds. A policy that was asked for stays in use.
        """
        report = self._kv.review(cancel)
        if self.engine.sessions.policy is not None:
            self.engine.sessions.policy = self._kv.history.policy
        return report

    def kv_due(self) -> bool:
        """Should `review_kv` be called when nobody waits?"""
        return self._kv.due()

    def kv_status(self) -> KVStatus:
        return self._kv.history.status()

    # -- memory --------------------------------------------------------------------------------------

    def held(self) -> Held:
        """What of the machine's memory this process holds, and for what."""
        pool, now = getattr(self.backend, "pool", None), resident()
        return Held(
            model=self.backend.nbytes,
            kv=self.engine.sessions.nbytes,
            adapters=sum(adapter.bytes for adapter in self._adapters.tiers()),
            resident=now,
            peak=max(now, peak()),
            budget=total_memory(),
            kv_budget=pool.budget if pool is not None else 0,
        )

    # -- adapters ------------------------------------------------------------------------------------

    def use_adapter(self, name: str | None) -> None:
        """Go on with another adapter (None: without one), in the middle of a chat: the model stays loaded.

        Chats keep their KV caches where only the head differs; under another base they are read again at
        their next turn.
        """
        if name is not None and config.parse("adapter", name, "the request") == "none":
            raise UsageError("none is no adapter's name; give another.")
        self.settle()
        self._close_loops()  # they train the adapter that was in use
        if self.learner is not None:
            self.learner.release()
        if name is None:
            self.learner = None
            self.backend.set_lora(None)
            return
        self.learner = self._adapters.get(name)
        self.learner.sync()

    def adapters(self) -> list[NamedRow]:
        """Adapters of this model that have learned something."""
        return self.store.adapters.all(self.model.fingerprint)

    def residents(self) -> list[Resident]:
        """Adapters used since the start, and whether they are in memory."""
        return self._adapters.tiers()

    def _learner(self) -> Learner:
        if self.learner is None:
            raise NotFound(
                "no adapter is loaded, so there is nothing to learn; start without --adapter none."
            )
        return self.learner
