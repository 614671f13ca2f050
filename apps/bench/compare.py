"""Two reports side by side: what became faster or slower by more than chance and the machine explain.

Where a row has a reference (what the memory did in the same turns), samples are compared as shares of it: a
slow hour of the machine slows both. The difference of the medians of logarithms is tested by permutation,
exactly for few samples; it counts when it is both unlikely (Holm's correction over all rows) and large
enough: by more than WORTH, or ALONE where there is no reference."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.errors import UsageError

from .rows import ALONE, WORTH, verdict

LEVEL = 0.05
EXACT = 20_000  # permutations that are all tried
_DRAWN = 20_000


@dataclass(frozen=True)
class RowChange:
    """ratio: new over old, of the row's samples (or of their shares of the reference). p: of no difference,
    by itself; verdict: "faster", "slower", "same", or why nothing can be said."""

    name: str
    unit: str
    old: float | None
    new: float | None
    ratio: float | None
    p: float | None
    verdict: str


def read(path: str | Path) -> dict[str, Any]:
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(report["rows"], list):
            raise TypeError("rows are no list")
        return report
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}.") from e
    except (ValueError, KeyError, TypeError) as e:
        raise UsageError(f"{path} is no report; `ruvmlx bench --json > {path}` writes one.") from e


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[RowChange]:
    """For each row that both have, in the new one's order."""
    before = {row["name"]: row for row in old["rows"]}
    pairs = [(before[row["name"]], row) for row in new["rows"] if row["name"] in before]
    tests = [_tested(a, b) for a, b in pairs]
    found = _significant([p for _, p in tests])
    return [
        _change(a, b, ratio, p, good) for (a, b), (ratio, p), good in zip(pairs, tests, found, strict=True)
    ]


def verdicts(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name and the two verdicts of each row that both have a value for, and a target."""
    before = {row["name"]: verdict(row) for row in old["rows"]}
    pairs = [(row["name"], before.get(row["name"], ""), verdict(row)) for row in new["rows"]]
    return [(name, was, now) for name, was, now in pairs if was and now]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What else is not the same: then a change may have other causes than the code."""
    found = []
    for part in ("machine", "settings"):
        a, b = old.get(part, {}), new.get(part, {})
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                found.append(f"{key}: {a.get(key)} -> {b.get(key)}")
    for name, report in (("old", old), ("new", new)):
        if report.get("throttled"):
            found.append(f"the {name} run slowed down by {report.get('drift', 0):.0%} on its way")
    return found


def _change(
    a: dict[str, Any], b: dict[str, Any], ratio: float | None, p: float | None, good: bool
) -> RowChange:
    facts = b["name"], b["unit"], a["value"], b["value"], ratio, p
    if ratio is None:
        return RowChange(*facts, "no samples" if a["value"] and b["value"] else "not measured in both")
    enough = WORTH if a.get("reference") and b.get("reference") else ALONE
    if not good or abs(math.log(ratio)) < math.log1p(enough):
        return RowChange(*facts, "same")
    return RowChange(*facts, "faster" if (ratio > 1) == (b["better"] == "higher") else "slower")


def _tested(a: dict[str, Any], b: dict[str, Any]) -> tuple[float | None, float | None]:
    x, y = _logs(a, b), _logs(b, a)
    if min(len(x), len(y)) < 3:
        return None, None
    return math.exp(float(np.median(y) - np.median(x))), permutation(x, y)


def _logs(row: dict[str, Any], other: dict[str, Any]) -> np.ndarray:
    samples = np.asarray(row.get("samples") or [], float)
    if row.get("reference") and other.get("reference"):
        samples = samples / np.asarray(row["reference"], float)
    return np.log(samples[samples > 0])


def permutation(x: np.ndarray, y: np.ndarray) -> float:
    """How often a random split of all samples into two such groups has medians at least as far apart."""
    every, n = np.concatenate([x, y]), len(x)
    seen = abs(np.median(y) - np.median(x)) - 1e-12
    exact = math.comb(len(every), n) <= EXACT
    apart = _apart(
        every, np.array(list(itertools.combinations(range(len(every)), n))) if exact else _draws(every, n)
    )
    return float(np.mean(apart >= seen)) if exact else float((1 + np.sum(apart >= seen)) / (1 + _DRAWN))


def _draws(every: np.ndarray, n: int) -> np.ndarray:
    keys = np.random.default_rng(0).random((_DRAWN, len(every)))
    return np.argsort(keys, axis=1)[:, :n]


def _apart(every: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Distance of the medians, for each row of indices."""
    rest = np.ones((len(chosen), len(every)), bool)
    np.put_along_axis(rest, chosen, False, axis=1)
    others = np.broadcast_to(every, rest.shape)[rest].reshape(len(chosen), -1)
    return np.abs(np.median(every[chosen], axis=1) - np.median(others, axis=1))


def _significant(p: Sequence[float | None]) -> list[bool]:
    """Holm 1979: the k-th smallest of m is held against LEVEL / (m - k)."""
    order = sorted((x, i) for i, x in enumerate(p) if x is not None)
    found = [False] * len(p)
    for k, (x, i) in enumerate(order):
        if x > LEVEL / (len(order) - k):
            break
        found[i] = True
    return found
