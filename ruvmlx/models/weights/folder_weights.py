"""This module reads the weights of a folder of safetensors files and returns them in the form that backends
need."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..files.gguf import GGUFTensor
from ..files.gguf_blocks import AffineArrays, check_finite
from ..files.mapped import release
from ..files.safetensors_file import Tensor
from ..files.small_floats import MODES, FloatFormat, FloatMatrix
from .stored import NamedWeights


@dataclass(frozen=True)
class StoragePlan:
    """The storage format of each weight in the files of a folder.

    kinds: {tensor name: kind, a key of DTYPES}
    floats: {module name: format} of the matrices of small floats
    """

    kinds: dict[str, str] = field(default_factory=dict)
    floats: dict[str, FloatFormat] = field(default_factory=dict)


PLAIN = frozenset({"F32", "F16", "BF16"})
DTYPES = {
    "plain": PLAIN,
    "scale": PLAIN,
    "packed": {"U32"},
    "words": {"U32"},
    "bytes": {"U8"},
    "fp8": {"F8_E4M3"},
}
AFFINE_PARTS = ("weight", "scales", "biases")


class FolderWeights(NamedWeights):
    """The weights of a folder, most of them as views of the files. The first read of a tensor of floats
    checks its numbers for NaN and infinity. A read of a matrix of small floats converts the matrix; the class
    keeps only the last converted matrix."""

    def __init__(self, tensors: Mapping[str, Tensor], plan: StoragePlan):
        self._tensors, self._plan = tensors, plan
        self._checked: set[str] = set()
        self.names = dict.fromkeys(self._affine_names())
        self._last: tuple[str, AffineArrays | None] = ("", None)
        # A long conversion calls this function again and again; the function can raise an exception to stop
        # the conversion.
        self.pause: Callable[[], None] = lambda: None

    def _affine_names(self) -> Iterator[str]:
        """Yield the names of all arrays that this mapping returns. A matrix of small floats has the three
        names of MLX's affine layout, because a read converts it."""
        scales = {found.scales for found in self._plan.floats.values()}
        for name in self._plan.kinds:
            module = name.removesuffix(".weight")
            if module in self._plan.floats:
                yield from (f"{module}.{part}" for part in AFFINE_PARTS)
            elif name not in scales:
                yield name

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.names:
            raise KeyError(name)
        module, _, part = name.rpartition(".")
        if module in self._plan.floats and part in AFFINE_PARTS:
            return self._affine(module)[AFFINE_PARTS.index(part)]
        return self._array(name)

    def blocks_of(self, module: str) -> FloatMatrix | None:
        """Return the matrix `module` as stored if it has small floats, else None."""
        found = self._plan.floats.get(module)
        if found is None:
            return None
        rows, _ = self._tensors[f"{module}.weight"].shape
        codes = self._tensors[f"{module}.weight"].array().view(np.uint8).reshape(rows, -1)
        scales = self._array(found.scales)
        grid = scales.reshape(1, 1) if scales.ndim < 2 else scales
        return FloatMatrix(f"{module}.weight", found.type, codes, grid, found.block)

    def stored_tensor(self, module: str) -> GGUFTensor | None:
        found = self._plan.floats.get(module)
        if found is None:
            return None
        rows, cols = self._tensors[f"{module}.weight"].shape
        words = self._plan.kinds[f"{module}.weight"] == "words"
        shape = rows, cols * 32 // MODES[found.type.mode][1] if words else cols
        return GGUFTensor(f"{module}.weight", shape, found.type, 0)

    def _affine(self, module: str) -> AffineArrays:
        if self._last[0] != module or self._last[1] is None:
            stored = self.blocks_of(module)
            assert stored is not None
            self._last = module, stored.eight_bits(self.pause)
            release(stored.codes)
        assert self._last[1] is not None
        return self._last[1]

    def _array(self, name: str) -> np.ndarray:
        kind, tensor = self._plan.kinds[name], self._tensors[name]
        array = tensor.array()
        if kind in ("packed", "words", "bytes"):
            return array
        if name not in self._checked:
            check_finite(array, tensor.name)
            self._checked.add(name)
        # Scales and biases in bfloat16 become float32, because float16 does not hold all bfloat16 numbers
        # exactly.
        return array.astype(np.float32) if kind == "scale" and tensor.dtype == "BF16" else array
