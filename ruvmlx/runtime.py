"""Everything one user has open: store, model, engine and learning, wired together for the apps.

A Runtime belongs to the thread that opened it (MLX binds its streams to threads). From any other thread only
the `cancel` event of a request may be set.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import settings as config
from .backends.base import Backend
from .backends.select import describe, open_backend
from .chats import soft_delete
from .chats.choices import Choices, EditedReply
from .chats.conversations import Conversations
from .chats.learning import Learning, LearningState
from .chats.reply_writer import ReplyWriter
from .engine import Chunk, GenerationRequest, LLMInferenceEngine, Sampling
from .engine.context_window import Turn
from .errors import StoreBusy
from .kv.disk import CacheFolder
from .kv_tuning.tier_review import TierReview
from .memory import memory_plan
from .memory.load_plan import Plan, Planning
from .models.config.model import Model
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

if TYPE_CHECKING:
    from .sona.background import TrainingSettings as Training

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
    """An open model with its store. Made by `Runtime.open`; close it, or use it in a `with` block.

    chats: conversations. writer: replies outside of chats.
    choices: preferences between replies. learning: adapters and the loops that train them. tiers: the KV
    cache's policy. planned: the memory that it was opened for.
    """

    def __init__(
        self,
        store: Store,
        model: Model,
        backend: Backend,
        settings: Settings,
        learn: bool = True,
        plan: Plan | None = None,
    ):
        """learn: False records ratings, for examples and for later, but never changes weights. plan: made
        before the weights were read. UsageError for a `kv_budget` that holds no chat."""
        self.store, self.model, self.backend, self.settings = store, model, backend, settings
        kept = settings.kv_disk
        folder = None if kept is None else CacheFolder.of_store(store.path, kept << 20)
        self.engine = LLMInferenceEngine(model, backend, folder=folder, speculate=settings.speculate)
        self.planned = memory_plan.Planned.of(self.engine, plan)
        self.tiers = TierReview(store, self.engine, settings)
        self.learning = Learning(store, model, backend, settings, learn)
        self.writer = ReplyWriter(store, self.engine, settings, self.learning, self.tiers)
        self.choices = Choices(store, model, self.learning)
        self.chats = Conversations(
            store, self.writer, self.learning, self.choices, settings.implicit_feedback
        )
        soft_delete.tidy(store, folder)
        memory_plan.use_budget(self.engine, self.planned)

    @classmethod
    def open(cls, settings: Settings | None = None, learn: bool = True, watch: Watch = QUIET) -> "Runtime":
        """Open the store, load the model and the adapter: seconds. Raises RuvmlxError.

        watch: receives the plan and the progress; it may raise to stop. NotEnoughMemory is raised before
        weights are fetched or read.
        """
        settings = settings or Settings()
        choice = describe(settings.backend, settings.threads)
        store = Store(config.store_file())
        try:
            planning = Planning(watch, choice, settings.model, settings.backend, settings.max_context)
            loaded = planning.load(settings.model)
            budget = (settings.kv_budget or 0) << 20
            weights = planning.counted(loaded)
            backend = open_backend(settings.backend, weights, settings.threads, budget, planning)
            return cls(store, loaded, backend, settings, learn, planning.plan)
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        """Save unfinished learning, erase chats that were deleted a day ago, write KV caches to disk."""
        try:
            self.learning.close()
            with contextlib.suppress(StoreBusy):
                soft_delete.delete_older(self.store)
            self.engine.sessions.keep_all()
        finally:
            self.store.close()

    def erase_chat(self, session_id: str) -> bool:
        """Delete a chat for good, now: `soft_delete.delete`."""
        self.engine.sessions.drop(session_id)
        return soft_delete.delete(self.store, session_id, seconds=0)

    def clean_index(self, seconds: float) -> bool:
        """Remove deleted words from the search index for about this long: `soft_delete.clean_index`."""
        return soft_delete.clean_index(self.store, seconds)

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- replies -------------------------------------------------------------------------------------

    def sampling(self, **given: Any) -> Sampling:
        """Values given here > the settings > the model's own > defaults. None means not given."""
        return self.writer.sampling(**given)

    def generate(self, request: GenerationRequest, session_id: str | None = None) -> Iterator[Chunk]:
        """Stream one reply and commit it: `ReplyWriter.generate`."""
        return self.writer.generate(request, session_id)

    def embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One unit vector [dimensions] per text, by the untouched model: `embedding.embed`."""
        return embedding.embed(self.store, self.model, self.backend, texts)

    # -- learning ------------------------------------------------------------------------------------

    @property
    def learner(self) -> Learner | None:
        """The learner of the adapter in use; None without one."""
        return self.learning.learner

    @property
    def adapter_label(self) -> str | None:
        """The adapter and its version, as in "default@3"; None without one."""
        return self.learning.label

    def use_adapter(self, name: str | None) -> None:
        """Switch to another adapter (None: no adapter): `Learning.use`."""
        self.learning.use(name)

    def adapters(self) -> list[NamedRow]:
        """Adapters of this model that have learned something."""
        return self.store.adapters.all(self.model.fingerprint)

    def settle(self, cancel: threading.Event | None = None, watch: Watch | None = None) -> None:
        """Prepare the newest reply for its rating, while the user reads: `Learning.settle`."""
        self.learning.settle(cancel, watch)

    def rate(
        self, reply_id: str, rating: str, note: str = "", adapter: str | None = None, watch: Watch = QUIET
    ) -> RatingResult:
        """Rate a reply (its id, or "last"): the weights change at once. adapter: that learns from it; None:
        the one in use. watch: gets the progress of what a model's first rating waits for."""
        with self.learning.using(adapter) as learner:
            return learner.rate(reply_id, rating, note, watch)

    def unrate(self, reply_id: str, adapter: str | None = None) -> LearnStatus:
        """Take the rating of one reply back, as if it had never been given: `take_back`. adapter: as in
        `rate`."""
        with self.learning.using(adapter) as learner:
            return take_back(self.store, learner, reply_id)

    def undo(self) -> LearnStatus:
        """Take the newest rating or preference back, bit for bit. NotFound if there is none."""
        return self.learning.require_learner().history.undo()

    def rollback(self, version: int) -> LearnStatus:
        """Use an earlier version of the adapter again; 0 is the untouched model."""
        return self.learning.require_learner().history.rollback(version)

    def status(self) -> LearnStatus:
        """Status of the adapter in use: ratings, updates, version."""
        return self.learning.require_learner().history.status()

    def memory(self) -> MemoryStatus:
        """Status of the rating index: rated questions and the patterns that they form."""
        return self.learning.require_learner().rating_index.status()

    def notice(self, reply_id: str, what: str) -> bool:
        """Record that the user "copied", "edited" ... a reply: `Learning.notice`."""
        return self.learning.notice(reply_id, what)

    def consolidate(
        self,
        progress: Callable[[int, int, float], None] | None = None,
        cancel: threading.Event | None = None,
        settings: "Training | None" = None,
    ) -> dict[str, Any]:
        """Train on the ratings; returns a report: `Learning.consolidate`."""
        return self.learning.consolidate(progress, cancel, settings)

    # -- memory --------------------------------------------------------------------------------------

    def memory_purposes(self) -> list[memory_plan.Purpose]:
        """The memory of this process by purpose: planned, in use, limit."""
        return memory_plan.purposes(self.planned, self.held(), self.engine, self.learning)

    def held(self) -> MemoryUse:
        """The memory that this process uses, in few parts."""
        pool, now = getattr(self.backend, "pool", None), resident()
        return MemoryUse(
            model=self.backend.nbytes,
            kv=self.engine.sessions.nbytes,
            adapters=sum(adapter.bytes for adapter in self.learning.residency.tiers()),
            resident=now,
            peak=max(now, peak()),
            budget=total_memory(),
            kv_budget=pool.budget if pool is not None else 0,
        )
