"""The background loop trains a base LoRA on the ratings together.

    loss = mean over replies of (-w mean log p - 0.1 [reward > 0] mean log p)
         + 0.5 mean over plain texts (texts without a rating) of KL(frozen || p)
         + the EWC penalty on changes to weights that earlier tasks depend on, if EWC is on (optional/ewc.py)

w is the reply's DRO weight (objective.py) at its current log-ratio to the frozen model. [reward > 0] is 1 for
a reward above 0, else 0. w shrinks as training changes the reply's probability; this shrinkage is DRO's
regulariser. The MicroLoRA (the small LoRA that ratings update) is active during the training. At the end, the
run moves the MicroLoRA's change into the base LoRA, except the push of the taste (taste_push.py) and a
remainder (fold_micro). The adapter uses the new base LoRA only if promotion.py promotes it.

A run consists of optimiser steps. A step computes the gradient of each of its texts in slices. A run can be
stopped between two slices. A slice takes some tens of milliseconds on the starter model. If the same process
resumes the run, the run continues after the last whole text (after a rating: the last whole step). If another
process resumes the run, the run continues after the last saved step. tests/sona/pauses.py times the slices.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import RuvmlxError
from ..kernels.micro import NotFinite
from ..lora import MicroLoRA
from ..lora.base_lora import BaseLoRA, Pair, Place
from ..lora.layer_lora import base_part, combine_loras, fold_layers, pack_adapter
from ..lora.merge import HEAD, fold_micro
from ..lora.targets import parse
from ..models.config.model import Model, missing_features
from ..pausing import MemoryRanOut, Pause, Stopped, stop_reason, stop_when
from ..settings import BASE_TARGETS
from ..store import HeadMoved
from ..training.accumulator import GradientAccumulator
from ..training.adamw import Training
from ..training.dropout import Masks, draw_masks, leave_out
from ..training.slices import TrainingText
from ..training.trainer import Trainer
from . import instant, replay
from .adapter_history import ATTEMPTS, MINIMUM
from .base_targets import GradientSizes, candidates, new_pair, probe_base
from .learner import Learner
from .promotion import Candidate, PromotionTest
from .replay import Buffer
from .training_weight import KeptWeight, coefficient

SCALE = 2.0  # alpha / rank of the trained base LoRA
HEAD_RANK = 8
SAVE_EVERY = 4  # the number of optimiser steps from one save of a run to the next


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of one training run. steps: the number of optimiser steps. lr: the learning rate, which
    rises over `warmup` steps and falls linearly towards a tenth of `lr`.

    A measurement compared settings by the mean stars of the starter model's replies to 60 held-out questions,
    after forty ratings by a user who likes short replies. The mean was 2.7 stars with the instant loop alone
    (in a weaker form than today's), 3.9 with 8 steps at a rate of 5e-4, and 3.5 with 15 steps at 3e-4.
    Training of only the upper half of the layers gave 3.1 to 3.2 stars (15 to 20 steps at 3e-4 to 6e-4).
    """

    steps: int = 12
    lr: float = 5e-4
    warmup: int = 3
    clip: float = 1.0
    rank: int = 8
    nll: float = 0.1
    kl: float = 0.5
    targets: str = BASE_TARGETS  # the matrices to train, in the form of the setting `base_targets`
    depth: float = 1.0  # the share of the layers to train, counted from the last layer
    minimum: int = MINIMUM
    dropout: float = 0.0  # the share of the inputs that each text leaves out; training/dropout.py
    ewc: float = 0.0  # the strength of the EWC penalty; optional/ewc.py says why the strength is 0

    def rate(self, step: int) -> float:
        fall = 1 - 0.9 * step / max(1, self.steps)
        return self.lr * min(1.0, (step + 1) / self.warmup) * fall


Progress = Callable[[int, int, float], None]  # (finished steps, all steps, loss or NaN before the first step)


class Background:
    """The background loop of one learner. Only the backend's thread can use this object."""

    def __init__(self, learner: Learner, model: Model, settings: TrainingSettings | None = None):
        self._learner, self._model = learner, model
        self.settings = settings or TrainingSettings()
        self._targets = parse(self.settings.targets, model.shape, "base_targets")
        self._sizes = GradientSizes()
        self._trainer: Trainer | None = None
        self._frozen: dict[TrainingText, np.ndarray] = {}  # the frozen model's hidden states of plain texts
        self._paused: Training | None = None
        self._anchors: Sequence[Any] = []
        self._standing: dict[Place, Pair] = {}  # pairs of the layers' matrices that the run does not train
        self._promotion: PromotionTest | None = None
        self._gradients = GradientAccumulator()  # the gradients of the current step, which can be stopped
        self._step_key: tuple[int, int] | None = None  # (training step, adapter version) of `_gradients`

    @property
    def is_paused(self) -> bool:
        """True if this object holds a stopped run, which the next `run` can resume."""
        return self._paused is not None

    def close(self) -> None:
        """Save a stopped run in the store, and free the graph that computes gradients."""
        if self._paused is not None:
            self._learner.history.put_training(self._paused.to_bytes())
        self._free()

    def _free(self) -> None:
        trainer, self._trainer = self._trainer, None
        self._frozen, self._paused, self._promotion, self._step_key = {}, None, None, None
        self._gradients.reset()
        self._sizes = GradientSizes()
        if trainer is not None:
            trainer.close()

    def run(self, progress: Progress | None = None, cancel: threading.Event | None = None) -> dict[str, Any]:
        """Train a base LoRA, test it, and promote or refuse it. Return a report, which says if the run was
        stopped or could not begin. Raises RuvmlxError if the loss is not finite."""
        learner, shape = self._learner, self._model.shape
        pause = learner.room.guard(stop_when(cancel))
        if not self._model.is_own:
            return _report(False, missing_features(shape))
        learner.sync()
        try:
            pause()
            known = learner.history, learner.rating_index, self._model.tokenizer, shape.max_context
            buffer = replay.load(*known, pause)
        except Stopped:
            return _report(False, "stopped before it began")
        replies, need = len(buffer.train) + len(buffer.held_out), max(3, self.settings.minimum)
        given = len(learner.history.pairs.trainable_versions())
        if given < need or replies < 3:
            reason = f"training needs {need} ratings or preferences; there are {given}"
            return _report(False, reason, examples=replies)
        started = time.perf_counter()
        report = self._attempt(buffer, progress, pause)
        return {"examples": replies, **report, "seconds": time.perf_counter() - started}

    def _attempt(self, buffer: Buffer, progress: Progress | None, pause: Pause) -> dict[str, Any]:
        learner, training = self._learner, None
        try:
            training = self._resumable_run(pause) or self._fresh(buffer, pause)
            self._paused = None
            given = (example.version for example in (*buffer.train, *buffer.held_out))
            training.facts["read"] = max(training.facts["read"], *given)
            promotion = self._promotion_test(buffer, pause)
            self._train(training, buffer, promotion, progress, pause)
            report = self._finish(training, promotion)
        except Stopped as stop:
            if training is None:
                return _report(False, stop_reason(stop, "stopped before it began"))
            self._paused = training  # `close` saves the run, because a save here would take too long
            if isinstance(stop, MemoryRanOut):
                self.close()
            done = f"stopped after {training.step} of {self.settings.steps} steps; the next run continues it"
            return _report(False, stop_reason(stop, done))
        finally:
            learner.active.install()
        self._free()
        return report

    # -- the start of a run --------------------------------------------------------------------------

    def _resumable_run(self, pause: Pause = lambda: None) -> Training | None:
        """Return the stopped run if two conditions hold; else None. The versions that the run has read led to
        the version in use. The settings, the base LoRA and the EWC anchors are those of the run."""
        history, state = self._learner.history, self._learner.state
        if (training := self._paused) is None:
            self._promotion = self._step_key = None
            if data := history.training():
                pause()
                training = Training.from_bytes(data, pause)
        if training is not None:
            facts = training.facts
            same = facts["settings"] == asdict(self.settings) and facts["base"] == state.base
            same = same and facts["anchors"] == self._anchor_ids()
            facts.setdefault("read", facts["version"])  # an older program stored no "read"
            if same and history.leads_to(facts["read"], state.version):
                return training
        self._paused = self._promotion = self._step_key = None
        return None

    def _promotion_test(self, buffer: Buffer, pause: Pause) -> PromotionTest:
        """Return the stopped promotion test if it uses the data of this run. If not, return a new test. The
        stopped step then begins again."""
        if self._promotion is None or self._promotion.buffer != buffer:
            self._promotion = PromotionTest(self._learner, buffer, pause)
            self._step_key = None  # the step that was stopped can have gradients of a deleted reply
        self._promotion.pause = pause
        return self._promotion

    def _fresh(self, buffer: Buffer, pause: Pause = lambda: None) -> Training:
        """Return a new run from the base LoRA in use. Matrices that this LoRA lacks start unchanged."""
        state, places = self._learner.state, self._places(buffer, pause)
        facts = {"version": state.version, "base": state.base, "settings": asdict(self.settings)}
        # "read": the newest version whose rating the run has read
        facts |= {"read": state.version, "frozen": {}, "anchors": self._anchor_ids()}
        return Training(self._start(state.version, places, pause), SCALE, facts=facts)

    def _places(self, buffer: Buffer, pause: Pause) -> list[Place]:
        """Return the places (module, layer) of the matrices to train."""
        found = candidates(self._targets, self._model.shape.n_layers, self.settings.depth)
        if not 0 < self._targets.top < len(found):
            return found
        trainer, examples = self._opened_trainer(pause), buffer.batch(self._learner.state.version, 0)[0]
        here = probe_base(self._model.config, self._learner.base, found)
        return self._sizes.strongest(trainer, here, examples, self._targets.top, pause)

    def _start(self, seed: int, places: Iterable[Place], pause: Pause) -> dict[Place, Pair]:
        """Return the LoRA pairs of the matrices `places` at step 0. For the same places and rank, the pairs
        depend only on the seed and the base LoRA in use."""
        old, rng, pairs = self._learner.base, np.random.default_rng(seed), dict[Place, Pair]()
        root = np.float32(np.sqrt(old.scale / SCALE)) if old else np.float32(1)
        for place in places:
            known = old.pairs.get(place) if old else None
            new = self._model.config, place, self.settings.rank, rng
            pairs[place] = (known[0] * root, known[1] * root) if known else new_pair(*new)
            pause()
        return pairs

    def _untrained_pairs(self, training: Training) -> dict[Place, Pair]:
        """Return the base LoRA's pairs that the run does not train, rescaled to the run's scale."""
        old = self._learner.base
        if old is None:
            return {}
        factor = np.float32(old.scale / training.scale)
        return {p: (a, b * factor) for p, (a, b) in old.pairs.items() if p not in training.pairs}

    def _anchor_ids(self) -> list[int]:
        """Return the ids of the EWC anchors (optional/ewc.py); an empty list if the EWC penalty is off."""
        return self._learner.anchors.ids() if self.settings.ewc else []

    # -- training ------------------------------------------------------------------------------------

    def _train(
        self,
        training: Training,
        buffer: Buffer,
        promotion: PromotionTest,
        progress: Progress | None,
        pause: Callable,
    ) -> None:
        if training.step >= self.settings.steps or not training.pairs:
            return
        self._opened_trainer(pause)
        self._standing = {p: pair for p, pair in self._untrained_pairs(training).items() if p != HEAD}
        self._anchors = self._learner.anchors.load() if self.settings.ewc else []
        if progress is not None:
            progress(training.step, self.settings.steps, math.nan)
        while training.step < self.settings.steps:
            self._accumulate(training, buffer, promotion, pause)
            try:
                loss = self._apply(training, pause)
            except NotFinite:
                self._free()
                # Delete the saved run, because the next run would resume from these broken weights.
                self._learner.history.put_training(None)
                raise RuvmlxError(
                    f"training stopped at step {training.step}: the loss is not finite. Nothing was changed."
                ) from None
            pause()
            if training.step % SAVE_EVERY == 0 and training.step < self.settings.steps:
                data = training.to_bytes()
                pause()
                self._learner.history.put_training(data, pause)
                pause()
            if progress is not None:
                progress(training.step, self.settings.steps, loss)

    def _opened_trainer(self, pause: Pause) -> Trainer:
        """Return the trainer with the base LoRA and the MicroLoRA in use. Make a trainer if there is none."""
        if self._trainer is None:
            self._learner.room.check()
            self._trainer = Trainer(self._model, backend=self._learner.backend, pause=pause)
        self._trainer.set_head(self._learner.base, self._learner.micro)
        pause()
        return self._trainer

    def _apply(self, training: Training, pause: Pause) -> float:
        """Do one optimiser step with the accumulated gradients, and return the step's loss."""
        given = training, self.settings.rate(training.step), self.settings.clip
        if not self.settings.ewc:
            return self._gradients.apply(*given, pause)
        penalty = self._learner.anchors.penalty(training.base, self._anchors, self.settings.ewc, pause)
        return self._gradients.apply_with_ewc(*given, penalty, pause)

    def _accumulate(
        self, training: Training, buffer: Buffer, promotion: PromotionTest, pause: Callable[[], None]
    ) -> None:
        """Add up the gradients of one step's texts. A stopped step resumes after its last whole text, or
        begins again if the adapter version has changed."""
        assert self._trainer is not None
        base, trainer, key = training.base, self._trainer, (training.step, self._learner.version)
        total = self._gradients
        if self._step_key != key:
            total.reset()
        self._step_key = key
        seed = training.facts["version"], training.step
        examples, texts = buffer.batch(*seed)
        frozen = training.facts["frozen"]
        promotion.frozen_logprobs(examples, frozen)
        for example in examples[total.pending :]:
            now = partial(coefficient, example, frozen[example.reply_id], self.settings.nll)
            push = KeptWeight(now, -1 / len(examples))
            whole, masks = self._masked_change(base, (*seed, total.pending))
            value, grads = trainer.reply(whole, example.text, push, pause)
            total.accumulate(push.last * value, leave_out(base_part(grads, base), masks))
            pause()
        for text in texts[max(0, total.pending - len(examples)) :]:
            if text not in self._frozen:
                self._frozen[text] = trainer.states(None, text, pause)
            hold = KeptWeight(lambda kl: self.settings.kl, 1 / len(texts))
            whole, masks = self._masked_change(base, (*seed, total.pending))
            value, grads = trainer.kl(whole, text, self._frozen[text], hold, pause)
            total.accumulate(hold.last * value, leave_out(base_part(grads, base), masks))
            pause()

    def _masked_change(self, base: BaseLoRA, seed: Sequence[int]) -> tuple[BaseLoRA, Masks]:
        """Return the model's whole change for one text, and the dropout's masks of the trained factors."""
        masks = draw_masks(base, self.settings.dropout, seed)
        trained = leave_out(base.pairs, masks)
        standing = BaseLoRA({**self._standing, **trained}, base.scale)  # untrained pairs stay active
        return combine_loras(standing, self._learner.state.layer_lora) or standing, masks

    # -- the end -------------------------------------------------------------------------------------

    def _candidate(self, training: Training, pause: Pause) -> Candidate:
        """Return a function f: f(share) keeps this share, 0 to 1, of the trained change. f returns the base
        LoRA with the layer LoRA and the MicroLoRA folded in, and a MicroLoRA with the push of the taste and
        the remainder."""
        start = self._start(training.facts["version"], training.pairs, pause)

        def at(share: float) -> tuple[BaseLoRA, MicroLoRA]:
            pairs = {place: _between(start[place], end, share) for place, end in training.pairs.items()}
            pause()
            # the output head's pair is among the untrained ones: background training never changes it
            pairs |= self._untrained_pairs(training)
            trained, most = BaseLoRA(pairs, training.scale), 2 * self.settings.rank
            base = fold_layers(trained, self._learner.state.layer_lora, most, pause)
            # The push of the taste stays in the MicroLoRA. If the base LoRA had the push, the base's KL would
            # leave the next push hardly any KL, and the next rating would take most of the push back.
            micro, tokens = self._learner.micro, self._learner.active.probe.tokens
            return fold_micro(base, micro, HEAD_RANK, instant.taste_part(micro, tokens))

        return at

    def _finish(self, training: Training, promotion: PromotionTest) -> dict[str, Any]:
        """Fold the MicroLoRA into the base LoRA, test the base, and promote or refuse it. If a rating is
        committed before the promotion, try again with the new MicroLoRA. After ATTEMPTS attempts, stop this
        run; the next call of `run` resumes it."""
        learner = self._learner
        for _ in range(ATTEMPTS):
            learner.sync()
            parent = learner.state
            in_force = learner.history.leads_to(training.facts["read"], parent.version)
            if parent.base != training.facts["base"] or not in_force:  # a rating that it read was undone
                learner.history.put_training(None)
                return _report(False, "the adapter was changed meanwhile; nothing was done")
            result = promotion.judge(self._candidate(training, promotion.pause), bool(training.pairs))
            report = {"steps": training.step, "matrices": len(training.pairs), **result.report}
            try:
                if not result.promoted:
                    learner.history.refuse(parent.version, report)
                    return report
                base, micro, layer_lora = result.ground.lora, result.micro, learner.state.layer_lora
                assert base is not None
                state = pack_adapter(micro, layer_lora and layer_lora.with_zero_b())
                found = state, result.kl, micro.norm, report
                version = learner.history.promote(parent.version, base, *found, promotion.pause)
                learner.active.remember(learner.history.base_of(version), result.ground)
                learner.sync()
                return report
            except HeadMoved:
                continue
        raise Stopped


def _between(start: Pair, end: Pair, share: float) -> Pair:
    a, b = (x + np.float32(share) * (y - x) for x, y in zip(start, end, strict=True))
    return a, b


def _report(promoted: bool, reason: str, **more: Any) -> dict[str, Any]:
    return {"promoted": promoted, "reason": reason, **more}
