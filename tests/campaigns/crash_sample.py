"""Which calls of a verb a sample tries.

What it does not know: the actions at a call (crashes.py).
"""

import random
from collections.abc import Sequence

from .crash_images import Op

# New names, exchanged names, removed names, new sizes, and fsync, with which SQLite ends each commit.
WEIGHTY = b"RXLUDTZS"


def sample_calls(rng: random.Random, ops: Sequence[Op], calls: int, count: int | None) -> list[int]:
    """Return the numbers of `count` calls out of `calls`, in their order. None: all calls.

    The sample has all WEIGHTY calls if they are fewer than `count`, and of the other calls each k-th one. If
    there are too many WEIGHTY calls, the sample has each k-th of them. ops: the calls of a run without a
    fault; the function does not look at their kinds if threads gave another run another number of calls.
    """
    if count is None or count >= calls:
        return list(range(calls))
    if len(ops) != calls:
        return _spread(rng, range(calls), count)
    weighty = [at for at, op in enumerate(ops) if op.kind.upper() in WEIGHTY]
    others = sorted(set(range(calls)) - set(weighty))
    if len(weighty) >= count:
        return _spread(rng, weighty, count)
    return sorted([*weighty, *_spread(rng, others, count - len(weighty))])


def _spread(rng: random.Random, calls: Sequence[int], count: int) -> list[int]:
    """Return `count` of the calls at equal distances. The start is random."""
    start = rng.random()
    return [calls[int((i + start) * len(calls) / count)] for i in range(count)]
