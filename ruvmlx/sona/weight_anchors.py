"""This module defines the protocol of the optional part that penalises changes to weights that earlier tasks
depend on.

A task is a series of ratings about similar things (task_boundary.py). `wiring.py` passes the implementation
of the protocol, which is elastic weight consolidation (optional/ewc.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..lora.base_lora import BaseLoRA, Pair, Place, Squares
from ..pausing import Pause


class Importance(Protocol):
    """The importance of each weight for a task: how much the task depends on the weight."""

    examples: int  # the number of replies that were added

    def add(self, example: Mapping[Place, Squares]) -> None:
        """Add the squared gradient of one reply to the importance."""

    @property
    def finite(self) -> bool:
        """True if the importance has no NaN and no Inf."""

    def to_bytes(self) -> bytes: ...


class WeightAnchors(Protocol):
    """The anchors of one adapter. An anchor is the base LoRA at the end of a task, and the importance of its
    weights for that task."""

    limit: int  # the maximum number of anchors that are kept

    def ids(self) -> list[int]:
        """Return the ids of the anchors that belong to the adapter version in use or to its ancestors, the
        oldest first."""

    def load(self) -> Sequence[Any]:
        """Load from the store the anchors whose ids the function `ids` returns."""

    def last_version(self) -> int:
        """Return the adapter version of the newest anchor; 0 if there is no anchor."""

    def new_importance(self) -> Importance: ...

    def read_importance(self, data: bytes) -> Importance:
        """Decode a stored importance. Raises CorruptFile if the data is damaged."""

    def end_run(
        self, version: int, base: int, importance: Any, report: dict[str, Any], pruned: dict[str, str]
    ) -> bool:
        """Store the report of a run of the deep loop, and the run's anchor unless `importance` is None, in
        one transaction. Return False, and write nothing, if the base LoRA in use is no longer the measured
        base LoRA.

        base: the id of the measured base LoRA
        """

    def penalty(
        self, base: BaseLoRA, anchors: Sequence[Any], strength: float, pause: Pause | None = None
    ) -> tuple[float, dict[Place, Pair]]:
        """Return the penalty on the base LoRA's distance to the anchors, and the penalty's gradient by the
        base LoRA's lora_a and lora_b."""
