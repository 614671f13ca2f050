"""This module computes the expected speed of M-series chips from this machine's figures and Apple's
bandwidths. The module measures nothing.

Decoding a token reads every weight and the cache once. If a run here used a share s of this machine's memory
bandwidth, a chip with a bandwidth of B bytes a second is expected to decode s B / bytes tokens a second, and
at most B / bytes. This assumes that the kernels reach the same share on the chip, which nobody has measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Memory bandwidth in GB/s, from Apple's technical specifications of the chips.
CHIPS = {
    "M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800,
    "M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800,
    "M3": 100, "M3 Pro": 150, "M3 Max": 400, "M3 Ultra": 819,
    "M4": 120, "M4 Pro": 273, "M4 Max": 546,
    "M5": 153,
}  # fmt: skip
SEVEN = 4.07e9  # bytes of a 7B model's weights at 4.5 bits


@dataclass(frozen=True)
class Projected:
    """Decode speeds on one chip in tokens per second, of the measured model and of a 7B model. most: the
    bound by memory bandwidth. expected: the bound times the measured share. bandwidth: GB per second."""

    chip: str
    bandwidth: float
    most: float
    expected: float
    most_7b: float
    expected_7b: float


def share(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of memory bandwidth that decoding used, at the shortest context."""
    found = [r for r in rows if r["name"].endswith("share of memory bandwidth") and r["value"]]
    return min(found, key=lambda r: int(r["name"].split()[2].rstrip(":")))["value"] if found else None


def project_chips(rows: Sequence[Mapping[str, Any]], weights: float) -> list[Projected]:
    """Return the projection for each chip. weights: bytes of the measured model. The list is empty if
    decoding was not measured."""
    part = share(rows)
    if part is None or not weights:
        return []
    return [
        Projected(
            chip, gb, gb * 1e9 / weights, part * gb * 1e9 / weights, gb * 1e9 / SEVEN, part * gb * 1e9 / SEVEN
        )
        for chip, gb in CHIPS.items()
    ]
