"""This module decides which side of the hybrid backend does which kind of work, from measured costs.

The main side writes the replies: at opening, it is the side that decodes a token sooner. Each other kind of
work goes to the side where it costs less. If the sides are two devices (a GPU, and the cores of the CPU),
work on the other side takes no time from a reply, so it goes there unless it takes APART times as long.
"""

import threading
from collections.abc import Callable

from ..base import KL, QUESTIONS, REPLIES, SAMPLES
from .side import DECODE, HEAD, READ, Side

# the operations (side.py) of each kind of work
OPERATIONS = {REPLIES: (DECODE,), QUESTIONS: (READ,), KL: (READ, HEAD), SAMPLES: (DECODE,)}
APART = 8.0  # the largest cost of work on the other device, relative to its cost on the main side
STAYS = 0.8  # work moves only to a side with less than this share of the cost, so that noise moves nothing


class Placement:
    """The table {kind of work: side}. The table follows the sides' costs and failures.

    main: the side that writes replies
    are_apart: True if the sides are two devices
    on_change: a function that is called after the other side has become the main side
    """

    def __init__(self, main: Side, other: Side, are_apart: bool):
        self.main, self.other, self.are_apart = main, other, are_apart
        main.partner, other.partner = other, main
        self.on_change: Callable[[], None] = lambda: None
        self._now: dict[str, Side] = {}
        self._lock = threading.Lock()

    def side_of(self, kind: str) -> Side:
        """Return the side that does this kind of work now."""
        main = self.living()
        if kind == REPLIES or self.other.failure is not None:
            return main
        now = self._now.get(kind) or self._cheapest(kind)
        rival = self.other if now is main else main
        if self._price(rival, kind) < STAYS * self._price(now, kind):
            now = rival
        self._now[kind] = now
        return now

    def living(self) -> Side:
        """Return the main side. After a failure of the main side, the other side becomes the main side."""
        with self._lock:
            is_over = self.main.failure is not None and self.other.failure is None
            if is_over:
                self.main, self.other = self.other, self.main
                self._now.clear()
        if is_over:
            self.on_change()
        return self.main

    def _cheapest(self, kind: str) -> Side:
        return min((self.main, self.other), key=lambda side: self._price(side, kind))

    def _price(self, side: Side, kind: str) -> float:
        """Return the cost of a kind of work on a side. The price on the other device is lower than its cost,
        because the reply does not wait for it."""
        cost = cost_of(side, kind)
        return cost / APART if self.are_apart and side is self.other else cost


def cost_of(side: Side, kind: str) -> float:
    """Return the seconds per token of a kind of work on a side; infinite if it was not measured."""
    costs = [side.costs.get(operation) for operation in OPERATIONS[kind]]
    return float("inf") if None in costs else sum(cost for cost in costs if cost is not None)


def facts_of(placement: Placement) -> dict[str, object]:
    """Return the placement and the costs (milliseconds per token), for the log and for `doctor`."""
    sides = placement.main, placement.other
    return {
        "placement": {kind: placement.side_of(kind).name for kind in OPERATIONS},
        "costs_ms": {
            kind: {side.name: round(1e3 * cost_of(side, kind), 3) for side in sides if side.costs}
            for kind in OPERATIONS
        },
    }


def plan_words(placement: Placement) -> str:
    """Return one line for people: which side does which work, and the measured cost of each side."""
    parts, sides = [], [side for side in (placement.main, placement.other) if side.costs]
    for kind in OPERATIONS:
        side = placement.side_of(kind)
        costs = [f"{one.name} {1e3 * cost_of(one, kind):.2f}" for one in sides]
        parts.append(f"{kind} on {side.name} ({', '.join(costs)} ms a token)")
    return "; ".join(parts)
