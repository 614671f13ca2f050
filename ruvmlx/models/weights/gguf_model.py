"""This module converts a GGUF file to a ModelConfig and weights.

For some families (families.py), llama.cpp's converter reorders the q and k rows of every head: row 2i + j of
a GGUF file is row j * head_dim / 2 + i of the Hugging Face model. This module restores Hugging Face's order
of the rows. RoPE therefore rotates the same pairs of rows in all loaded models.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...errors import UnsupportedModel
from ..config.families import family_of
from ..config.gguf_config import gguf_name, read_config, rope_tensors
from ..config.layout import check_shapes, matrices, vectors
from ..config.model import ModelConfig, Weights
from ..files.gguf import GGUFFile, GGUFTensor
from ..files.gguf_blocks import check_blocks, unpack
from ..files.mapped import release
from .mpt_tensors import split_qkv
from .stored import NamedWeights, StoredMatrix


def check_gguf(file: GGUFFile) -> tuple[GGUFFile, ModelConfig]:
    """Check the configuration and the tensor shapes of a file whose header was read. Return the file, with
    its tensors under the usual names, and the configuration."""
    config = read_config(file)
    if config.model_type == "mpt":
        file = replace(file, tensors=split_qkv(file.tensors, config))
    check_tensors(file, config)
    return file, config


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Raise CorruptFile if a tensor of the decoder is missing or has a wrong shape, and UnsupportedModel if
    the file has a tensor that is not a part of the decoder (precomputed RoPE tables are allowed)."""
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
    """Return a function that loads the weights; the function becomes `Model.load_weights`."""
    return lambda: LazyWeights(file, config)


class LazyWeights(NamedWeights):
    """A mapping from mlx-lm's names to the weights of a GGUF file. A read of a weight converts it from the
    file's format.

    The class keeps only the last converted matrix, which a second read returns. A program that reads all
    matrices in order, and keeps none, therefore needs memory for at most two converted matrices.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self._file, self._config = file, config
        self._vectors = {name for name, _ in vectors(config)}
        parts = (name for m, _ in matrices(config) for name in _parts(file, m))
        self.names = dict.fromkeys([*parts, *dict(vectors(config))])
        self._last: tuple[str, dict[str, np.ndarray]] = ("", {})
        # A long conversion calls this function again and again; the function can raise an exception to stop
        # the conversion.
        self.pause: Callable[[], None] = lambda: None

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.names:
            raise KeyError(name)
        if name in self._vectors:
            return _vector(self._file, self._config, name)
        module, _, kind = name.rpartition(".")
        if self._last[0] != module:
            self._last = (module, _matrix(self._file, self._config, module, self.pause))
        return self._last[1][kind]

    def blocks_of(self, module: str) -> StoredMatrix | None:
        """Return the matrix's GGUF blocks, with q and k rows in Hugging Face's order; None for a matrix that
        is not quantised."""
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
        if f"{module}.weight" not in self.names:
            raise KeyError(module)
        return self._file.tensors[gguf_name(f"{module}.weight")]


def _parts(file: GGUFFile, module: str) -> list[str]:
    """Return the names of the arrays that form the matrix `module`."""
    packed = file.tensors[gguf_name(f"{module}.weight")].type.block > 1
    return [f"{module}.{kind}" for kind in (("weight", "scales", "biases") if packed else ("weight",))]


def _matrix(
    file: GGUFFile, config: ModelConfig, module: str, pause: Callable[[], None]
) -> dict[str, np.ndarray]:
    """Return the arrays of a matrix by name, {"weight"} or {"weight", "scales", "biases"}, with q and k rows
    in Hugging Face's order."""
    tensor = file.tensors[gguf_name(f"{module}.weight")]
    raw = file.raw(tensor)
    parts = unpack(raw, tensor, pause)
    heads = _rope_heads(config, module)
    # the arrays in `parts` are copies, so the memory of the mapped file's bytes `raw` can be released
    if heads or len(parts) > 1:
        parts = {kind: half_split_rows(a, heads) if heads else a for kind, a in parts.items()}
        release(raw)
    return parts


def _vector(file: GGUFFile, config: ModelConfig, name: str) -> np.ndarray:
    """Return a norm's weight or a bias as an array of floats. Raises UnsupportedModel if the file stores the
    norm or bias quantised, which is rare."""
    tensor = file.tensors[gguf_name(name)]
    parts = unpack(file.raw(tensor), tensor)
    if "scales" in parts:
        raise UnsupportedModel(
            f"{file.path.name}: {tensor.name} is stored as {tensor.type.name}; F32 was expected."
        )
    heads = _rope_heads(config, name.removesuffix(".bias")) if name.endswith(".bias") else 0
    return half_split_rows(parts["weight"], heads) if heads else parts["weight"]


def _rope_heads(config: ModelConfig, module: str) -> int:
    """Return the number of heads in the module's rows if the GGUF file has these rows in interleaved order;
    else 0."""
    if not family_of(config.model_type, "").interleaved:
        return 0
    if module.endswith("q_proj"):
        return config.n_heads
    return config.n_kv_heads if module.endswith("k_proj") else 0


def half_split_rows(array: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder the rows [out, ...] of each head from GGUF's interleaved order (0, h, 1, h + 1, ...; h =
    head_dim / 2) to Hugging Face's order (0, 1, 2, ...)."""
    rest = array.shape[1:]
    pairs = array.reshape(n_heads, -1, 2, *rest)  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1, *rest)
