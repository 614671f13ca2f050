"""What a campaign of crashes did with one verb, as a line of its table."""

from collections.abc import Sequence
from dataclasses import dataclass, field

COUNTS = ("calls", "kills", "faults", "images", "clocks", "places")


@dataclass
class Row:
    """What the campaign did with one verb. calls: those of a run without a fault that change files; images:
    the different ones of those that were made; clocks: runs with a clock that has jumped; places: runs in the
    places of crash_places.py."""

    verb: str
    calls: int = 0
    kills: int = 0
    faults: int = 0
    images: int = 0
    clocks: int = 0
    places: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)

    def line(self) -> str:
        numbers = "".join(f"{getattr(self, name):>8,}" for name in COUNTS) + f"{self.seconds:>7.0f} s"
        return f"{self.verb:34}{numbers}{len(self.findings):>10,}"


HEADING = f"{'verb':34}" + "".join(f"{name:>8}" for name in COUNTS) + f"{'time':>9}{'findings':>10}"


def add_up(rows: Sequence[Row]) -> Row:
    """Return the sums of all rows."""
    total = Row("all", *(sum(getattr(row, name) for row in rows) for name in COUNTS))
    total.seconds = sum(row.seconds for row in rows)
    total.findings = [finding for row in rows for finding in row.findings]
    return total
