"""The sizes of a simulated year, here of two days; year.py is the whole."""

import pytest

from .year import Sizes, simulate


def test_each_version_is_a_small_difference(open_tiny):
    """The tables and their largest columns are listed. A difference is smaller than whole weights."""
    found = simulate(open_tiny, 2)
    named = [line.split()[0] for line in found.lines(2)[1:]]
    assert named[named.index("adapters") + 1] == "state" and {"replies", "witness"} <= set(named)
    with open_tiny() as runtime:
        rows = runtime.store.db.rows("SELECT source, length(state) AS size FROM adapters ORDER BY version")
        whole = [row["size"] for row in rows if row["source"] == 0]
        small = [row["size"] for row in rows if row["source"] > 0]
    assert len(small) > 30 and max(small) < min(whole)
    assert found.bytes["adapters", "state"] == sum(whole) + sum(small)


@pytest.mark.parametrize("size, days, over", [(200_000_001, 365, True), (200_000_000, 9, False)])
def test_a_store_over_the_limit_is_marked(size, days, over):
    assert Sizes({("adapters", "state"): size}, size).lines(days)[-1].endswith("OVER") == over
