"""This module defines a row of a report of `ruvmlx bench`: one measurement with its target. The module also
checks the row's value."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

FAULT = 1.05  # a value that beats the machine's limit by more than this factor is a wrong measurement
WORTH, ALONE = 0.04, 0.15  # usual relative differences of two runs of the same code: of ratios, of times
_TIMES = ("us", "ms", "s", "tok/s")


@dataclass(frozen=True)
class Row:
    """A row of a report.

    value: the median of the samples, or a single figure; None if there is no measurement
    target: the project's target for the value; None without a target
    limit: the best value that this machine allows, in the same unit
    better: "higher" or "lower", the direction in which a value is better
    condition: the condition under which the value or the target is valid
    reference: the machine's own speed, measured beside each sample; two runs are compared relative to this
    speed
    spread: the uncertainty of the value, as a fraction of the value
    """

    name: str
    value: float | None
    unit: str
    target: float | None = None
    limit: float | None = None
    note: str = ""
    better: Literal["higher", "lower"] = "higher"
    condition: str = ""
    samples: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()
    spread: float = 0.0

    @property
    def is_met(self) -> bool | None:
        """True if the value meets the target, False if it does not. None if there is no target, or if the
        value is so near to the target that the next run can have another result."""
        if self.value is None or self.target is None:
            return None
        margin = max(self.spread, ALONE if self.unit in _TIMES else WORTH if self.unit == "x" else 0.0)
        low, high = self.value * (1 - margin), self.value * (1 + margin)
        if self.better == "higher":
            return True if low >= self.target else False if high < self.target else None
        return True if high <= self.target else False if low > self.target else None

    @property
    def share(self) -> float | None:
        """The share of the machine's limit that the value reaches; 1 means that the value equals the
        limit."""
        if not self.value or not self.limit:
            return None
        return self.value / self.limit if self.better == "higher" else self.limit / self.value

    @property
    def facts(self) -> dict[str, Any]:
        """The row as data for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()} | {
            "met": self.is_met,
            "share": None if self.share is None else round(self.share, 3),
            "spread": round(self.spread, 4),
        }


def median_row(
    name: str, samples: Sequence[float], unit: str, target: float | None = None, **more: Any
) -> Row:
    """Return a row with the median of several samples."""
    kept = tuple(round_digits(s) for s in samples)
    value = round_digits(statistics.median(samples))
    return Row(name, value, unit, target, samples=kept, spread=spread(samples), **more)


def at_most(name: str, value: float, unit: str, target: float, note: str = "") -> Row:
    """Return a row with a single figure that must not exceed its target."""
    return Row(name, round_digits(value), unit, target, note=note, better="lower")


def verdict(row: Mapping[str, Any]) -> str:
    """Return in a word whether a row's value meets its target: "met", "not met", "close" (too near to the
    target to decide), or "" without a target. row: the facts of a Row."""
    if row["value"] is None or row["target"] is None:
        return ""
    return {True: "met", False: "not met", None: "close"}[row["met"]]


def left_out(name: str, unit: str, why: str, target: float | None = None) -> Row:
    return Row(name, None, unit, target, note=f"left out: {why}")


def refuse_impossible(row: Row) -> Row:
    """Return the row. If the row's value is better than the machine's limit by more than FAULT, return the
    row without the value, with the reason in its note."""
    share = row.share
    if share is None or share <= FAULT:
        return row
    value, limit = f"{row.value:g} {row.unit}", f"{row.limit:g}"
    why = f"refused: {value} is beyond what this machine can do ({limit}); the measurement is at fault"
    note = f"{row.note}; {why}" if row.note else why
    return replace(row, value=None, samples=(), reference=(), note=note)


def round_digits(x: float, digits: int = 4) -> float:
    """Return x rounded to `digits` significant digits."""
    return float(f"{x:.{digits}g}")


def spread(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles of the values, as a fraction of their median; 0 for
    fewer than 4 values."""
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle
