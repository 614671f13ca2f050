"""Learning in one place: the adapter in use, the loops that train it, the router that chooses it."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import settings as config
from ..backends.base import Backend, preserve_lora
from ..engine.types import GenerationRequest
from ..errors import NotFound, UsageError
from ..lora.residency import Residency
from ..lora.targets import parse
from ..models.config.model import Model
from ..pausing import Pause, Stopped, stop_when
from ..progress import Watch
from ..settings import Settings
from ..sona.adapter_history import LearnStatus
from ..sona.judge import Judge, TasteJudge
from ..sona.learner import Learner
from ..sona.optional.routing import Routing
from ..sona.rating_index import MemoryStatus
from ..sona.slow_loops import Loops
from ..sona.wiring import open_learner
from ..store import Store

if TYPE_CHECKING:
    from ..sona.background import TrainingSettings as Training
    from ..sona.optional.router import Route


SUMMED_UP_AT = 10  # ratings and preferences


@dataclass(frozen=True)
class Rated:
    """A rating in force, and the question of its reply."""

    reply_id: str
    rating: str
    note: str
    question: str


@dataclass(frozen=True)
class LearningState:
    """Learning of one adapter. missing: ratings until the background loop is due; None: it cannot train this
    model. recent: newest first. likes: what the user's ratings say that they like, the strongest first."""

    adapter: str
    status: LearnStatus
    memory: MemoryStatus
    missing: int | None
    recent: list[Rated]
    likes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FirstSummary:
    """likes: what the ratings show clearly, as a sentence; "" for nothing. guess: what they point to."""

    count: int  # ratings and preferences
    likes: str
    guess: str


class Learning:
    """The adapters of one model. learner: of the adapter in use; None: no adapter is in use."""

    def __init__(self, store: Store, model: Model, backend: Backend, settings: Settings, learn: bool):
        """learn: False records ratings, for examples and for later, but never changes weights."""
        self._store, self._model, self._backend, self._settings = store, model, backend, settings
        self._learns = learn
        self._summed_up: set[str] = set()  # adapters of which `first_summary` was told
        parse(settings.base_targets, model.shape.n_layers, "base_targets")
        self.residency = Residency(self._load, lambda learner: learner.active.nbytes)
        name = settings.adapter_name
        self.learner: Learner | None = self.residency.get(name) if name else None
        self._routing: Routing | None = None
        if settings.router:
            self._routing = Routing(store, model.fingerprint, settings.examples > 0)
        self._loops: Loops | None = None

    def _load(self, name: str) -> Learner:
        implicit, targets = self._settings.implicit_feedback, self._settings.learn_targets
        return open_learner(self._store, self._model, self._backend, name, self._learns, implicit, targets)

    @property
    def label(self) -> str | None:
        """The adapter in use and its version, as in "default@3"; None without one."""
        return f"{self.learner.history.name}@{self.learner.version}" if self.learner else None

    def require_learner(self) -> Learner:
        """The learner in use; NotFound without one."""
        if self.learner is None:
            raise NotFound(
                "no adapter is loaded, so there is nothing to learn; start without --adapter none."
            )
        return self.learner

    def use(self, name: str | None) -> None:
        """Switch to another adapter (None: no adapter), also within a chat; the model stays loaded.

        Chats keep their KV caches if only the head differs; under another base they are read again at their
        next turn.
        """
        if name is not None and config.parse("adapter", name, "the request") == "none":
            raise UsageError("an adapter cannot be called none; choose another name.")
        self.settle()
        self._close_loops()  # they train the adapter that was in use
        before = self.learner.history.name if self.learner is not None else None
        if self.learner is not None:
            self.learner.release()
        if name is None:
            self.learner = None
            self._backend.set_lora(None)
        else:
            self.learner = self.residency.get(name)
            self.learner.sync()
        if name != before:
            facts = {"model": self._model.fingerprint, "adapter": name, "before": before}
            self._store.witness.note("use", facts)

    def of(self, name: str | None) -> Learner | None:
        """The learner of an adapter, in step with the store: the one in use (None), none (""), or by name.
        The one in use stays in use."""
        if not name:
            learner = self.learner if name is None else None
        elif self.learner is not None and self.learner.history.name == name:
            learner = self.learner
        else:
            config.parse("adapter", name, "the request")
            with preserve_lora(self._backend):
                learner = self.residency.load_beside(name)
        if learner is not None:
            with self.in_its_place(learner):
                learner.sync()
        return learner

    @contextlib.contextmanager
    def using(self, name: str | None) -> Iterator[Learner]:
        """In the block this adapter's learner (None: of the one in use) can be rated; NotFound without one.
        The one in use stays in use."""
        learner = self.of(name) if name else self.require_learner()
        assert learner is not None
        with self.in_its_place(learner):
            yield learner

    def in_its_place(self, learner: Learner | None) -> AbstractContextManager[None]:
        """In the block this learner may install its LoRA; unless it is the one in use, the backend has the
        LoRA from before again afterwards."""
        return contextlib.nullcontext() if learner is self.learner else preserve_lora(self._backend)

    def settle(self, cancel: threading.Event | None = None, watch: Watch | None = None) -> None:
        """Prepare the newest replies for a rating; called while the user reads. watch: as in Learner.settle.
        With `cancel`, the model then writes replies that nobody sees: rated replies are compared with them
        (unshown.py), and they show how to move the measures of replies (measure_directions.py).

        It takes seconds after many replies, or if ratings change more than the output head. `cancel` is
        checked every few tens of milliseconds; the next call, or the rating, does the rest.
        """
        if self.learner is None:
            return
        with contextlib.suppress(Stopped):
            self.learner.settle(stop_when(cancel), watch)
            if cancel is not None:
                self._write_unshown(self.learner, stop_when(cancel))
        if self._routing is not None:
            self._routing.of(self.learner).sync()

    def _write_unshown(self, learner: Learner, pause: Pause) -> None:
        """Write the unshown replies and measure them. Do nothing while the user has rated no reply."""
        if learner.history.labels():
            learner.taste.compare(self._model, self._backend, pause)
            if self._learns and learner.active.is_measured:
                learner.directions.complete(self._model, self._backend, learner.probe, pause)

    def notice(self, reply_id: str, what: str) -> bool:
        """Record that the user "copied", "regenerated", "edited" ... a reply (sona/signal.py).

        True if it was recorded: only if `implicit_feedback` is on, and for replies of this model.
        """
        if self.learner is None:
            return False
        reply = self._store.replies.get(reply_id)
        return reply.fingerprint == self._model.fingerprint and self.learner.rating_index.record_implicit(
            reply, what
        )

    def state(self, recent: int = 8) -> LearningState:
        """The state of the adapter in use, with its newest ratings."""
        learner = self.require_learner()
        history = learner.history
        rated = [
            Rated(r.reply_id, r.rating, r.note, self._store.replies.get(r.reply_id).prompt)
            for r in history.ratings()[: -recent - 1 : -1]
        ]
        memory = learner.rating_index.status()
        missing = self.loops.missing() if history.trains else None
        likes = tuple(preference.words for preference in learner.taste.status.preferences)
        return LearningState(history.name, history.status(), memory, missing, rated, likes)

    def first_summary(self) -> FirstSummary | None:
        """What the ratings say, told once for each adapter: after SUMMED_UP_AT ratings and preferences. None
        before that, and once it was told."""
        learner, log = self.require_learner(), self._store.witness
        if learner.history.name in self._summed_up:
            return None
        status = learner.history.status()
        if (count := status.ratings + status.preferences) < SUMMED_UP_AT:
            return None
        facts = {"model": self._model.fingerprint, "adapter": learner.history.name}
        self._summed_up.add(learner.history.name)
        if any(facts.items() <= row.body.items() for row in log.rows("summary")):
            return None
        found = FirstSummary(count, learner.taste.status.sentence, learner.taste.model.guess())
        log.note("summary", facts | {"likes": found.likes, "guess": found.guess})
        return found

    def judge(self, learner: Learner | None) -> Judge | None:
        """A judge that scores replies by the ratings of an adapter; None before the first rating."""
        taste = learner.taste.model if learner is not None else None
        return TasteJudge(taste) if taste is not None and taste.ratings else None

    # -- the router ----------------------------------------------------------------------------------

    def route(self, request: GenerationRequest) -> "Route | None":
        """The router's choice for a reply; None if the router is off or has only one arm."""
        if self._routing is None or self.learner is None:
            return None
        return self._routing.choose(self.learner, request)

    # -- the loops that train ------------------------------------------------------------------------

    @property
    def loops(self) -> Loops:
        """The background and the deep loop of the adapter in use."""
        if self._loops is None:
            settings = self._settings
            self._loops = Loops(
                self.require_learner(), self._model, settings.slow_loop, settings.base_targets
            )
        return self._loops

    def is_due(self) -> bool:
        """Is there work for `consolidate`?"""
        return self.learner is not None and self.loops.is_due()

    def consolidate(
        self,
        progress: Callable[[int, int, float], None] | None = None,
        cancel: threading.Event | None = None,
        settings: "Training | None" = None,
    ) -> dict[str, Any]:
        """Train a base LoRA on the ratings, and use it if it passes the promotion test. Returns a report.

        progress(steps done, steps, loss). `cancel` is checked every few tens of milliseconds; a stopped run
        continues at the next call, also in another process.
        """
        report = self.loops.consolidate(progress, cancel, settings)
        if self._routing is not None and not (cancel is not None and cancel.is_set()):
            report |= {"router": self._routing.of(self.require_learner()).train(cancel)}
        return report

    def close(self) -> None:
        """Save stopped runs and pending signals in the store."""
        self._close_loops()
        for learner in self.residency.loaded_adapters():
            learner.rating_index.flush()

    def _close_loops(self) -> None:
        if self._loops is not None:
            self._loops.close()
        self._loops = None
