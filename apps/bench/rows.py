"""One line of a report, whatever was measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """limit: what this machine allows, in the same unit. met: None when there is no target to meet."""

    name: str
    value: float | None
    unit: str
    target: float | None = None
    limit: float | None = None
    met: bool | None = None
    note: str = ""


def at_most(name: str, value: float, unit: str, target: float, note: str = "") -> Row:
    """A row whose value must not exceed its target."""
    return Row(name, round(value, 3), unit, target, None, value <= target, note)
