"""This module divides a model into two models: its first layers, and its other layers with the output head.

Each half is a model of the same family with fewer layers, so the backends need no other code to load it. The
first half keeps the embedding. The second half has the output head in the place of its embedding, which it
does not use. So each half holds one matrix of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ..config.model import Model, ModelConfig, Weights
from ..files.gguf import GGUFTensor
from ..files.small_floats import FloatMatrix
from .stored import NamedWeights, StoredMatrix, stored_matrix, stored_tensor

EMBEDDING, HEAD, LAYERS = "model.embed_tokens.", "lm_head.", "model.layers."
Layer = TypeVar("Layer")


def halves(model: Model, split: int) -> tuple[Model, Model]:
    """Return (a model of the layers 0 .. split - 1, a model of the other layers and the output head)."""
    layers = range(model.config.n_layers)
    return _half(model, layers[:split], False), _half(model, layers[split:], True)


def repeat_layers(layers: Sequence[Layer], n: int) -> list[Layer]:
    """Return n layers: the given ones, again and again."""
    return [layers[i % len(layers)] for i in range(n)]


def _half(model: Model, layers: range, is_last: bool) -> Model:
    config = model.config
    still = frozenset(i - layers.start for i in config.layers_without_rope if i in layers)
    shape = replace(config, n_layers=len(layers), layers_without_rope=still, tie_word_embeddings=True)
    own_head = is_last and not config.tie_word_embeddings
    return replace(
        model,
        shape=shape,
        parameters=model.parameters * len(layers) // config.n_layers,
        load_weights=lambda: HalfWeights(model.load_weights(), config, layers, own_head),
    )


class HalfWeights(NamedWeights):
    """The weights of one half, under the names that the half's model gives them.

    layers: the numbers of the half's layers in the whole model
    own_head: True if the output head takes the place of the embedding
    """

    def __init__(self, weights: Weights, config: ModelConfig, layers: range, own_head: bool):
        self._weights, self._layers = weights, layers
        dropped = HEAD if not own_head else EMBEDDING
        kept = (name for name in weights if not name.startswith(dropped))
        self.names: dict[str, str] = {mine: name for name in kept if (mine := self._name_in_half(name))}

    def _name_in_half(self, name: str) -> str:
        """Return the name of a tensor in this half, or "" if the half does not have the tensor."""
        if name.startswith(HEAD):
            return EMBEDDING + name.removeprefix(HEAD)
        if not name.startswith(LAYERS):
            return name
        number, _, rest = name.removeprefix(LAYERS).partition(".")
        layer = int(number)
        return f"{LAYERS}{layer - self._layers.start}.{rest}" if layer in self._layers else ""

    def _whole(self, module: str) -> str:
        """Return the name that a module of this half has in the whole model."""
        return self.names[f"{module}.weight"].removesuffix(".weight")

    def blocks_of(self, module: str) -> StoredMatrix | FloatMatrix | None:
        return stored_matrix(self._weights, self._whole(module))

    def stored_tensor(self, module: str) -> GGUFTensor | None:
        return stored_tensor(self._weights, self._whole(module))

    def __getitem__(self, name: str) -> np.ndarray:
        return self._weights[self.names[name]]
