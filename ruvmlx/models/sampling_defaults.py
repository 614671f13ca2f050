"""The sampling settings that a model's own files advise."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")


def sampling_defaults(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among temperature, top_p, top_k and min_p that lie where they can."""
    found = {name: values.get(name) for name in SAMPLING_KEYS}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
    }
