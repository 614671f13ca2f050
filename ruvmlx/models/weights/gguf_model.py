"""Converts a GGUF file to a ModelConfig and Weights.

For some families (families.py), llama.cpp's converter interleaves the q and k rows of every head: row 2i + j
is the row that Hugging Face calls j * head_dim / 2 + i. This module puts the rows back in order. So after
loading, RoPE is half-split everywhere.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ...errors import UnsupportedModel
from ..config.families import family_of
from ..config.gguf_config import gguf_name, read_config, rope_tensors
from ..config.layout import check_shapes, matrices, vectors
from ..config.model import ModelConfig, Weights
from ..files.gguf import GGUFFile, GGUFTensor
from ..files.gguf_blocks import check_blocks, unpack
from ..files.gguf_split import read_whole
from ..files.mapped import release
from .stored import StoredMatrix


def open_gguf(path: Path) -> tuple[GGUFFile, ModelConfig]:
    """Open a file, or all parts of a split one. The header, the configuration and the tensor shapes are
    checked."""
    file = read_whole(path)
    config = read_config(file)
    check_tensors(file, config)
    return file, config


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Check that all tensors of the decoder are present with their shapes, and that there are no others."""
    expected: dict[str, tuple] = {gguf_name(f"{m}.weight"): shape for m, shape in matrices(config)}
    expected |= {gguf_name(name): shape for name, shape in vectors(config)}
    check_shapes({name: t.shape for name, t in file.tensors.items()}, expected, file.path.name)
    known = {*expected, *rope_tensors(config)}
    for name in file.tensors:
        if name not in known and not name.endswith((".attn_rot_embd", ".rot_embd")):
            raise UnsupportedModel(
                f"{file.path.name}: tensor {name[:60]!r} is no part of a "
                f"{family_of(config.model_type, file.path.name).name} decoder."
            )


def weights_loader(file: GGUFFile, config: ModelConfig) -> Callable[[], Weights]:
    """Return what `Model.load_weights` calls: the slow part of loading."""
    return lambda: LazyWeights(file, config)


class LazyWeights(Mapping[str, np.ndarray]):
    """The weights of a file, converted when they are read.

    Only the last matrix is kept. So reading all matrices in order needs memory for only one.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self._file, self._config = file, config
        self._vectors = {name for name, _ in vectors(config)}
        self._names = [name for m, _ in matrices(config) for name in _parts(file, m)] + list(
            dict(vectors(config))
        )
        self._known = frozenset(self._names)
        self._last: tuple[str, dict[str, np.ndarray]] = ("", {})
        # called while a large matrix is converted; may raise an exception
        self.pause: Callable[[], None] = lambda: None

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._known:
            raise KeyError(name)
        if name in self._vectors:
            return _vector(self._file, self._config, name)
        module, _, kind = name.rpartition(".")
        if self._last[0] != module:
            self._last = (module, _matrix(self._file, self._config, module, self.pause))
        return self._last[1][kind]

    def blocks_of(self, module: str) -> StoredMatrix | None:
        """Return the matrix's blocks, with q and k rows in order; None for plain numbers."""
        tensor = self._tensor(module)
        if tensor.type.block == 1:
            return None
        raw = self._file.raw(tensor).reshape(tensor.shape[0], -1)
        check_blocks(raw, tensor.type, tensor.name)
        heads = _rope_heads(self._config, module)
        if not heads:
            return StoredMatrix(tensor.name, tensor.type, raw)
        ordered = half_split_rows(raw, heads)
        release(raw)
        return StoredMatrix(tensor.name, tensor.type, ordered)

    def stored_tensor(self, module: str) -> GGUFTensor:
        return self._tensor(module)

    def _tensor(self, module: str) -> GGUFTensor:
        if f"{module}.weight" not in self._known:
            raise KeyError(module)
        return self._file.tensors[gguf_name(f"{module}.weight")]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _parts(file: GGUFFile, module: str) -> list[str]:
    """Return the names of the arrays that form a matrix."""
    packed = file.tensors[gguf_name(f"{module}.weight")].type.block > 1
    return [f"{module}.{kind}" for kind in (("weight", "scales", "biases") if packed else ("weight",))]


def _matrix(
    file: GGUFFile, config: ModelConfig, module: str, pause: Callable[[], None]
) -> dict[str, np.ndarray]:
    """Return {"weight"} or {"weight", "scales", "biases"}, with q and k rows in order."""
    tensor = file.tensors[gguf_name(f"{module}.weight")]
    raw = file.raw(tensor)
    parts = unpack(raw, tensor, pause)
    heads = _rope_heads(config, module)
    if heads or len(parts) > 1:  # copied, so the mapped original is not needed again
        parts = {kind: half_split_rows(a, heads) if heads else a for kind, a in parts.items()}
        release(raw)
    return parts


def _vector(file: GGUFFile, config: ModelConfig, name: str) -> np.ndarray:
    """Return a norm or a bias as plain numbers. These are rarely quantised, and small."""
    tensor = file.tensors[gguf_name(name)]
    parts = unpack(file.raw(tensor), tensor)
    if "scales" in parts:
        raise UnsupportedModel(
            f"{file.path.name}: {tensor.name} is stored as {tensor.type.name}; F32 was expected."
        )
    heads = _rope_heads(config, name.removesuffix(".bias")) if name.endswith(".bias") else 0
    return half_split_rows(parts["weight"], heads) if heads else parts["weight"]


def _rope_heads(config: ModelConfig, module: str) -> int:
    """Return how many heads the module's rows belong to if they are interleaved; else 0."""
    if not family_of(config.model_type, "").interleaved:
        return 0
    if module.endswith("q_proj"):
        return config.n_heads
    return config.n_kv_heads if module.endswith("k_proj") else 0


def half_split_rows(array: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows [out, ...] of each head: interleaved (0, h, 1, h + 1, ...; h = head_dim / 2) -> half-split."""
    rest = array.shape[1:]
    pairs = array.reshape(n_heads, -1, 2, *rest)  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1, *rest)
