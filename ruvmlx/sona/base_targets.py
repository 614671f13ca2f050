"""This module decides which matrices the background loop trains. The setting `base_targets` names the
matrices, or it asks for the K matrices with the largest gradients. The size of a matrix's gradient is

    size of a matrix = sum over replies i of ||G_i||^2        G_i [in, out]: gradient of reply i's mean log p

The sum is over the replies of the first training step. The gradients are taken at the weights in use
(training/trainer.py: squares).
"""

from collections.abc import Sequence

import numpy as np

from ..lora.base_lora import BaseLoRA, Pair, Place, place_shape
from ..lora.targets import Targets
from ..models.config.model import ModelConfig
from ..pausing import Pause
from ..training.trainer import Trainer
from .replay import RatedExample


def candidates(targets: Targets, n_layers: int, depth: float) -> list[Place]:
    """Return the places that the targets name, in the last `depth` (a share) of the layers."""
    first = n_layers - max(1, round(n_layers * depth))
    return [place for place in targets.places if place[1] >= first]


class GradientSizes:
    """The sizes of the matrices' gradients for each reply. A stopped measurement continues with the next
    reply."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Place, float]] = {}

    def strongest(
        self,
        trainer: Trainer,
        base: BaseLoRA,
        examples: Sequence[RatedExample],
        count: int,
        pause: Pause,
    ) -> list[Place]:
        """Return the `count` places of the base with the largest gradients, in the base's order."""
        for example in examples:
            if example.reply_id not in self._known:
                squares = trainer.squares(base, example.text, pause)
                self._known[example.reply_id] = {
                    place: float(rows.sum()) for place, (rows, _) in squares.items()
                }
        total = {p: sum(self._known[e.reply_id][p] for e in examples) for p in base.pairs}
        chosen = set(sorted(total, key=lambda place: -total[place])[:count])
        return [place for place in base.pairs if place in chosen]


def probe_base(config: ModelConfig, base: BaseLoRA | None, places: Sequence[Place]) -> BaseLoRA:
    """Return the base in use with a pair for each place. A place without a pair gets a pair that changes
    nothing."""
    pairs = dict[Place, Pair]()
    for module, layer in places:
        shape = place_shape(config, module, layer)
        assert shape is not None
        zero = np.zeros((shape[0], 1), np.float32), np.zeros((1, shape[1]), np.float32)
        pairs[module, layer] = base.pairs.get((module, layer), zero) if base else zero
    return BaseLoRA(pairs, base.scale if base else 1.0)
