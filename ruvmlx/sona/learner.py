"""This module holds the learner. The learner keeps traces of replies, and changes the adapter's weights by
ratings and preferences. A trace is the gradient of a reply's log-probability, usually recorded while the
model generates the reply. The learner commits a change of weights to the store together with the rating that
caused the change. The model uses the new weights only after the commit.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import TypeVar

from ..backends.base import Backend
from ..errors import AdapterMismatch, NotFound, RuvmlxError, UsageError
from ..kernels import micro as kernels
from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA
from ..lora.layer_lora import LayerLoRA, pack_adapter
from ..models.config.model import Model
from ..pausing import EndlessRoom, Pause, Room
from ..progress import QUIET, Watch
from ..ratings import BAD, REASONS, reason_of, with_reason
from ..store import HeadMoved, PreferenceRow, ReplyRow, Store
from . import instant, objective
from .active_adapter import ActiveAdapter
from .adapter_history import AdapterHistory, is_batch
from .evidence import Protect, update_by
from .faults import FaultBaseline
from .kl_probe import KLProbe
from .layer_part import LayerKLGuard, LayerPart
from .measure_directions import StoredDirections
from .rating_index import RatingIndex
from .reply_traces import ReplyTraces
from .state import CommittedUpdate, LearnerState, PreferenceResult, RatingResult
from .taste import TasteModel
from .taste_push import TastePush
from .trace import Trace, Weighed, mean_logprobs
from .user_taste import UserTaste
from .weight_anchors import WeightAnchors

_ATTEMPTS = 2  # the number of attempts to commit a rating before the learner takes the store's write lock
_NEVER_STORED = -1

T = TypeVar("T")
Ratings = Mapping[str, tuple[str, str]]  # {reply id: (rating, note)}


class Learner:
    """A learner runs the instant loop (the loop that updates weights at each rating) for one adapter on one
    model. `wiring.open_learner` makes a learner. Only the backend's thread can use a learner.

    active: the adapter in use
    layers: the optional part that lets ratings change layers below the output head
    guard: the function that scales down the changes of layers below the output head in idle time, if their
        KL exceeds its limit
    anchors: the optional part that penalises changes to weights that earlier tasks depend on
    taste: the model of the user's taste, fitted to the ratings and preferences in force
    learns: False if the learner records and indexes ratings, but never changes weights
    room: the memory that the slow loops of this learner can take
    """

    room: Room = EndlessRoom()

    def __init__(
        self, store: Store, model: Model, active: ActiveAdapter, rating_index: RatingIndex,
        layers: LayerPart, guard: LayerKLGuard, anchors: WeightAnchors, learns: bool = True,
    ):  # fmt: skip
        self._store, self._model, self.layers, self._learns = store, model, layers, learns
        self.active, self.rating_index, self.anchors = active, rating_index, anchors
        self.traces = ReplyTraces(store, active, layers, guard, learns)
        self.taste = UserTaste(active.history)
        self.directions = StoredDirections(store, model.fingerprint)
        self.fault_baseline = FaultBaseline(store, model.fingerprint)
        self.taste_push = TastePush(model.tokenizer, self.taste, self.directions)

    # -- the adapter in use --------------------------------------------------------------------------

    @property
    def history(self) -> AdapterHistory:
        return self.active.history

    @property
    def backend(self) -> Backend:
        return self.active.backend

    @property
    def state(self) -> LearnerState:
        return self.active.state

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def micro(self) -> MicroLoRA:
        return self.state.micro

    @property
    def base(self) -> BaseLoRA | None:
        return self.active.base

    @property
    def probe(self) -> KLProbe:
        return self.active.probe

    def sync(self) -> None:
        """If the store's adapter version in use is not the version in memory (for example after an undo),
        load that version. Then install its base and layer LoRA in the backend."""
        self.active.catch_up()
        self.active.install()

    def release(self) -> None:
        """Free the graph that computes gradients of layers. The next use builds the graph again."""
        self.layers.release()

    # -- traces --------------------------------------------------------------------------------------

    def trace(self, untouched: bool = False) -> Trace:
        """Return an empty trace for the next reply. untouched: True if the original model (adapter version 0)
        writes this reply."""
        if untouched:
            return Trace(self.active.load(0).micro, 0)
        return Trace(self.micro, self.version)

    def settle(self, pause: Pause | None = None, watch: Watch | None = None) -> None:
        """Compute what a rating of the newest replies needs (traces, statistics, embedded questions), so that
        the rating has less to compute. Store the traces and the embedded questions, also for other processes.
        The work takes seconds after many replies, or if ratings change more matrices than the output head.

        pause: a function that can raise an exception to stop the work; None: the user waits for this method
        watch: an object that gets the progress of a measurement of the model; None to measure no KL probe,
            and to skip the steps that need an unknown KL probe
        """
        if watch is not None:
            self.active.measure(pause, watch)
        self.traces.settle(pause)
        if self.active.knows_model:
            self.rating_index.settle(pause)
        if self.active.is_measured and self._pushes_taste(self.micro):
            self.taste_push.prepare(self.version, self.micro, self.probe, pause)
        if self.active.is_measured:
            self.traces.settle_by_model(pause)

    # -- ratings -------------------------------------------------------------------------------------

    def rate(self, reply_id: str, rating: str, note: str = "", watch: Watch = QUIET) -> RatingResult:
        """Update the weights by a rating, and commit both to the store. The effect of an earlier rating of
        the same reply is removed first, if `undo_steps` can remove it. A bad rating for wrong facts
        (ratings.FACTS) has the weight 0.

        watch: an object that gets the progress of the model's measurement; a rating of a model that was never
            measured waits for this measurement

        The weights and the stored ratings stay unchanged after an error, such as UsageError (an unknown
        rating), AdapterMismatch (another model's reply) or RuvmlxError (an update that is not finite).
        """
        started = time.perf_counter()
        rating = objective.check_rating(rating)
        reply = self.rateable(reply_id)
        self.active.measure(watch=watch, is_hurried=True)
        made = self.retry_commit(lambda: self.commit_ratings({reply.id: (rating, note)}))
        total_us = 1e6 * (time.perf_counter() - started)
        after, logprobs = made.after, self._logprobs(made.traces[0], made)
        return RatingResult(
            reply.id, rating, made.has_effect, made.apply_us, total_us, *logprobs, after.kl, instant.KL_CAP,
            after.micro.norm, after.version, reason_of(rating, note), made.replaced[0],
        )  # fmt: skip

    def retry_commit(self, attempt: Callable[[], T]) -> T:
        """Call `attempt`, which computes and commits an update, and return its result. If another process
        commits first, call `attempt` again. The last attempt holds the store's write lock from its start, so
        no other process can commit. Raises StoreBusy if the last attempt cannot get the lock."""
        for _ in range(_ATTEMPTS):
            with suppress(HeadMoved):
                return attempt()
        try:
            with self._store.transaction():
                return attempt()
        except BaseException:  # `attempt` can have changed the adapter in use before it failed
            self.active.reload()
            raise

    def commit_ratings(self, batch: Ratings, protect: Protect | None = None) -> CommittedUpdate:
        """Compute one update of the weights from all ratings in `batch`. Commit the ratings and weights in
        one transaction. Raises HeadMoved if another process commits first. protect: as in `update_by`"""
        self.active.catch_up()
        self.active.install_base()
        before, history = self.state, self.history
        ratings = [(self.rateable(id_), *rating_and_note) for id_, rating_and_note in batch.items()]
        replaced = [(history.reasons.rating_of(reply.id) or ("",))[0] for reply, *_ in ratings]
        steps = {step for reply, *_ in ratings for step in history.steps_of_reply(before.version, reply.id)}
        base = self.undo_steps(sorted(steps, key=itemgetter(1)))
        traces = [
            instant.judge_end(self.traces.of(reply, base), reason_of(rating, note), self.probe)
            for reply, rating, note in ratings
        ]
        weights = [self.weigh(*one, trace) for one, trace in zip(ratings, traces, strict=True)]
        taste = self.taste.model_after(ratings)
        pieces = [[piece] for piece in zip(traces, weights, strict=True)]
        what = "rating" if len(ratings) == 1 else "batch of ratings"
        new, apply_us = self.apply_feedback(base, pieces, what, protect, taste)
        signals = [
            self.rating_index.learning_signal(reply, rating)
            for reply, rating, note in ratings
            if reason_of(rating, note) != "facts"
        ]
        version = history.commit(
            before.version, [(id_, *batch[id_], w) for id_, w in zip(batch, weights, strict=True)],
            pack_adapter(new.micro, new.layer_lora), new.kl, new.micro.norm, [s.row() for s in signals],
        )  # fmt: skip
        self.active.state = replace(new, base=before.base, version=version)
        if taste is None:
            self.taste_push.note_rating(before.version, version)
        self.rating_index.add_ratings(signals, version)
        for id_ in batch.keys() - {signal.reply_id for signal in signals}:
            self.rating_index.bank.remove(id_)
        return CommittedUpdate(before, self.state, traces, apply_us, replaced)

    def give_reason(self, reply_id: str, reason: str) -> RatingResult:
        """Store why a user rated a reply bad (`reason`, a key of REASONS), as the beginning of the rating's
        note, and give the rating again with this note. If the old rating is the newest feedback, the old
        rating is undone first, so one undo later takes back both the rating and its reason.

        Raises UsageError for an unknown reason, or without a bad rating in force; also the errors of `rate`.
        """
        if reason not in REASONS:
            raise UsageError(f"a reason is {', '.join(REASONS)}; got {reason[:20]!r}.")
        given = self.history.reasons.rating_of(self.rateable(reply_id).id)
        if given is None or given[0] not in BAD:
            raise UsageError("a reason goes with a bad rating: down, 1 or 2. This reply has none.")
        rating, note, version = given
        if is_batch(self.history, version):
            raise UsageError("this rating was given together with others; take it back and rate again.")
        self.active.measure(is_hurried=True)  # in the transaction, other programs would wait for it
        try:
            with self._store.transaction():
                if version == self.history.version():
                    with suppress(NotFound):  # without the weights before it, `rate` adds to the rating
                        self.history.go_back(self.history.adapter(version).parent)
                return self.rate(reply_id, rating, with_reason(note, reason))
        except BaseException:
            self.active.reload()
            raise

    def prefer(self, better_id: str, worse_id: str, kind: str, strength: float = 1.0) -> PreferenceResult:
        """Update the weights by a preference between two replies to one question, and commit both to the
        store. The effect of an earlier preference between these replies is removed first, if `undo_steps`
        can remove it.

        kind: "compare", "regenerated" or "edit"; strength: 1 for a clear choice, else below 1 (PreferenceRow)

        Raises UsageError unless the ids name two replies to one question, and the errors of `rate`.
        """
        started = time.perf_counter()
        better, worse = self.rateable(better_id), self.rateable(worse_id)
        if better.id == worse.id:
            raise UsageError(f"a preference is between two replies; got {better.id} twice.")
        if better.prompt != worse.prompt:
            raise UsageError("a preference is between replies to one question; these answer two.")
        self.active.measure(is_hurried=True)
        made = self.retry_commit(lambda: self.commit_preference(better, worse, kind, strength))
        total_us = 1e6 * (time.perf_counter() - started)
        after, (high, low) = made.after, [self._logprobs(trace, made) for trace in made.traces]
        return PreferenceResult(
            better.id, worse.id, kind, strength, made.has_effect, made.apply_us, total_us,
            high[0] - low[0], high[1] - low[1], after.kl, instant.KL_CAP, after.micro.norm, after.version,
        )  # fmt: skip

    def commit_preference(
        self, better: ReplyRow, worse: ReplyRow, kind: str, strength: float
    ) -> CommittedUpdate:
        """Update the weights by a preference, and commit both. HeadMoved: another process commits first."""
        self.active.catch_up()
        self.active.install_base()
        before = self.state
        base = self.undo_steps(self.history.pairs.steps(before.version, better.id, worse.id))
        traces = [self.traces.of(reply, base) for reply in (better, worse)]
        weights = 0.0, 0.0
        if self._learns and better.teaches and worse.teaches:
            praise, blame = objective.pair_weights(strength, *(trace.log_ratio for trace in traces))
            weights = praise, blame * traces[1].importance
        new, apply_us = self.apply_feedback(base, [[*zip(traces, weights, strict=True)]], "preference")
        row = PreferenceRow(better.id, worse.id, kind, strength, weights[0] - weights[1])
        state = pack_adapter(new.micro, new.layer_lora)
        version = self.history.pairs.commit(before.version, row, state, new.kl, new.micro.norm)
        self.active.state = replace(new, base=before.base, version=version)
        self.taste_push.note_rating(before.version, version)
        return CommittedUpdate(before, self.state, traces, apply_us)

    def rateable(self, reply_id: str) -> ReplyRow:
        """Return the stored reply with this id. Raises AdapterMismatch if another model wrote the reply, and
        NotFound if the store has no reply with this id."""
        reply = self._store.replies.get(reply_id)
        if reply.fingerprint != self._model.fingerprint:
            name = f" {reply.model}" if "/" in reply.model else ""  # a file's name finds no file
            raise AdapterMismatch(
                f"{reply.model} wrote that reply, so only that model can learn from the rating. Open it "
                f"in a chat by `/model{name}`, for a command by --model and its name, folder or file."
            )
        return reply

    def undo_steps(self, steps: list[tuple[int, int]]) -> LearnerState:
        """Return the weights in use without the effect of the updates in `steps`. The effect of an update
        stays if a consolidation (a run of the background or style loop) replaced the base LoRA after it, if
        several ratings made the update together (RatingBatch), or if the store no longer has its weights.

        steps: (adapter version before, adapter version after) of each update, the oldest first
        """
        state = self.state
        if not self._learns:
            return state
        steps = [step for step in steps if not is_batch(self.history, step[1])]
        # To take back the newest update, load the weights of the version before the update.
        with suppress(NotFound):  # of an adapter's copy, the store keeps few versions
            while steps and steps[-1][1] == state.version:
                state = self.active.load(steps[-1][0])
                steps.pop()
        for version_before, version_after in reversed(steps):  # a later one took an earlier one back
            with suppress(NotFound):  # without these weights, the effect of this update stays
                before, after = self.active.load(version_before), self.active.load(version_after)
                if before.base == state.base:
                    taken = instant.without_update(state.micro, before.micro, after.micro, self.probe)
                    layers = self.layers.layers_without(state, before, after, self.active.probed_base.probe)
                    kl = max(0.0, taken.kl + self.layers.added_kl(layers))
                    state = LearnerState(taken.adapter, state.base, _NEVER_STORED, kl, layers)
        return state

    def weigh(self, reply: ReplyRow, rating: str, note: str, trace: Trace) -> float:
        """Return the weight, -1 to 1, with which a rating of this reply changes the weights; 0 for a bad
        rating for wrong facts (ratings.FACTS)."""
        if reason_of(rating, note) == "facts":
            return 0.0
        r, value = self.rating_index.reward_and_value(reply, rating)
        learns = self._learns and reply.teaches
        w = objective.dro_weight(rating, r, value, trace.log_ratio) if learns else 0.0
        return w * trace.importance if w < 0 else w

    def apply_feedback(
        self, base: LearnerState, pieces: Sequence[Weighed], what: str, protect: Protect | None = None,
        taste: TasteModel | None = None,
    ) -> tuple[LearnerState, float]:  # fmt: skip
        """Return the state after one update by some ratings or preferences (`base` itself if nothing
        changes), and the duration of the update in microseconds.

        pieces: for each rating or preference, the traces and weights of its replies
        what: the kind of feedback, for the error message; protect: as in `update_by`
        taste: the taste model of the push; None for the taste of the ratings so far
        """
        self.probe.prepare()
        pushes = [[self._push(trace, weight) for trace, weight in piece] for piece in pieces]
        started = time.perf_counter()
        try:
            layers, micro = self._layers_after(base, pieces), base.micro
            more, push = self.layers.added_kl(layers), None
            if self._pushes_taste(micro):
                push = self.taste_push.of(self.version, micro, self.probe, taste)
            if self.layers.targets.head:
                update = update_by(micro, pushes, self.probe, base.kl, max(0.0, more), push, protect)
            else:
                update = instant.update_trend(micro, [*chain.from_iterable(pushes)], self.probe.floor)
            # A rating that teaches nothing can replace a rating with a reason. The old reason then no longer
            # counts, so the push changes.
            if update is None and taste and push is not None:
                update = instant.rescale_to_caps(micro, self.probe, push)
        except kernels.NotFinite as e:
            raise RuvmlxError(
                f"the {what} was not applied: the update is not finite ({e}). The adapter is unchanged."
            ) from e
        apply_us = 1e6 * (time.perf_counter() - started)
        if update is None:
            return base, apply_us
        kl = max(0.0, update.kl + more)
        micro = update.adapter.rounded_copy()  # rounded weights take fewer bytes in the store
        return LearnerState(micro, base.base, _NEVER_STORED, kl, layers), apply_us

    def _pushes_taste(self, micro: MicroLoRA) -> bool:
        """Return True if the taste model changes this adapter's weights. The taste model changes only
        adapters with the calibrated lora_a. Another lora_a's first column does not necessarily distinguish
        replies from prose."""
        return self._learns and self.layers.targets.head and self.probe.reads(micro)

    def _push(self, trace: Trace, weight: float) -> instant.ReplyPush:
        stats = trace.stats or instant.prepare_stats(trace, self.probe)
        return instant.ReplyPush(stats, weight, trace.log_ratio)

    def _layers_after(self, state: LearnerState, pieces: Sequence[Weighed]) -> LayerLoRA | None:
        for piece in pieces:
            layers = self.layers.update(state, piece, self.active.probed_base.probe)
            state = replace(state, layer_lora=layers)
        return state.layer_lora

    def _logprobs(self, trace: Trace, made: CommittedUpdate) -> tuple[float, float]:
        """Return the reply's mean log-probability per token (nats) before and after an update. The result
        is exact for a MicroLoRA. It is a first-order estimate for a layer LoRA."""
        states = made.before, made.after
        means = mean_logprobs(trace, [state.micro for state in states], self.backend.head, made.after.base)
        before, after = (self.layers.logprob_shift(trace, state) for state in states)
        return means[0] + before, means[1] + after
