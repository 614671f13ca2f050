"""This module joins the store, the model, the inference engine and the learning into one object for the apps.

Only the thread that opened a Runtime is allowed to call its methods, because MLX binds its streams to
threads. Other threads can set the `cancel` event of a request, and can encode the text of a request
(`writer.encode_request`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from . import settings as config
from .backends.base import Backend
from .backends.select import describe, open_backend
from .chats import soft_delete
from .chats.choices import Choices, EditedReply
from .chats.conversations import Conversations
from .chats.learning import Learning, LearningState
from .chats.lost_sides import note_sides
from .chats.reply_writer import ReplyWriter
from .engine import Chunk, LLMInferenceEngine
from .engine.context_window import Turn
from .engine.draft_model import DraftModel
from .engine.model_identity import identify
from .engine.scheduler import Scheduler
from .errors import StoreBusy
from .kv.disk import CacheFolder
from .kv_tuning.tier_review import TierReview
from .memory import memory_plan
from .memory.draft_plan import open_draft_model
from .memory.learning_room import LearningRoom
from .memory.load_plan import Plan, Planning
from .models.config.model import Message, Model
from .optimizer.optimizer import RealtimeOptimizer
from .platform.cpu import total_memory
from .platform.memory import MemoryUse, peak, resident
from .progress import QUIET, Watch
from .settings import Settings
from .sona import embedding
from .sona.adapter_history import LearnStatus
from .sona.learner import Learner
from .sona.rating_index import MemoryStatus
from .sona.state import PreferenceResult, RatingResult
from .sona.unrate import take_back
from .store import NamedRow, Store

__all__ = [
    "EditedReply",
    "LearnStatus",
    "LearningState",
    "MemoryStatus",
    "PreferenceResult",
    "RatingResult",
    "Runtime",
    "Turn",
]


class Runtime:
    """An open model with its store. Call `Runtime.open` to make a Runtime. Close the Runtime at the end, or
    use it in a `with` block.

    chats: the conversations.
    writer: the object that writes replies, in chats and outside of chats.
    choices: the user's preferences between two replies.
    learning: the adapters and their training.
    optimizer: the object that watches the speed and the quality of the replies.
    tiers: the object that measures and chooses the policy for the precision of KV pages.
    planned: the memory that the plan reserves for each purpose.
    """

    is_auto = False  # True if a selector chooses a model for each question (auto_runtime.py)

    def __init__(
        self,
        store: Store,
        model: Model,
        backend: Backend,
        settings: Settings,
        learn: bool = True,
        plan: Plan | None = None,
        draft_model: DraftModel | None = None,
    ):
        """learn: if False, the runtime stores ratings but never changes weights. plan: the memory plan that
        the program made before it read the weights. draft_model: the small model that guesses tokens. Raises
        UsageError if a setting is invalid, for example a `kv_budget` that is too small for one chat."""
        self.store, self.model, self.backend, self.settings = store, model, backend, settings
        kept, exists = settings.kv_disk, store.chats.exists
        folder = CacheFolder.of_store(store.path, kept << 20, exists) if kept is not None else None
        self.engine = LLMInferenceEngine(
            model, backend, folder=folder, speculate=settings.speculate, draft_model=draft_model
        )
        self.planned = memory_plan.Planned.of(self.engine, plan)
        self.tiers = TierReview(store, self.engine, settings)
        room = LearningRoom(model, backend, settings.memory_bytes)
        self.learning = Learning(store, model, backend, settings, learn, room)
        self.learning.residency.budget = self.planned.adapters
        self.optimizer = RealtimeOptimizer(store, self.engine, settings, self.tiers, Scheduler(self.engine))
        self.writer = ReplyWriter(store, self.engine, settings, self.learning, self.tiers, self.optimizer)
        self.choices = Choices(store, model, self.learning)
        self.chats = Conversations(
            store, self.writer, self.learning, self.choices, settings.implicit_feedback
        )
        soft_delete.tidy(store, folder)
        memory_plan.use_budget(self.engine, self.planned)

    @classmethod
    def open(cls, settings: Settings | None = None, learn: bool = True, watch: Watch = QUIET) -> "Runtime":
        """Open the store, then load the model and the adapter. This takes seconds, or longer with a download.
        Raises RuvmlxError.

        watch: an object that receives the memory plan and the progress; it can raise an error to stop the
            loading. If the memory is too small, the method raises NotEnoughMemory before it reads the
            model's weights. Before the download of a GGUF file, it compares only the file's size with the
            limit. It checks a draft model after it has read the model's weights.
        """
        settings = _with_one_model(settings or Settings())
        choice = describe(settings.backend, settings.threads)
        store = Store(config.store_file())
        try:
            planning = Planning(
                watch, choice, settings.model, settings.backend, settings.max_context, settings.memory_bytes
            )
            loaded = identify(store, planning.load(settings.model))
            if not loaded.shape.writes:  # an encoder has no output head, and no tokens to guess
                settings = replace(settings, adapter="none", draft_model=None)
            budget = (settings.kv_budget or 0) << 20
            weights = planning.watched_model(loaded)
            backend = open_backend(settings.backend, weights, settings.threads, budget, planning)
            small = open_draft_model(settings, loaded, backend, planning.plan, watch)
            return cls(store, loaded, backend, settings, learn, planning.plan, small)
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        """Save unfinished learning, erase chats that the user deleted more than a day ago (unless the store
        is locked), write KV caches to disk."""
        with contextlib.ExitStack() as rest:  # runs the calls, the last one first, also after an error
            rest.callback(self.store.close)
            rest.callback(self.engine.sessions.keep_all)
            rest.callback(self.optimizer.close)
            rest.callback(self.learning.close)
            note_sides(self.store, self.backend, self.model.fingerprint)
            with contextlib.suppress(StoreBusy):
                soft_delete.delete_older(self.store)

    def erase_chat(self, session_id: str) -> bool:
        """Erase a chat and its KV caches immediately (`soft_delete.delete`). The user cannot restore the
        chat. Returns False if some files still hold words of the chat. After a second, the search index of a
        large store leaves the rest of its cleaning to the next idle time."""
        self.engine.sessions.drop(session_id)
        gone = soft_delete.delete(self.store, session_id, seconds=1)
        self.forget_words()
        return gone

    def forget_words(self) -> None:
        """Clear the caches of text in memory, because the user deleted some of this text. When the program
        needs the remaining text again, it reads this text from the store."""
        self.model.tokenizer.forget_texts()
        self.learning.forget_words()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def reply_chunks(
        self,
        messages: Sequence[Message],
        write: "Callable[[Runtime], Iterator[Chunk]]",
        session: str | None = None,
        seed: int | None = None,
    ) -> Iterator[Chunk]:
        """Yield the chunks of write(this runtime). `AutoRuntime` first chooses the model that answers these
        messages. seed: the same seed gives the same choice."""
        return write(self)

    # -- learning ------------------------------------------------------------------------------------

    def embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one vector of length 1 [dimensions] for each text, from the model without an adapter."""
        return embedding.embed(self.store, self.model, self.backend, texts)

    @property
    def learner(self) -> Learner | None:
        """Return the learner that trains the adapter in use, or None if no adapter is in use."""
        return self.learning.learner

    def adapters(self) -> list[NamedRow]:
        """Return the adapters of this model that have at least one version."""
        return self.store.adapters.all(self.model.fingerprint)

    def rate(
        self, reply_id: str, rating: str, note: str = "", adapter: str | None = None, watch: Watch = QUIET
    ) -> RatingResult:
        """Store a rating of a reply and train an adapter on the rating at once (not if `learn` is False).
        reply_id: an id, or "last".
        adapter: the name of the adapter; None: the adapter in use. watch: an object that receives the
            progress of the measurements before a model's first rating."""
        with self.learning.using(adapter) as learner:
            return learner.rate(reply_id, rating, note, watch)

    def unrate(self, reply_id: str, adapter: str | None = None) -> LearnStatus:
        """Remove the rating of one reply, and take back the effect of this rating on the adapter's weights.
        adapter: as in `rate`."""
        with self.learning.using(adapter) as learner:
            return take_back(self.store, learner, reply_id)

    def undo(self) -> LearnStatus:
        """Remove the newest rating or preference of the adapter in use: the adapter gets exactly its earlier
        weights again. Raises NotFound if there is no rating and no preference."""
        return self.learning.require_learner().history.undo()

    def newest_feedback(self) -> str | None:
        """Return the id of the reply whose rating or preference `undo` takes back; of a preference, the id of
        the better reply. Return None if `undo` would take nothing back, or if no adapter is in use."""
        return self.learner.history.newest_feedback() if self.learner is not None else None

    def rollback(self, version: int) -> LearnStatus:
        """Use an earlier version of the adapter again. Version 0 is the model without trained weights."""
        return self.learning.require_learner().history.rollback(version)

    def status(self) -> LearnStatus:
        """Return the number of ratings, the number of updates and the version of the adapter in use."""
        return self.learning.require_learner().history.status()

    # -- memory --------------------------------------------------------------------------------------

    def memory_purposes(self) -> list[memory_plan.Purpose]:
        """Return, for each purpose of memory (weights, KV caches and others), the planned bytes, the bytes in
        use and the limit."""
        return memory_plan.purposes(self.planned, self.memory_use(), self.engine, self.learning)

    def memory_use(self) -> MemoryUse:
        """Return the memory that this process uses: the model, the KV cache, the adapters and the total."""
        pool, now = self.backend.pool, resident()
        return MemoryUse(
            model=self.backend.nbytes,
            kv=self.engine.sessions.nbytes,
            adapters=sum(adapter.bytes for adapter in self.learning.residency.tiers()),
            resident=now,
            peak=max(now, peak()),
            budget=total_memory(),
            kv_budget=pool.budget if pool is not None else 0,
        )


def _with_one_model(settings: Settings) -> Settings:
    """Return the settings with one model in place of `auto`."""
    if settings.model != config.AUTO:
        return settings
    from .memory.candidates import single_model

    return single_model(settings)
