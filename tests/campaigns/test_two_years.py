"""The campaign runs, here for two days; two_years.py is the whole."""

import pytest

from . import two_years
from .two_years import Figures, Use, live, measure


def test_all_is_measured(open_tiny, monkeypatch):
    use = Use(chats=6, replies=120, ratings=40, trainings=2, timed=3)
    first, state = live(open_tiny, use)
    figures = measure(open_tiny, open_tiny, use, first, state)
    named = [line[:44].strip() for line in figures.lines()]
    for name in ("start beyond that", "rate: p99", "search: needle", "undo of the first rating", "the store"):
        assert name in named
    assert figures.bytes > 100_000


@pytest.mark.parametrize("size, took, over", [(10, 20.0, 1), (2_000_000_000, 5.0, 1), (10, 5.0, 0)])
def test_what_is_over_its_limit_is_marked(size, took, over):
    found = Figures({"rate: p99": (two_years.RATE, [(took, took)])}, size)
    assert sum(line.endswith("OVER") for line in found.lines()) == over
