"""This module finds the scale s of a style (style_loop.py): about the largest s within the limits of KL and
perplexity.

A whole measurement of a base LoRA reads all of the reference text. The KL alone needs only the answers, which
take a third of the time. So the search finds the s of the wanted KL with the answers, and the whole
measurement then checks the perplexity of prose.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

from ..instant import RISE_CAP
from ..promotion import ROOM
from ..state import ProbedBase

RISE = ROOM * RISE_CAP  # the maximum rise of the mean negative log-likelihood of prose, nats/token
TRIES = 4  # the search measures at most this number of base LoRAs
KL_TRIES = 5  # the maximum number of measurements of the KL alone
AIM = 0.9  # the search aims at this share of the wanted KL
MIN_SHRINK = 0.05  # after a measurement over a limit (or not finite), s keeps at least this share
MAX_GROWTH = 4.0  # the maximum factor from one s to the next
CLOSE_ENOUGH = 0.8  # the search ends if s is this share of the estimated largest s within the limits
KL_CLOSE_ENOUGH = 0.9  # the same for the measurements of the KL alone
# The KL is about proportional to s ** 2 for a small s, and to a higher power for a large s.
POWER, MIN_POWER, MAX_POWER = 2.0, 1.5, 4.0
# shares of s that the loop tries in turn, until replies have no more faults than the original model's.
# The replies must also have clearly more predicted stars than replies without the style. "Clearly": the gain
# in stars minus DOUBT standard deviations is above 0 (docs/studies.md).
STEPS = (1.0, 0.7, 0.4)
# If the replies lose more than this share of the variety of the original model's replies, the loop tries a
# smaller s. The loss is about proportional to s, so this share divided by the loss gives the smaller s.
VARIETY_LOSS = 0.04
# With the same coefficients, this is the maximum factor from one step's s to the next, up and down.
NEXT_GROWTH = 1.25
# If the limits and the variety allow a larger factor from the last step's s, the search is as in a first
# step. The search also goes on if a measured s leaves FAR times the room that was expected.
FAR = 2.0
USED = "used"  # the name of the measurements of the style in use in a step's report
CLOSE_SHARE = 0.95  # a share that is not below this part of the measured one is not tried


@dataclass(frozen=True)
class MeasuredBase:
    """A base LoRA that was measured. scale: the scale s of its style. ground: the base LoRA with the KL probe
    under it."""

    scale: float
    ground: ProbedBase

    @property
    def kl(self) -> float:
        return self.ground.probe.floor

    @property
    def rise(self) -> float:
        return self.ground.probe.rise

    def shares(self, kl: float) -> tuple[float, float]:
        """Return the limit divided by the measured value, for the KL and for the rise of prose; 0 for both if
        a measured value is not finite. kl: the limit of the KL, nats per token."""
        if not (math.isfinite(self.kl) and math.isfinite(self.rise)):
            return 0.0, 0.0
        return kl / self.kl if self.kl > 0 else math.inf, RISE / self.rise if self.rise > 0 else math.inf

    def room(self, kl: float) -> float:
        """Return the factor by which s can grow up to the limits, if the KL and the rise of prose are
        parabolas; 0 if a measured value is not finite. kl: as in `shares`"""
        return math.sqrt(min(self.shares(kl)))


@dataclass(frozen=True)
class UsedStyle:
    """The measurements of the style in use. The next step begins near this style, so that one whole
    measurement is usually enough.

    predicted: the KL that the style basis predicted (`StyleBasis.kl`), nats per token
    kl: the measured KL, nats per token
    rise: the measured rise of the mean negative log-likelihood of prose, nats per token
    loss: the share of the variety that replies lost
    """

    predicted: float
    kl: float
    rise: float
    loss: float

    @classmethod
    def of(cls, predicted: float, found: MeasuredBase, loss: float, share: float) -> "UsedStyle":
        """Return the style that a step uses. If the step had to make the style smaller (share < 1), the loss
        is at least VARIETY_LOSS, so that the next step does not make the style larger."""
        return cls(predicted, found.kl, found.rise, loss if share == 1 else max(loss, VARIETY_LOSS))

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> "UsedStyle | None":
        """Return the style of a step's report; None if the report has none, or one that cannot be used."""
        try:
            found = cls(**{field.name: float(report[USED][field.name]) for field in fields(cls)})
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return found if found.predicted > 0 and all(map(math.isfinite, astuple(found))) else None

    def next_start(self, kl: float) -> tuple[float, float] | None:
        """Return where the next step begins: (the KL that the basis must predict for the first s, in nats per
        token; the room up to which this s is large enough). Return None if the next style can be far larger
        than this style. kl: the next step's limit of the measured KL, nats per token"""
        limits = (kl, self.kl), (RISE, self.rise)
        of_kl, of_rise = (limit / value if value > 0 else math.inf for limit, value in limits)
        room = math.sqrt(min(of_kl, of_rise))
        # The pushes of the MicroLoRA lose variety, too. So a loss alone makes no style smaller than the
        # smallest share of the largest s. The rise is about proportional to s.
        least = STEPS[-1] * min(math.sqrt(of_kl), of_rise)
        factor = AIM * min(room, max(VARIETY_LOSS / self.loss, least) if self.loss > 0 else math.inf)
        if factor > FAR:
            return None
        factor = min(max(factor, 1 / NEXT_GROWTH), NEXT_GROWTH)
        return self.predicted * factor**2, max(FAR, FAR * room / factor)


@dataclass(frozen=True)
class ScaleSearch:
    """A search for the scale s.

    measure: a function that measures the base LoRA at a scale s
    measure_kl: a function that measures the KL at a scale s, nats per token
    wanted: the limit of the KL, nats per token
    """

    measure: Callable[[float], MeasuredBase]
    measure_kl: Callable[[float], float]
    wanted: float

    def run(
        self, first: float, note: Callable[[int], None], enough: float | None = None
    ) -> MeasuredBase | None:
        """Return the measured base LoRA with the largest measured s within the limits; None if each measured
        s exceeds a limit.

        first: the first s to measure. note: a function that gets the number of measurements that ended
        enough: None, or the room up to which `first` is large enough. The search of the KL alone is then left
            out.
        """
        found, least, refused = None, math.inf, 0
        scale = self._scale_at(AIM * self.wanted, first) if enough is None else first
        for measured in range(TRIES):
            note(measured)
            now = self.measure(scale)
            room = now.room(self.wanted)
            if room >= 1:
                found = now
                if room < (enough or 1 / CLOSE_ENOUGH) or scale / CLOSE_ENOUGH > least:
                    break
            else:
                least, refused = scale, refused + 1
            # The rise of prose is not always a parabola, so each refusal leads to a larger step.
            wanted = AIM * (room if room >= 1 else room**refused) * scale
            low = 1.05 * found.scale if found else MIN_SHRINK * scale
            high = min(MAX_GROWTH * scale, 0.95 * least)
            scale = min(max(wanted, low), high)
        return found

    def _scale_at(self, kl: float, scale: float) -> float:
        """Return an s at which the KL is about `kl`, nats per token. scale: the first s to measure"""
        before: tuple[float, float] | None = None
        for _ in range(KL_TRIES):
            now = self.measure_kl(scale)
            if not math.isfinite(now):
                scale *= MIN_SHRINK
                continue
            now = max(now, 1e-12)
            factor = (kl / now) ** (1 / _power(before, (scale, now)))
            if KL_CLOSE_ENOUGH <= factor <= 1 / KL_CLOSE_ENOUGH:
                return scale * factor
            before = scale, now
            scale *= min(max(factor, MIN_SHRINK), MAX_GROWTH)
        return scale


def _power(before: tuple[float, float] | None, now: tuple[float, float]) -> float:
    """Return the power of s to which the KL is proportional, from two pairs (s, KL)."""
    if before is None or before[0] == now[0]:
        return POWER
    power = math.log(now[1] / before[1]) / math.log(now[0] / before[0])
    return min(max(power, MIN_POWER), MAX_POWER)


def smaller_share(share: float, is_worse: bool, loss: float) -> float:
    """Return the share of the largest s that the loop tries after `share`. Return 0 if the loop needs no
    smaller share, or if `share` is the smallest one.

    is_worse: True if the replies had more faults with `share`. loss: the share of the variety that they lost
    """
    if is_worse:
        return next((step for step in STEPS if step < share), 0.0)
    wanted = max(STEPS[-1], share * VARIETY_LOSS / loss) if loss > VARIETY_LOSS else share
    return wanted if wanted < CLOSE_SHARE * share else 0.0
