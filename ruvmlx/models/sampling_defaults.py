"""The sampling settings that a model's own files advise."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ..settings import SAMPLING


def sampling_defaults(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the sampling settings that lie where they can."""
    found = {name: values.get(name) for name in SAMPLING}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
    }
