"""This module reports the progress while a backend reads the weights, and lets the user stop the loading."""

from collections.abc import Callable

import numpy as np

from ...progress import Told, Watch
from ..config.layout import matrices, vectors
from ..config.model import Model, Weights
from ..files.gguf import GGUFTensor
from ..files.small_floats import FloatMatrix
from .folder_weights import FolderWeights
from .gguf_model import LazyWeights
from .stored import NamedWeights, StoredMatrix, stored_matrix, stored_tensor


class AskingWeights(NamedWeights):
    """A mapping of weights that reports to two functions while the weights are read. Both functions can raise
    an exception to stop the loading.

    looked: a function that the class calls with the tensor's name after each read of a tensor
    pause: a function that LazyWeights and FolderWeights call again and again during long conversions
    """

    def __init__(self, weights: Weights, looked: Callable[[str], None], pause: Callable[[], None]):
        self.names = self._weights = weights
        self._looked = looked
        if isinstance(weights, LazyWeights | FolderWeights):
            weights.pause = pause

    def __getitem__(self, name: str) -> np.ndarray:
        found = self._weights[name]
        self._looked(name)
        return found

    def blocks_of(self, module: str) -> StoredMatrix | FloatMatrix | None:
        found = stored_matrix(self._weights, module)
        if found is not None:
            self._looked(f"{module}.weight")
        return found

    def stored_tensor(self, module: str) -> GGUFTensor | None:
        return stored_tensor(self._weights, module)


def watched_weights(model: Model, watch: Watch) -> Weights:
    """Return the model's weights. While a backend reads the weights, `watch` receives the approximate number
    of bytes read so far."""
    shapes = {f"{module}.weight": rows * columns for module, (rows, columns) in matrices(model.config)}
    left = shapes | {name: size for name, (size,) in vectors(model.config)}
    each = model.bytes / model.parameters
    count = Told(watch, f"Loading {model.name}", model.bytes)
    return AskingWeights(
        model.load_weights(), lambda name: count.add(round(each * left.pop(name, 0))), lambda: count.add(0)
    )
