"""This module is the style loop. After new ratings, the style loop sets the base LoRA to a combination of the
directions d_k of the style basis (style_basis.py).
    base = s sum_k beta_k d_k

The coefficients beta_k follow (style_choice.py) from the ratings in force (the ratings that were not taken
back). So the loop trains nothing, and an undo restores the earlier coefficients. The scale s is about as
large as the confidence in the taste allows, within three limits. The limits of s are for the KL to the
original model, for the perplexity of prose, and for faults in replies to questions that no user rated
(faults.py). The running backend measures the KL, the perplexity and the faults. The taste model must also
predict clearly more stars for these replies than for replies without the style. The MicroLoRA (the LoRA that
the instant loop updates at each rating) stays active. The MicroLoRA is scaled to the part of the KL cap that
the base LoRA does not use.

If the adapter has another base LoRA (from the background loop, or imported), the style is added to this base
LoRA.
"""

import math
import threading
import time
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from ...lora.base_lora import BaseLoRA
from ...lora.layer_lora import pack_adapter
from ...models.config.model import Model, missing_features
from ...models.text import thinking
from ...pausing import Pause, Stopped, stop_reason, stop_when
from ...store import HeadMoved
from .. import faults, instant
from ..adapter_history import ATTEMPTS, MINIMUM, STYLE_DUE
from ..faults import Faults
from ..kl_probe import KLProbe
from ..learner import Learner
from ..sampled_replies import SampledReply
from ..state import ProbedBase
from ..taste_features import ReplyFeatures, features_of
from ..taste_push import END_KL
from .style_basis import StyleBasis, sum_of_bases, trained_part
from .style_choice import DOUBT, StyleChoice, agreement
from .style_scale import STEPS, TRIES, USED, MeasuredBase, ScaleSearch, UsedStyle, smaller_share
from .style_source import BasisSource

# The base's maximum KL at a confidence of 1, nats per token. The MicroLoRA has the rest of the cap on the KL
# (KL_CAP of instant.py). With a larger part for the base, simulated users preferred the replies less often
# (docs/studies.md).
KL = 0.08
# The loop uses no style if `agreement` is below -DISAGREEMENT. With 8 to 30 ratings, chance alone often makes
# `agreement` negative.
DISAGREEMENT = 2.0
UNDERSHOOT = 1.5  # the found s is usually so many times the s that the basis's own KL (`StyleBasis.kl`) gives
PARTS = TRIES + len(STEPS) + 2  # the maximum number of parts of a step, for the progress
# A step near the style in use takes the replies without a style from an earlier step, until the user has
# given this number of new ratings.
REUSED_FOR = 2 * STYLE_DUE
NAME = "style"  # the name of this loop in reports
UNCLEAR = "it is not clear that replies to other questions would please you more"

Progress = Callable[[int, int, float], None]
T = TypeVar("T")


@dataclass(frozen=True)
class _Candidate:
    """A base LoRA and a MicroLoRA that could be used together.

    scale: the scale s of the style; 0 without a style
    ground: the base LoRA with the KL probe under it
    update: the MicroLoRA, which is scaled to the caps
    """

    scale: float
    ground: ProbedBase
    update: instant.Update


@dataclass(frozen=True)
class _Tested:
    """A style that was tested at a share of the largest scale.

    gain, doubt: the predicted gain in stars over replies without the style, and its standard deviation
    loss: the share of the variety that the replies lost
    refusal: the reason why the style is not used; "" if it can be used
    """

    found: MeasuredBase
    share: float
    candidate: _Candidate
    gain: float
    doubt: float
    loss: float
    refusal: str


class StyleLoop:
    """The style loop of one learner. Only the backend's thread can use this object."""

    def __init__(self, learner: Learner, model: Model):
        self._learner, self._model = learner, model
        self._source = BasisSource(learner, model)
        # of the last step that wrote replies without a style: (number of ratings, features of these replies)
        self._without: tuple[int, list[ReplyFeatures]] | None = None
        # The measurements of a stopped step, {(name, scale s): result}. The next step uses them if it begins
        # with the same `_start`: the adapter's version and the coefficients.
        self._measured: dict[tuple[str, float], Any] = {}
        self._start: tuple[int, bytes] | None = None

    def run(self, progress: Progress | None = None, cancel: threading.Event | None = None) -> dict[str, Any]:
        """Compute a base LoRA from the ratings in force, test it, and use it if it is within the limits. If
        the ratings show no style, remove the style in use. Return a report."""
        learner, started = self._learner, time.perf_counter()
        if not self._model.is_own:
            return _report(False, missing_features(self._model.shape))
        try:
            report = self._run(progress or (lambda *_: None), learner.room.guard(stop_when(cancel)))
        except Stopped as stop:
            return _report(False, stop_reason(stop, "stopped; the next run continues it"))
        finally:
            learner.active.install()
        return report | {"seconds": time.perf_counter() - started}

    def _run(self, progress: Progress, pause: Pause) -> dict[str, Any]:
        learner = self._learner
        for _ in range(ATTEMPTS):
            learner.sync()
            pause()
            given = learner.taste.model.ratings
            if given < MINIMUM:
                return _report(False, f"a style needs {MINIMUM} rated replies; there are {given}")
            basis = self._source.basis(progress, pause)
            learner.taste.compare(self._model, learner.backend, pause)
            try:
                report = self._step(basis, progress, pause)
            except HeadMoved:
                continue
            self._measured = {}
            return report
        raise Stopped

    def _measure_once(self, name: str, scale: float, measure: Callable[[], T]) -> T:
        """Return the result of `measure`, or the result that a stopped step has kept.

        name, scale: what is measured, and the scale s of the style
        """
        if (name, scale) not in self._measured:
            self._measured[name, scale] = measure()
        return cast(T, self._measured[name, scale])

    # -- one step ------------------------------------------------------------------------------------

    def _step(self, basis: StyleBasis, progress: Progress, pause: Pause) -> dict[str, Any]:
        learner, parent = self._learner, self._learner.state
        choice = StyleChoice.of(learner.taste.model, basis, self._end_kl / END_KL)
        start = parent.version, choice.coefficients.tobytes()
        if start != self._start:
            self._start, self._measured = start, {}
        agreed = agreement(*learner.taste.evidence())
        pause()
        facts: dict[str, Any] = {"loop": NAME, "confidence": choice.confidence, "agreement": agreed}
        if choice.confidence == 0 or agreed < -DISAGREEMENT:
            return self._without_style("your ratings do not agree on a style yet", facts, pause)
        progress(0, PARTS, math.nan)
        used = self._last_used()
        start_near = used.next_start(self._wanted_kl(choice)) if used else None
        found = self._within_limits(basis, choice, start_near, progress, pause)
        if found is None:
            return self._refuse("no change along the style basis stays within the limits", facts)
        is_near = start_near is not None
        tested = self._shrunk(basis, choice, found, is_near, progress, pause)
        found, styled = tested.found, tested.candidate
        if tested.share < 1 and not tested.refusal:
            found = self._at(basis, choice, found.scale, pause)
            styled = replace(styled, ground=found.ground, update=self._update(found.ground.probe))
        facts |= {"ppl_change": math.expm1(found.rise), "scale": found.scale, "share": tested.share}
        facts |= {"gain": tested.gain, "gain_deviation": tested.doubt}
        facts |= {USED: asdict(used)} if used else {}
        if tested.refusal:
            return self._without_style(tested.refusal, facts, pause)
        predicted = found.scale**2 * basis.kl(choice.coefficients)
        facts[USED] = asdict(UsedStyle.of(predicted, found, tested.loss, tested.share))
        reason = f"a style from your {learner.taste.model.ratings} ratings"
        return self._promote(parent.version, styled, facts, reason)

    def _shrunk(
        self, basis: StyleBasis, choice: StyleChoice, largest: MeasuredBase, is_near: bool,
        progress: Progress, pause: Pause,
    ) -> _Tested:  # fmt: skip
        """Test the style at shares of the largest scale, each smaller than the one before, until there is no
        next share. Return the result of the smallest share that passed; if none passed, the last result.
        is_near: True if the step began near the style in use. The step then accepts a small loss of variety,
        and the next step makes the style smaller. The step can also use older replies without a style."""
        plain, share, good = self._plain_features(is_near, pause), STEPS[0], None
        for tried in range(len(STEPS) + 1):
            progress(TRIES + 1 + tried, PARTS, math.nan)
            found = largest if share == 1 else self._smaller(basis, choice, largest, share, pause)
            candidate = _Candidate(found.scale, found.ground, self._update(found.ground.probe))
            replies = self._replies(candidate, pause)
            gain = self._learner.taste.model.predict_gain(self._features(replies), plain)
            is_clear = gain[0] > DOUBT * gain[1]
            words, loss = self._worse(replies, choice.likes_longer, pause) if is_clear else (UNCLEAR, 0.0)
            tested = _Tested(found, share, candidate, *gain, loss, words)
            good = good if words else tested
            # a smaller style gains less, so no smaller share is tried after an unclear gain
            share = smaller_share(share, bool(words), 0.0 if is_near else loss) if is_clear else 0.0
            if share == 0:
                break
        return good or tested

    def _without_style(self, reason: str, facts: dict[str, Any], pause: Pause) -> dict[str, Any]:
        """Remove the style of earlier ratings if there is one."""
        if not self._has_style:
            return self._refuse(reason, facts)
        plain = self._plain(pause)
        return self._promote(self._learner.version, plain, facts | {"has_style": False}, reason)

    def _plain_features(self, may_reuse: bool, pause: Pause) -> list[ReplyFeatures]:
        """Return the features of the replies without a style. may_reuse: True if the step can use the replies
        of an earlier step. The model wrote these replies with the MicroLoRA of that time."""
        ratings, known = len(self._learner.history.labels()), self._without
        has_trained_base = self._trained_base is not None  # its replies are not kept, because it can change
        if known and may_reuse and not has_trained_base and 0 <= ratings - known[0] <= REUSED_FOR:
            return known[1]
        features = self._features(self._replies(self._plain(pause), pause))
        self._without = None if has_trained_base else (ratings, features)
        return features

    def _plain(self, pause: Pause) -> _Candidate:
        """Return the model without a style."""
        active, trained = self._learner.active, self._trained_base
        if trained is None:
            ground = ProbedBase(BaseLoRA({}), active.frozen_probe)
        else:
            ground = self._measure_once("probe", 0.0, partial(active.probe_base, trained, pause))
        return _Candidate(0.0, ground, self._update(ground.probe))

    def _replies(self, candidate: _Candidate, pause: Pause) -> list[SampledReply]:
        """Return the candidate's replies to the questions of faults.py, which no user rated."""
        learner, adapter = self._learner, candidate.update.adapter
        with learner.active.install_for(candidate.ground.lora):
            sample = partial(faults.sample, self._model, learner.backend, adapter, pause)
            return self._measure_once("replies", candidate.scale, sample)

    def _features(self, replies: list[SampledReply]) -> list[ReplyFeatures]:
        """Return the features of replies to the questions of faults.py. The taste model needs these features
        to predict the stars of the replies."""
        decode = self._model.tokenizer.decode
        return [
            features_of(question, thinking.split(decode(ids)).answer, ended)
            for question, (ids, ended) in zip(faults.questions(), replies, strict=True)
        ]

    def _update(self, probe: KLProbe) -> instant.Update:
        """Return the MicroLoRA, scaled to the caps under a base LoRA. probe: the KL probe under this base"""
        micro = self._learner.micro
        return instant.rescale_to_caps(micro, probe, self._learner.taste_push.compute(micro, probe))

    def _within_limits(
        self, basis: StyleBasis, choice: StyleChoice, start_near: tuple[float, float] | None,
        progress: Progress, pause: Pause,
    ) -> MeasuredBase | None:  # fmt: skip
        """Search the largest scale s within the limits of KL and perplexity. Return the measured base LoRA
        with this scale. Return None if the search finds no scale. start_near: a result of
        `UsedStyle.next_start`"""
        wanted = self._wanted_kl(choice)
        search = ScaleSearch(
            lambda scale: self._at(basis, choice, scale, pause),
            lambda scale: self._measure_kl(basis, choice, scale, pause),
            wanted,
        )
        prediction, enough = start_near or (UNDERSHOOT**2 * wanted, None)
        first = math.sqrt(prediction / max(basis.kl(choice.coefficients), 1e-12))
        return search.run(first, lambda measured: progress(1 + measured, PARTS, math.nan), enough)

    def _wanted_kl(self, choice: StyleChoice) -> float:
        """Return the limit of the base's KL, nats per token: the KL for this confidence, less the KL of
        end-of-reply tokens, because these end replies best."""
        whole = KL * choice.confidence
        return max(whole / 4, whole - self._end_kl)

    def _last_used(self) -> UsedStyle | None:
        """Return the measurements of the last style that a step used; None if no step used a style. A later
        step can have removed this style."""
        base = self._learner.state.base
        return UsedStyle.of_report(self._learner.history.base_report(base)) if base else None

    @property
    def _end_kl(self) -> float:
        """The KL of the whole change of end-of-reply tokens, nats per token."""
        return self._learner.taste_push.end_kl(self._learner.micro, self._learner.active.frozen_probe)

    def _measure_kl(self, basis: StyleBasis, choice: StyleChoice, scale: float, pause: Pause) -> float:
        base = self._base_at(basis, choice, scale)
        return self._measure_once("KL", scale, partial(self._learner.active.kl_of_base, base, pause))

    def _base_at(self, basis: StyleBasis, choice: StyleChoice, scale: float) -> BaseLoRA:
        return sum_of_bases(self._trained_base, basis.lora(choice.coefficients * scale))

    def _at(self, basis: StyleBasis, choice: StyleChoice, scale: float, pause: Pause) -> MeasuredBase:
        base = self._base_at(basis, choice, scale)
        probe = partial(self._learner.active.probe_base, base, pause)
        return MeasuredBase(scale, self._measure_once("probe", scale, probe))

    def _smaller(
        self, basis: StyleBasis, choice: StyleChoice, largest: MeasuredBase, share: float, pause: Pause
    ) -> MeasuredBase:
        """Return the base LoRA at a share below 1 of a measured scale. If the base LoRA is a style alone, the
        function measures nothing. It calculates the KL probe from the measured one: the KL is about
        proportional to share^2, and the rise of prose to share."""
        scale = share * largest.scale
        if self._trained_base is not None:
            return self._at(basis, choice, scale, pause)
        probe = copy(largest.ground.probe)
        probe.floor, probe.rise = share**2 * probe.floor, share * probe.rise
        return MeasuredBase(
            scale, ProbedBase(self._learner.active.convert(self._base_at(basis, choice, scale)), probe)
        )

    @property
    def _has_style(self) -> bool:
        base = self._learner.state.base
        report = self._learner.history.base_report(base) if base else {}
        return report.get("loop") == NAME and bool(report.get("has_style", True))

    @property
    def _trained_base(self) -> BaseLoRA | None:
        """Return the base LoRA in use without the style of earlier ratings; None if nothing remains."""
        base = self._learner.base
        if base is not None and self._has_style:
            return trained_part(base)
        return base if base is not None and base.pairs else None

    # -- faults --------------------------------------------------------------------------------------

    def _worse(self, replies: list[SampledReply], may_be_longer: bool, pause: Pause) -> tuple[str, float]:
        """Compare replies with the original model's replies to the same questions, which no user asked.
        Return (a fault that the replies have more often, "" if there is none; the share of the variety that
        is lost). may_be_longer: see `Faults.worse_than`"""
        tokenizer = self._model.tokenizer
        plain = self._learner.fault_baseline.sample(self._model, self._learner.backend, pause)
        usual, now = (Faults.of(found, plain, tokenizer) for found in (plain, replies))
        worse = now.worse_than(usual, may_be_longer)
        return (f"replies to other questions had more faults: {worse}" if worse else ""), 1 - now.variety

    # -- the end -------------------------------------------------------------------------------------

    def _promote(
        self, parent: int, candidate: _Candidate, facts: dict[str, Any], reason: str
    ) -> dict[str, Any]:
        learner, ground, update = self._learner, candidate.ground, candidate.update
        report = _report(True, reason, **facts, kl=update.kl)
        assert ground.lora is not None
        state, micro = pack_adapter(update.adapter, learner.state.layer_lora), update.adapter
        version = learner.history.promote(parent, ground.lora, state, update.kl, micro.norm, report)
        learner.active.remember(learner.history.base_of(version), ground)
        learner.sync()
        return report

    def _refuse(self, reason: str, facts: dict[str, Any]) -> dict[str, Any]:
        report = _report(False, reason, **facts)
        self._learner.history.refuse(self._learner.version, report, ends_run=False)
        return report


def _report(promoted: bool, reason: str, **more: Any) -> dict[str, Any]:
    return {"promoted": promoted, "reason": reason, **more}
