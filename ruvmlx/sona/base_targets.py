"""This module decides which matrices the background loop trains, and with which factors a matrix begins. The
setting `base_targets` names the matrices. With a number K in the setting, the loop trains only the K named
matrices with the largest gradients. The size of a matrix's gradient is
    size = sum over replies i of ||G_i||^2    (G_i [in, out]: the matrix's gradient of reply i's mean log p)

The sum of a size is over the replies of the first training step. The gradients G_i are taken at the weights
in use (training/trainer.py: squares).
"""

from collections.abc import Sequence

import numpy as np

from ..lora.base_lora import EMBEDDING, BaseLoRA, Pair, Place, place_shape
from ..lora.targets import Targets
from ..models.config.model import ModelConfig
from ..pausing import Pause
from ..training.trainer import Trainer
from .replay import RatedExample


def candidates(targets: Targets, n_layers: int, depth: float) -> list[Place]:
    """Return the places (module, layer) of the matrices that the targets name. depth: the share of the layers
    to train, counted from the last layer."""
    first = n_layers - max(1, round(n_layers * depth))
    return [place for place in targets.places if place[1] >= first]


class GradientSizes:
    """A measurement of the size of each matrix's gradient for each reply. A stopped measurement continues
    with the first reply that it has not measured."""

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
        """Return the `count` places of `base` whose matrices have the largest gradients, in the order of
        `base.pairs`."""
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
    """Return `base` (None: no base LoRA), limited to the given places. A place that the base LoRA does not
    change gets a LoRA pair of zeros."""
    pairs = dict[Place, Pair]()
    for module, layer in places:
        shape = place_shape(config, module, layer)
        assert shape is not None
        zero = np.zeros((shape[0], 1), np.float32), np.zeros((1, shape[1]), np.float32)
        pairs[module, layer] = base.pairs.get((module, layer), zero) if base else zero
    return BaseLoRA(pairs, base.scale if base else 1.0)


def new_pair(config: ModelConfig, place: Place, rank: int, rng: np.random.Generator) -> Pair:
    """Return a LoRA pair that changes nothing yet: lora_a is random and lora_b is zero.

    In the embedding's pair, lora_a is zero and lora_b is random. lora_a [V, rank] has a row for each token,
    and a row whose token is in no text of the training has no gradient. So the training changes only the
    tokens that it saw. With a random lora_a, lora_b would change all tokens. (PEFT begins so, too.)
    """
    shape = place_shape(config, *place)
    assert shape is not None
    n_in, n_out = shape
    a, b = np.zeros((n_in, rank), np.float32), np.zeros((rank, n_out), np.float32)
    if place == EMBEDDING:
        return a, rng.normal(0, n_out**-0.5, b.shape).astype(np.float32)
    return rng.normal(0, n_in**-0.5, a.shape).astype(np.float32), b
