"""This module compares two reports of `ruvmlx bench`. The module finds the rows (measurements) that became
faster or slower by more than chance explains.

If a row has a reference (the machine's own speed in the same turns) in both reports, the samples are divided
by the reference, because a slow hour of the machine slows the row and its reference. A permutation test
compares the ranks of the samples (Wilcoxon 1945). If there are few samples, the test tries all divisions of
the samples into two groups; otherwise it tries random divisions. A row has changed if the difference is
significant (with Holm's correction over all rows) and larger than WORTH. A row without a reference has
changed only if the difference is larger than ALONE.
"""

import itertools
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.errors import UsageError, unreadable

from .rows import ALONE, WORTH, verdict

LEVEL = 0.05  # the significance level of all rows together
EXACT = 20_000  # the maximum number of divisions of samples for an exact test
_NEEDED = {"name", "value", "unit", "better", "target", "met"}  # the fields that each row must have
_RUN_FACTS = ("model", "weights", "quick")  # facts of a report about the whole run; weights: bytes
_DRAWN = 20_000  # the number of random divisions in a test that is not exact


@dataclass(frozen=True)
class RowChange:
    """The change of a row from the old report to the new report.

    old, new: the values of the row in both reports
    ratio: the new median divided by the old median of the samples (divided by their reference, if there is
        one)
    p: the p-value without Holm's correction
    verdict: "faster", "slower", "same", or the reason why there is no verdict
    """

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
        if not all(row.keys() >= _NEEDED for row in report["rows"]):
            raise KeyError("a row lacks a field")
        return report
    except OSError as e:
        raise unreadable(str(path), e) from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        name = shlex.quote(str(path))
        raise UsageError(f"{path} is not a report; `ruvmlx bench --json > {name}` writes one.") from e


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[RowChange]:
    """Return the change of each row that both reports have, in the order of the new report."""
    before = {row["name"]: row for row in old["rows"]}
    pairs = [(before[row["name"]], row) for row in new["rows"] if row["name"] in before]
    tests = [_test_rows(a, b, LEVEL / len(pairs)) for a, b in pairs]
    found = _significant([p for _, p in tests])
    return [
        _change(a, b, ratio, p, good) for (a, b), (ratio, p), good in zip(pairs, tests, found, strict=True)
    ]


def verdicts(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, old verdict, new verdict) of each row that has a value and a target in both reports. The
    verdict says whether the value meets the target."""
    before = {row["name"]: verdict(row) for row in old["rows"]}
    pairs = [(row["name"], before.get(row["name"], ""), verdict(row)) for row in new["rows"]]
    return [(name, was, now) for name, was, now in pairs if was and now]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the differences between the models, the machines and the settings of two reports, and each
    report whose machine slowed down during the run. Such a difference can be the cause of a changed row,
    instead of the code."""
    found = [f"{key}: {old.get(key)} -> {new.get(key)}" for key in _RUN_FACTS if old.get(key) != new.get(key)]
    for part in ("machine", "settings"):
        a, b = old.get(part, {}), new.get(part, {})
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                found.append(f"{key}: {a.get(key)} -> {b.get(key)}")
    for name, report in (("old", old), ("new", new)):
        if report.get("throttled"):
            found.append(f"the machine slowed down by {report.get('drift', 0):.0%} during the {name} run")
    return found


def _change(
    a: dict[str, Any], b: dict[str, Any], ratio: float | None, p: float | None, good: bool
) -> RowChange:
    facts = b["name"], b["unit"], a["value"], b["value"], ratio, p
    if ratio is None:
        return RowChange(*facts, "too few samples" if a["value"] and b["value"] else "not measured in both")
    enough = WORTH if a.get("reference") and b.get("reference") else ALONE
    if not good or abs(math.log(ratio)) < math.log1p(enough):
        return RowChange(*facts, "same")
    return RowChange(*facts, "faster" if (ratio > 1) == (b["better"] == "higher") else "slower")


def _test_rows(a: dict[str, Any], b: dict[str, Any], level: float) -> tuple[float | None, float | None]:
    """Return the ratio and the p-value of a RowChange. Return (None, None) if the rows have so few samples
    that every p-value is more than `level`: the two most unequal divisions of the samples set the minimum."""
    x, y = _logs(a, b), _logs(b, a)
    if not len(x) or not len(y) or 2 / math.comb(len(x) + len(y), len(x)) > level:
        return None, None
    return math.exp(float(np.median(y) - np.median(x))), permutation(x, y)


def _logs(row: dict[str, Any], other: dict[str, Any]) -> np.ndarray:
    samples = np.asarray(row.get("samples") or [], float)
    if row.get("reference") and other.get("reference"):
        samples = samples / np.asarray(row["reference"], float)
    return np.log(samples[samples > 0])


def permutation(x: np.ndarray, y: np.ndarray) -> float:
    """Return the p-value of the difference between two groups of samples. The test divides all samples into
    two groups of the same sizes in each possible way, or in many random ways. The p-value is the share of the
    divisions whose mean ranks differ at least as much as the mean ranks of x and y. The medians of many
    divisions are equal, so a test of medians would need more samples."""
    every, n = np.concatenate([x, y]), len(x)
    ordered = np.sort(every)
    ranks = np.searchsorted(ordered, every, "left") + np.searchsorted(ordered, every, "right")
    ranks = ranks - ranks.mean()
    exact = math.comb(len(every), n) <= EXACT
    chosen = np.array(list(itertools.combinations(range(len(every)), n))) if exact else _draws(every, n)
    apart = np.abs(ranks[chosen].sum(axis=1)) >= abs(ranks[:n].sum()) - 1e-9
    return float(np.mean(apart)) if exact else float((1 + np.sum(apart)) / (1 + _DRAWN))


def _draws(every: np.ndarray, n: int) -> np.ndarray:
    keys = np.random.default_rng(0).random((_DRAWN, len(every)))
    return np.argsort(keys, axis=1)[:, :n]


def _significant(p: Sequence[float | None]) -> list[bool]:
    """Return True for each p-value that is significant, else False. Holm (1979) compares the k-th smallest of
    m p-values, from k = 0, with LEVEL / (m - k)."""
    order = sorted((x, i) for i, x in enumerate(p) if x is not None)
    found = [False] * len(p)
    for k, (x, i) in enumerate(order):
        if x > LEVEL / (len(order) - k):
            break
        found[i] = True
    return found
