"""This module is the runtime of `--model auto`: several models, one of which is in use. For each question,
the selector (sona/optional/selector.py) chooses the model that answers.

The smallest model opens first, because it reads the questions for the selector. Each other model opens when
it is chosen first. All open models stay open, each with its own KV caches, so a model that is chosen again
reads only the messages that are new to it. The chat itself is in the store, which all models share.

An `AutoRuntime` has the parts (`model`, `chats`, `learning` and so on) of the runtime in use. After a reply,
that is the model that wrote it; after a rating, the model of the rated reply.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import settings as config
from .backends.base import original_model
from .chats.branch_turns import end_of_question, place_of
from .chats.conversations import Conversations
from .engine import Chunk, GenerationRequest, GenerationResponse
from .engine.context_window import Turn
from .engine.model_identity import identify
from .errors import RuvmlxError, StoreError
from .memory.candidates import AutoModel, AutoModels, find_candidates
from .memory.load_plan import PROGRAM
from .memory.memory_plan import Purpose, limit_caches, sum_purposes
from .models.config.model import Message
from .models.load import load_model
from .platform.memory import MemoryUse
from .progress import QUIET, Watch
from .runtime import Runtime
from .settings import Settings
from .sona import embedding
from .sona.adapter_history import AdapterHistory, LearnStatus
from .sona.optional import router
from .sona.optional.selector import ModelChoice, ModelSelector, SelectorModel, is_unsure, turns_for
from .sona.state import RatingResult
from .store import Store

LETTERS_PER_TOKEN = 3  # a question of more letters than this times the context does not fit the model
PROBE = 16  # the number of tokens after which a small model may hand a question to a larger one
RETRY_AFTER = 600.0  # seconds after which a model that could not be opened is tried again
TRAIN_EVERY = 32  # the number of new ratings after which the selector's cell is trained at the end

Write = Callable[[Runtime], Iterator[Chunk]]


def open_auto(settings: Settings, watch: Watch = QUIET) -> Runtime:
    """Open the models of `auto`. With only one model, return this model's own runtime, whose `caveat` says
    why."""
    found = find_candidates(settings, watch)
    if len(found.models) > 1:
        return AutoRuntime(found, settings, watch)
    runtime = Runtime.open(replace(settings, model=found.best.name), watch=watch)
    runtime.backend.caveat = "; ".join(filter(None, [runtime.backend.caveat, found.note]))
    return runtime


class AutoRuntime(Runtime):
    """Several models, one of which is in use."""

    is_auto = True

    def __init__(self, found: AutoModels, settings: Settings, watch: Watch = QUIET):
        """Open the smallest model. Raises RuvmlxError."""
        self._settings, self._limit = settings, found.limit
        with contextlib.closing(Store(config.store_file())) as store:
            models = selector_models(store, found, settings)
        self._candidates = {model.fingerprint: candidate for candidate, model in models}
        self._open: dict[str, Runtime] = {}
        # fingerprint -> the time (time.monotonic()) at which this model could not be opened
        self._failed: dict[str, float] = {}
        self._whitening: embedding.Whitening | None = None
        self._states: dict[str, np.ndarray | None] = {}  # question -> its vector, of the newest questions
        shown = [model for _, model in models]
        first = min(shown, key=lambda model: model.parameters).fingerprint
        try:
            self._reader = self._runtime_of(first, watch)
            self._take(self._reader)
            self.backend.caveat = "; ".join(filter(None, [self.backend.caveat, found.note]))
            self.selector = ModelSelector(self._reader.store, shown)
        except BaseException:
            for runtime in self._open.values():
                runtime.close()
            raise

    # -- the models ----------------------------------------------------------------------------------

    def _runtime_of(self, fingerprint: str, watch: Watch = QUIET) -> Runtime:
        """Return the runtime of a model. Open the model if it is not open."""
        if fingerprint not in self._open:
            name = self._candidates[fingerprint].name
            runtime = Runtime.open(replace(self._settings, model=name), watch=watch)
            self._open[fingerprint] = runtime
            self._divide_caches()
        return self._open[fingerprint]

    def _divide_caches(self) -> None:
        """Limit the KV caches of the open models, so that all models together keep to the memory plan. Each
        model gets its planned bytes and an equal part of the rest. A `kv_budget` of the user stays."""
        if self._settings.kv_budget:
            return
        opened = [(self._candidates[key], runtime) for key, runtime in self._open.items()]
        left = self._limit - PROGRAM - sum(candidate.own_bytes for candidate, _ in opened)
        for candidate, runtime in opened:
            part = candidate.need.cache + max(0, left) // len(opened)
            wanted = max(1, min(part, runtime.planned.kv_room or part))
            limit_caches(runtime.engine, runtime.writer.scheduler, wanted)

    def _take(self, runtime: Runtime) -> None:
        """Make this runtime the one in use: take over its parts."""
        if "writer" in vars(self):
            self.writer.scheduler.rest()
        for name, part in vars(runtime).items():
            setattr(self, name, part)
        self.chats = AutoChats(self, runtime)

    def use_writer_of(self, reply_id: str) -> Runtime:
        """Take the model that wrote a reply, if it is one of the models, and return the runtime in use."""
        if reply_id != "last":
            written_by = self.store.replies.get(reply_id).fingerprint
            if written_by in self._candidates:
                self._take(self._runtime_of(written_by))
        return self._open[self.model.fingerprint]

    # -- a reply -------------------------------------------------------------------------------------

    def reply_chunks(
        self, messages: Sequence[Message], write: Write, session: str | None = None, seed: int | None = None
    ) -> Iterator[Chunk]:
        """Choose a model for the last of these messages, and yield the chunks of write(its runtime)."""
        choice = self._choose(messages, seed)
        yield from self._use(choice)
        while self.model.fingerprint != choice.model.fingerprint:  # it could not be opened
            choice = self._choose(messages, seed)
            yield from self._use(choice)
        larger = self.selector.best_larger(choice, self._fitting(messages))
        if larger is not None and is_unsure(self._first_logprobs(messages, session)):
            yield from self._use(choice.handed_to(larger))
            if self.model.fingerprint == larger.fingerprint:
                choice = choice.handed_to(larger)
        yield Chunk("", note=choice.line)
        yield from self._with_choice(choice, write(self._open[self.model.fingerprint]))

    def _choose(self, messages: Sequence[Message], seed: int | None) -> ModelChoice:
        turns = turns_for(messages, self._vector)
        return self.selector.choose(turns, seed, self._fitting(messages))

    def _fitting(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """Return the fingerprints of the models whose context has room for the last message, the smallest
        first, without those that could not be opened in the last RETRY_AFTER seconds. If no model has room,
        return the model with the largest context."""
        letters = len(messages[-1].content) if messages else 0
        since = time.monotonic() - RETRY_AFTER
        failed = {key for key, failed_at in self._failed.items() if failed_at > since}
        known = [model for model in self.selector.models if model.fingerprint not in failed]
        fits = [model for model in known if letters < LETTERS_PER_TOKEN * model.context]
        fits = fits or [max(known, key=lambda model: model.context)]
        return tuple(model.fingerprint for model in fits)

    def _use(self, choice: ModelChoice) -> Iterator[Chunk]:
        """Make the chosen model the model in use. If the chosen model cannot be opened, yield a note with the
        reason, and keep the present model."""
        chosen = choice.model
        if chosen.fingerprint not in self._open:
            yield Chunk("", note=f"Opening {chosen.name} ...")
        try:
            self._take(self._runtime_of(chosen.fingerprint))
        except RuvmlxError as error:
            self._failed[chosen.fingerprint] = time.monotonic()
            yield Chunk("", note=f"{chosen.name} stays closed: {error}")

    def _with_choice(self, choice: ModelChoice, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Add the choice to the response, and store it with the reply."""
        for chunk in chunks:
            if chunk.response is not None:
                self._keep(choice, chunk.response)
                chunk = replace(chunk, response=replace(chunk.response, choice=choice))
            yield chunk

    def _keep(self, choice: ModelChoice, response: GenerationResponse) -> None:
        """Store the choice. The reply stays without a stored choice if the store cannot be written."""
        ms = response.latency_ms / max(1, response.generation_tokens)
        with contextlib.suppress(StoreError):
            self.store.model_choices.add(choice.row(response.request_id, self.selector.reader, ms))

    def _first_logprobs(self, messages: Sequence[Message], session: str | None) -> list[float]:
        """Return the log-probabilities of the first PROBE tokens that the model in use would write. The
        tokens are not stored. Return [] if the chat has no room."""
        request = GenerationRequest(
            messages=list(messages), session_id=session, max_new_tokens=PROBE, logprobs=1,
            sampling=self.writer.sampling(temperature=0.0),
        )  # fmt: skip
        try:
            return [token.logprob for token in self.writer.answer(request).logprobs]
        except RuvmlxError:
            return []

    # -- questions -----------------------------------------------------------------------------------

    def _vector(self, text: str) -> np.ndarray | None:
        """Return the vector of a question, as the smallest model embeds it. The first call measures this
        model's whitening, unless the store has it."""
        if text not in self._states:
            while len(self._states) >= 8 * router.TURNS:
                self._states.pop(next(iter(self._states)))
            self._states[text] = self._read(text)
        return self._states[text]

    def _read(self, text: str) -> np.ndarray | None:
        model, backend = self._reader.model, self._reader.backend
        if self._whitening is None:
            self._whitening = embedding.whitening_of(self._reader.store, model, backend)
        with original_model(backend):
            state = embedding.read_question(backend, model.tokenizer, text)
        if state is None or state.shape != self._whitening.mean.shape or not np.isfinite(state).all():
            return None
        return self._whitening(state)

    # -- ratings -------------------------------------------------------------------------------------

    def rate(
        self, reply_id: str, rating: str, note: str = "", adapter: str | None = None, watch: Watch = QUIET
    ) -> RatingResult:
        return self.use_writer_of(reply_id).rate(reply_id, rating, note, adapter, watch)

    def unrate(self, reply_id: str, adapter: str | None = None) -> LearnStatus:
        return self.use_writer_of(reply_id).unrate(reply_id, adapter)

    def newest_feedback(self) -> str | None:
        """Return the id of the reply whose rating or preference of any model `undo` takes back. The call
        opens no model."""
        newest = self._newest_rated_model()
        if newest is None or self.learner is None:
            return super().newest_feedback()
        return AdapterHistory(self.store, newest, self.learner.history.name).newest_feedback()

    def _newest_rated_model(self) -> str | None:
        """Return the fingerprint of the model with the newest rating or preference; None: there is none."""
        if self.learner is None:
            return None
        name = self.learner.history.name
        return self.store.model_choices.newest_feedback(list(self._candidates), name)

    def undo(self) -> LearnStatus:
        """Remove the newest rating or preference of all models (`Runtime.undo`)."""
        newest = self._newest_rated_model()
        if newest is not None:
            self._take(self._runtime_of(newest))
        return super().undo()

    # -- the end -------------------------------------------------------------------------------------

    def erase_chat(self, session_id: str) -> bool:
        """Erase a chat, and its KV caches of all open models (`Runtime.erase_chat`)."""
        for runtime in self._open.values():
            runtime.engine.sessions.drop(session_id)
        return super().erase_chat(session_id)

    def forget_words(self) -> None:
        """Drop the words that all open models keep in memory (`Runtime.forget_words`)."""
        self._states.clear()
        for runtime in self._open.values():
            runtime.forget_words()

    def memory_use(self) -> MemoryUse:
        """Return the memory that this process uses, with the models and KV caches of all open models."""
        used = [runtime.memory_use() for runtime in self._open.values()]
        return replace(
            used[0],
            model=sum(use.model for use in used),
            kv=sum(use.kv for use in used),
            adapters=sum(use.adapters for use in used),
            kv_budget=sum(use.kv_budget for use in used),
        )

    def memory_purposes(self) -> list[Purpose]:
        """Return the memory that this process uses for each purpose. The result has the sum over all open
        models."""
        tables = [runtime.memory_purposes() for runtime in self._open.values()]
        return sum_purposes(tables, self.memory_use().resident)

    def close(self) -> None:
        """Train the selector if there are enough new ratings, and close all models."""
        with contextlib.ExitStack() as stack:
            for runtime in self._open.values():
                stack.callback(runtime.close)
            self.selector.train_if_due(TRAIN_EVERY)


def selector_models(
    store: Store, found: AutoModels, settings: Settings, claim: bool = True
) -> list[tuple[AutoModel, SelectorModel]]:
    """Return the models with what the selector knows of them. Most of the weights are not read. claim: as in
    `identify`. A model that cannot be loaded is left out; it is an error if the setting auto_models names it,
    or if no other model can be loaded."""
    models: list[tuple[AutoModel, SelectorModel]] = []
    for candidate in found.models:
        try:
            model = identify(store, load_model(candidate.name), claim)
        except RuvmlxError:
            if settings.auto_models or (not models and candidate is found.best):
                raise
            continue
        context = settings.max_context or model.context
        shown = SelectorModel(model.fingerprint, model.name, model.parameters, context)
        models.append((candidate, shown))
    return models


class AutoChats(Conversations):
    """The user's chats, in which the selector chooses a model for each question. Other calls use the model in
    use, or the model that wrote the reply."""

    def __init__(self, auto: AutoRuntime, runtime: Runtime) -> None:
        super().__init__(
            runtime.store, runtime.writer, runtime.learning, runtime.choices,
            runtime.settings.implicit_feedback,
        )  # fmt: skip
        self._auto = auto

    def say(self, session_id: str, text: str, **how: Any) -> Iterator[Chunk]:
        if _is_fixed(how):
            return super().say(session_id, text, **how)
        turns, instead = self.turns(session_id), how.get("instead_of")
        before = turns if instead is None else turns[: place_of(turns, instead, "user")]
        return self._auto.reply_chunks(
            _messages([*before, Turn("user", text)]),
            lambda runtime: runtime.chats.say(session_id, text, **how),
            session_id,
        )

    def again(self, session_id: str, **how: Any) -> Iterator[Chunk]:
        if _is_fixed(how):
            return super().again(session_id, **how)
        turns = self.turns(session_id)
        asked = _messages(turns[: end_of_question(turns, how.get("message"))])
        return self._auto.reply_chunks(
            asked, lambda runtime: runtime.chats.again(session_id, **how), session_id
        )

    def continue_reply(self, session_id: str, **how: Any) -> Iterator[Chunk]:
        turns, message = self.turns(session_id), how.get("message")
        at = len(turns) - 1 if message is None else place_of(turns, message)
        reply_id = turns[at].reply_id if turns else None
        if reply_id is None:
            return super().continue_reply(session_id, **how)
        return self._auto.use_writer_of(reply_id).chats.continue_reply(session_id, **how)


def _is_fixed(how: dict[str, Any]) -> bool:
    """Return True if the caller asks for the original model or for an adapter, so for the model in use."""
    return bool(how.get("untouched")) or how.get("adapter_id") is not None


def _messages(turns: Sequence[Turn]) -> list[Message]:
    read = ("system", "user", "assistant")
    return [Message(turn.role, turn.content) for turn in turns if turn.role in read]
