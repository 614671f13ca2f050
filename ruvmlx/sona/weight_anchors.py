"""The optional part that penalises changes to weights that earlier tasks depend on, as the core sees it.

`wiring.py` passes the implementation in: elastic weight consolidation (optional/ewc.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..lora.base_lora import BaseLoRA, Pair, Place, Squares
from ..pausing import Pause


class Importance(Protocol):
    """How much a task depends on each weight."""

    examples: int  # replies seen

    def add(self, example: Mapping[Place, Squares]) -> None:
        """One reply's squared gradient."""

    @property
    def finite(self) -> bool:
        """No NaN or Inf."""

    def to_bytes(self) -> bytes: ...


class WeightAnchors(Protocol):
    """An anchor: the base LoRA at the end of a task, and the importance of its weights for that task."""

    limit: int  # anchors at most

    def ids(self) -> list[int]:
        """Of the anchors on the way to the version in use, the oldest first."""

    def load(self) -> Sequence[Any]:
        """These anchors."""

    def last_version(self) -> int:
        """The version at which the newest one was made; 0: there is none."""

    def new_importance(self) -> Importance: ...

    def read_importance(self, data: bytes) -> Importance:
        """Read back; CorruptFile if damaged."""

    def end_run(
        self, version: int, base: int, importance: Any, report: dict[str, Any], pruned: dict[str, str]
    ) -> bool:
        """Write a run of the deep loop, and the anchor unless `importance` is None, in one transaction.

        False, and nothing is written, if another base is in use than the one that was measured.
        """

    def penalty(
        self, base: BaseLoRA, anchors: Sequence[Any], strength: float, pause: Pause | None = None
    ) -> tuple[float, dict[Place, Pair]]:
        """The penalty for the base's distance to the anchors, and its gradient by the base's factors."""
