"""This module computes the expected decode speed of Apple's M-series chips. The computation uses the figures
that were measured on this machine, and the memory bandwidths that Apple states. This module measures nothing.

To decode a token, a runtime reads each weight and the KV cache once. Let s be the share of this machine's
memory bandwidth that decoding used here. For weights of W bytes, a chip with a memory bandwidth of B bytes a
second is expected to decode s B / W tokens a second, and at most B / W. These speeds leave out the bytes of
the KV cache. The computation supposes that the kernels reach the same share s on the chip, which nobody has
measured.
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
SEVEN = 4.07e9  # the bytes of a 7B model's weights at 4.5 bits per weight


@dataclass(frozen=True)
class Projected:
    """The computed decode speeds on one chip, in tokens per second.

    bandwidth: the chip's memory bandwidth, GB per second
    most, most_7b: the speed that the memory bandwidth allows, for the measured model and for a 7B model
    expected, expected_7b: `most` and `most_7b` times the share of the bandwidth that decoding used on this
        machine
    """

    chip: str
    bandwidth: float
    most: float
    expected: float
    most_7b: float
    expected_7b: float


def share(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of the memory bandwidth that decoding used at the shortest context; None if it was not
    measured. rows: the rows of a report."""
    found = [r for r in rows if r["name"].endswith("share of memory bandwidth") and r["value"]]
    return min(found, key=lambda r: int(r["name"].split()[2].rstrip(":")))["value"] if found else None


def project_chips(rows: Sequence[Mapping[str, Any]], weights: float) -> list[Projected]:
    """Return the computed speeds for each chip; an empty list if decoding was not measured. weights: the
    bytes of the measured model's weights."""
    part = share(rows)
    if part is None or not weights:
        return []
    return [
        Projected(
            chip, gb, gb * 1e9 / weights, part * gb * 1e9 / weights, gb * 1e9 / SEVEN, part * gb * 1e9 / SEVEN
        )
        for chip, gb in CHIPS.items()
    ]
