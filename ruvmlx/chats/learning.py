"""This module joins the parts of learning: the adapter in use, the loops that train the adapter, and the
router, which chooses for each reply whether to use the adapter and examples."""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import settings as config
from ..backends.base import SAMPLES, Backend, preserve_lora, worker
from ..engine.types import GenerationRequest
from ..errors import NotFound, SideFailed, StoreBusy, StoreError, UsageError
from ..lora.residency import Residency
from ..lora.targets import parse
from ..models.config.model import Model
from ..pausing import EndlessRoom, Pause, Room, Stopped, stop_after, stop_when
from ..progress import QUIET, Watch
from ..settings import Settings
from ..sona.adapter_history import LearnStatus
from ..sona.judge import FailedJudge, Judge, TasteJudge
from ..sona.learner import Learner
from ..sona.optional.routing import Routing
from ..sona.rating_index import MemoryStatus
from ..sona.slow_loops import Loops
from ..sona.wiring import open_learner
from ..store import Store

if TYPE_CHECKING:
    from ..sona.background import TrainingSettings as Training
    from ..sona.optional.router import Route


SLICE = 0.05  # seconds after which a slice of `measure_in_slices` ends at the next step
SUMMED_UP_AT = 10  # the number of ratings and preferences after which `first_summary` is shown


@dataclass(frozen=True)
class Rated:
    """A rating that is in force, and the question that the rated reply answers."""

    reply_id: str
    rating: str
    note: str
    question: str


@dataclass(frozen=True)
class LearningState:
    """The state of the learning of one adapter. missing: the number of ratings or preferences until the slow
    loop (background or style loop) runs again; None: the background loop cannot train the model. recent: the
    newest ratings, the newest first. likes: the preferences of the user that the ratings show, in words, the
    strongest first."""

    adapter: str
    status: LearnStatus
    memory: MemoryStatus
    missing: int | None
    recent: list[Rated]
    likes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FirstSummary:
    """A summary of the first ratings for the user. likes: a sentence about the user's taste that the ratings
    show clearly; "": the ratings show nothing clearly. guess: a sentence about a taste that the ratings only
    suggest."""

    count: int  # the number of ratings and preferences
    likes: str
    guess: str


class Learning:
    """The adapters of one model, and the objects that train them. learner: the learner of the adapter in use;
    None: no adapter is in use."""

    def __init__(
        self, store: Store, model: Model, backend: Backend, settings: Settings, learn: bool,
        room: Room | None = None,
    ):  # fmt: skip
        """learn: False: store ratings (as examples for prompts and for later training), but never change
        weights. room: the memory that training can take; None: no limit."""
        self.room = room or EndlessRoom()
        self._store, self._model, self._backend, self._settings = store, model, backend, settings
        self._learns = learn
        self._summed_up: set[str] = set()  # names of the adapters whose `first_summary` was shown
        parse(settings.base_targets, model.shape, "base_targets")
        self.residency = Residency(
            self._load,
            lambda learner: learner.active.nbytes + learner.traces.nbytes,
            save=lambda learner: learner.traces.save(),
        )
        name = settings.adapter_name
        self.learner: Learner | None = self.residency.get(name) if name else None
        self._routing: Routing | None = None
        if settings.router:
            self._routing = Routing(store, model.fingerprint, settings.examples > 0)
        self._loops: Loops | None = None

    def _load(self, name: str) -> Learner:
        given = self._settings
        learner = open_learner(
            self._store, self._model, self._backend, name, self._learns,
            given.implicit_feedback, given.learn_targets, given.adapter_bits, given.micro_rank,
            given.layer_rank,
        )  # fmt: skip
        learner.room = self.room
        return learner

    @property
    def label(self) -> str | None:
        """Return the adapter in use and its version in the store, for example "default@3". Return None if no
        adapter is in use. After an undo, the learner has the weights of the earlier version until the next
        reply."""
        history = self.learner.history if self.learner else None
        return f"{history.name}@{history.version()}" if history else None

    def require_learner(self) -> Learner:
        """Return the learner of the adapter in use. Raises NotFound if no adapter is in use."""
        if self.learner is None:
            raise NotFound(
                "no adapter is in use, so nothing can be learned. Start without --adapter none, or choose an "
                "adapter: `/adapter default` in a chat, `ruvmlx adapters use default` elsewhere."
            )
        return self.learner

    def use(self, name: str | None) -> None:
        """Switch to another adapter (None: no adapter); the switch can be in the middle of a chat. The model
        stays loaded.

        Chats keep their KV caches if the adapters differ only at the output head. If the base LoRA differs,
        the model reads each chat again at its next turn.
        """
        if name is not None:
            _check_name(name)
        if name == "none":
            raise UsageError("an adapter cannot be called none; choose another name.")
        self.settle()
        self._close_loops()  # the background loops train the old adapter, so they must end
        before = self.learner.history.name if self.learner is not None else None
        if self.learner is not None:
            self.learner.release()
        if name is None:
            self.learner = None
            self._backend.set_lora(None)
        else:
            learner = self.residency.get(name)
            learner.sync()
            self.learner = learner  # after an error, the old adapter stays in use
        if name != before:
            facts = {"model": self._model.fingerprint, "adapter": name, "before": before}
            self._store.witness.note("use", facts)

    def of(self, name: str | None) -> Learner | None:
        """Return the learner of an adapter, with the adapter version that the store has now. name: None: the
        adapter in use; "": no adapter. The adapter in use does not change."""
        if not name:
            learner = self.learner if name is None else None
        elif self.learner is not None and self.learner.history.name == name:
            learner = self.learner
        else:
            _check_name(name)
            with preserve_lora(self._backend):
                learner = self.residency.load_beside(name)
        if learner is not None:
            with self.in_its_place(learner):
                learner.sync()
        return learner

    @contextlib.contextmanager
    def using(self, name: str | None) -> Iterator[Learner]:
        """Yield the learner of this adapter (None: of the adapter in use), with which the block can rate
        replies.
        Raises NotFound if `name` is None and no adapter is in use. If no adapter has this name, the learner
        is that of a new adapter. The adapter in use does not change."""
        learner = self.of(name) if name else self.require_learner()
        assert learner is not None
        with self.in_its_place(learner):
            yield learner

    def in_its_place(self, learner: Learner | None) -> AbstractContextManager[None]:
        """Allow this learner to install its base LoRA in the `with` block. After the block, the backend gets
        its earlier LoRA again, unless `learner` is the learner of the adapter in use."""
        return contextlib.nullcontext() if learner is self.learner else preserve_lora(self._backend)

    def is_measured_for(self, name: str | None) -> bool:
        """Return True if a rating by the learner of this adapter need not wait until the model is measured,
        or if no adapter is in use. name: as in `using`."""
        learner = self.of(name) if name else self.learner
        return learner is None or (learner.active.knows_model and learner.rating_index.is_measured)

    def measure_in_slices(self, name: str | None, watch: Watch = QUIET) -> Generator[None, None, None]:
        """Make the measurements of the model that its first rating needs. The generator yields about every
        SLICE seconds, so that the replies of other users go on (`Host.call_in_slices`). name: as in `using`.
        watch: an object that gets the progress."""
        while not self.is_measured_for(name):
            with contextlib.suppress(Stopped), self.using(name) as learner:
                pause = stop_after(SLICE)
                learner.rating_index.measure(pause)
                if not learner.active.knows_model:
                    learner.active.measure(pause, watch, is_hurried=True)
            yield

    def settle(
        self,
        cancel: threading.Event | None = None,
        watch: Watch | None = None,
        unseen: threading.Event | None = None,
    ) -> None:
        """Prepare the newest replies for a rating. The apps call this method while the user reads. watch:
        gets the progress if the model must be measured; None: measure nothing. With `cancel`, and if the user
        has rated a reply, the model then writes replies that nobody sees. The learner compares rated replies
        with these unseen replies (unshown.py), and uses the unseen replies to find out how to change the
        measured features of a reply (measure_directions.py).

        The call takes seconds after many replies, or if ratings change more than the output head. The work
        checks `cancel` every few tens of milliseconds. It ends if another process has locked the store. The
        next call, or the rating, does the remaining work.
        unseen: an event that ends the writing of unseen replies alone; None: `cancel` ends it
        """
        if self.learner is None:
            return
        with contextlib.suppress(Stopped, SideFailed, StoreBusy):
            self.learner.settle(stop_when(cancel) if cancel is not None else None, watch)
            if cancel is not None:
                self._write_unshown(self.learner, stop_when(unseen or cancel))
        if self._routing is not None:
            self._routing.of(self.learner).sync()

    def _write_unshown(self, learner: Learner, pause: Pause) -> None:
        """Let the model write replies that only the learning reads. They show which features of a rated reply
        are unusual, and which change of the weights moves each feature. Do nothing while the user has rated
        no reply."""
        if learner.history.labels():
            backend = worker(self._backend, SAMPLES)
            learner.taste.compare(self._model, backend, pause)
            if self._learns and learner.active.is_measured:
                learner.directions.complete(self._model, backend, learner.probe, pause)

    def notice(self, reply_id: str, what: str) -> bool:
        """Record that the user "copied", "regenerated", "edited" ... a reply (sona/signal.py).

        `what` names the action. Return True if the action was recorded. The action is recorded only if the
        setting `implicit_feedback` is on, an adapter is in use, and this model wrote the reply.
        """
        if self.learner is None:
            return False
        reply = self._store.replies.get(reply_id)
        return reply.fingerprint == self._model.fingerprint and self.learner.rating_index.record_implicit(
            reply, what
        )

    def state(self, recent: int = 8) -> LearningState:
        """Return the state of the adapter in use, with its newest ratings."""
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
        """Return a summary of the ratings, once for each adapter: after SUMMED_UP_AT ratings and preferences.
        Return None if there are fewer ratings and preferences than SUMMED_UP_AT, or if the first summary was
        shown already."""
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
        with contextlib.suppress(StoreError):  # the rating is stored; a later process shows a summary again
            log.note("summary", facts | {"likes": found.likes, "guess": found.guess})
        return found

    def ratings_in_use(self, reply_ids: Iterable[str]) -> dict[str, str | None]:
        """Return the ratings of these replies for the adapter in use (`Ratings.of_adapter`). Return {} if no
        adapter is in use."""
        learner = self.learner
        return self._store.ratings.of_adapter(learner.history.name, reply_ids) if learner else {}

    def forget_words(self) -> None:
        """Drop the questions and the features of replies in memory, and the traces of deleted replies
        (`Runtime.forget_words`)."""
        for learner in self._learners():
            learner.traces.forget_deleted()
            learner.rating_index.forget_questions()
            learner.taste.forget_features()

    def judge(self, learner: Learner | None) -> Judge | None:
        """Return a judge that scores replies by the ratings of an adapter. Return None if there is no
        adapter, or before the first rating. Return a `FailedJudge` if the fit of the taste model fails."""
        try:
            taste = learner.taste.model if learner is not None else None
        except Exception as error:  # noqa: BLE001 - the question still gets a reply
            return FailedJudge(error)
        return TasteJudge(taste) if taste is not None and taste.ratings else None

    # -- the router ----------------------------------------------------------------------------------

    def route(self, request: GenerationRequest) -> "Route | None":
        """Return the router's choice for a reply. Return None if the router is off or has only one choice."""
        if self._routing is None or self.learner is None:
            return None
        return self._routing.choose(self.learner, request)

    # -- training loops ------------------------------------------------------------------------------

    @property
    def loops(self) -> Loops:
        """Return the object that runs the slow loops (background or style loop, and deep loop), which train
        the adapter in use."""
        if self._loops is None:
            settings = self._settings
            self._loops = Loops(
                self.require_learner(), self._model, settings.slow_loop, settings.base_targets
            )
        return self._loops

    def is_due(self) -> bool:
        """Return True if there are enough new ratings for `consolidate`, or if the deep loop must run."""
        return self.learner is not None and self.loops.is_due()

    def consolidate(
        self,
        progress: Callable[[int, int, float], None] | None = None,
        cancel: threading.Event | None = None,
        settings: "Training | None" = None,
    ) -> dict[str, Any]:
        """Run the slow loops: they make a base LoRA from the ratings, which is used if it passes the
        promotion test. If the router is on, train it too. Returns a report.

        progress: a function of (training steps done, all training steps, loss). The work checks `cancel`
            every few tens of milliseconds. A stopped run continues at the next call, also in another process.
        """
        report = self.loops.consolidate(progress, cancel, settings)
        if self._routing is not None and not (cancel is not None and cancel.is_set()):
            report |= {"router": self._routing.of(self.require_learner()).train(cancel)}
        return report

    def close(self) -> None:
        """Save in the store the training runs that are stopped now, and what only the memory has of the
        adapters."""
        self._close_loops()
        for learner in self._learners():
            learner.traces.save()

    def _learners(self) -> list[Learner]:
        """Return the learners in memory. The learner of the adapter in use is also in memory if other
        adapters have evicted it."""
        return list(filter(None, [*self.residency.loaded_adapters(), self.learner]))

    def _close_loops(self) -> None:
        if self._loops is not None:
            self._loops.close()
        self._loops = None


def _check_name(name: str) -> None:
    """Raise UsageError if no adapter can have this name."""
    try:
        config.parse("adapter", name, "")
    except UsageError:
        rule = "has 1 to 64 letters, digits, - and _"
        raise UsageError(f"the name of an adapter {rule}, got {name[:80]!r}. Choose another name.") from None
