"""The sampling settings that a model's own files advise."""

from collections.abc import Mapping
from typing import Any

from ..settings import SAMPLING

LARGEST = 1e9  # of a number that is meant


def sampling_defaults(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the sampling settings that lie where they can."""
    found = {name: values.get(name) for name in SAMPLING}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST
    }
