"""This module tries the values of one knob on stored replies, and says whether one of them is worth
keeping."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..engine import LLMInferenceEngine
from ..pausing import Pause
from ..store import Store
from .knobs import Knob
from .replay import LEAST_REPLY, ROUNDS, Clock, Comparison, ReplyReplay, StoredTokens, compare

GAIN = 1.05  # a value is kept if it makes replies faster by at least this factor
WINS = 0.75  # a value is kept if replies are faster in at least this share of the rounds
REPLIES = 2  # the number of stored replies on which a knob is tried
_LOOK_AT = 20  # the number of newest replies among which the trial looks for long ones
BATCH_STEPS = 6  # the number of tokens that each copy of a reply writes in the trial of the batch


class NothingToReplay(Exception):
    """There is no stored reply that is long enough for a trial."""


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial. value: the value to keep in force; equal to `before` if none was better.

    measured_before, measured_after: tokens per second with the value `before`, and with the best other value
    best: the best other value
    """

    before: str
    value: str
    best: str
    measured_before: float
    measured_after: float
    why: str
    candidates: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_better(self) -> bool:
        return self.value != self.before


def replays(store: Store, engine: LLMInferenceEngine, pause: Pause, clock: Clock) -> list[ReplyReplay]:
    """Return the newest long replies of the model, ready to be decoded again. Raises NothingToReplay."""
    found: list[ReplyReplay] = []
    for prompt, reply in store.replies.newest_tokens(engine.model.fingerprint, LEAST_REPLY, _LOOK_AT):
        if len(found) < REPLIES and prompt:
            found.append(ReplyReplay(engine, StoredTokens(prompt, reply), pause, clock))
    if not found:
        raise NothingToReplay
    return found


def try_knob(knob: Knob, current: str, known: Sequence[ReplyReplay]) -> TrialResult:
    """Try all values of a knob in turns, then the best one again. Only the second measurement decides: the
    best of several values looks faster than it is. Afterwards the value `current` is in force."""
    values = [current, *(value for value in knob.values() if value != current)]
    try:
        found = compare(known, values, knob.apply)
        best = max(found, key=lambda one: one.gain)
        if best.gain >= GAIN:
            best = compare(known, [current, best.value], knob.apply, 2 * ROUNDS)[0]
    finally:
        knob.apply(current)
    is_better = best.gain >= GAIN and best.wins >= WINS
    return TrialResult(
        current, best.value if is_better else current, best.value,
        best.before, best.after, _gain_words(best), [asdict(one) for one in found],
    )  # fmt: skip


def _gain_words(best: Comparison) -> str:
    return (
        f"with {best.value}, replies have {best.gain - 1:+.0%} tokens per second and win {best.wins:.0%} of "
        f"the rounds; {GAIN - 1:.0%} and {WINS:.0%} are needed"
    )


def try_batch(knob: Knob, current: str, replay: ReplyReplay, most: int) -> TrialResult:
    """Find the smallest batch that writes nearly as many tokens per second as the best batch. In a larger
    batch, each reply is slower and nobody gains. most: the largest batch for which memory has room."""
    widths = [int(value) for value in knob.values() if int(value) <= min(most, int(current))]
    speeds = {width: replay.speed_together(width, BATCH_STEPS) for width in widths}
    largest, enough = max(widths), max(speeds.values()) / GAIN
    best = min(width for width, speed in speeds.items() if speed >= enough)
    before, after = speeds[largest] / largest, speeds[best] / best
    is_better = best < largest and after >= GAIN * before
    return TrialResult(
        current, str(best) if is_better else current, str(best), before, after,
        f"{best} at a time write {speeds[best]:.0f} tokens per second together, {largest} at a time "
        f"{speeds[largest]:.0f}",
        [{"value": str(width), "together": speed} for width, speed in speeds.items()],
    )  # fmt: skip
