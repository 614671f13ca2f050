"""This module divides a model into shards. A shard is a model with fewer attention heads and MLP neurons.

The rows of q, k, v, gate and up are divided, and the columns of o and down, so the sum of the outputs of o
(or down) over all shards is the whole model's output (Shoeybi et al. 2019). Rank 0 has the embedding, the
output head, and the biases of o and down, which must be added once.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

import numpy as np

from ...errors import UnsupportedModel
from ...lora.base_lora import BaseLoRA, Pair
from ...models.config.layout import matrices
from ...models.config.model import Model, ModelConfig, Weights
from ...models.files.gguf import GGUFTensor
from ...models.files.small_floats import FloatMatrix
from ...models.weights.stored import NamedWeights, StoredMatrix, stored_matrix, stored_tensor

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")


class Bounds(NamedTuple):
    """The query heads, key-value heads and neurons of one rank, as ranges (start, stop) of numbers of a
    row."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    neurons: tuple[int, int]

    def of(self, module: str) -> tuple[int, int]:
        """Return the range of the rows (of o and down: the columns) of a matrix."""
        if module in ("k_proj", "v_proj"):
            return self.keys
        return self.queries if module in ("q_proj", "o_proj") else self.neurons


@dataclass(frozen=True)
class Part:
    """The part of a model that one rank has. neurons: the range of the rank's MLP neurons."""

    config: ModelConfig
    rank: int
    ranks: int
    neurons: tuple[int, int]

    @classmethod
    def of(cls, model: Model, rank: int, ranks: int) -> "Part":
        """Raise UnsupportedModel if the model cannot be divided into this number of shards."""
        config, weights = model.config, model.load_weights()
        _check(model, ranks)
        block, where = _block(weights, config, "down_proj")
        blocks = config.intermediate_size // block
        if blocks < ranks:
            raise _cannot(model, ranks, f"{where} has {blocks} blocks of {block} columns")
        start, stop = (block * (blocks * r // ranks) for r in (rank, rank + 1))
        part = cls(config, rank, ranks, (start, stop if rank < ranks - 1 else config.intermediate_size))
        block, where = _block(weights, config, "o_proj")
        each = config.n_heads // ranks * config.head_dim
        if each % block:
            raise _cannot(model, ranks, f"{where} has blocks of {block} columns, and a rank would get {each}")
        return part

    @property
    def bounds(self) -> Bounds:
        queries, keys = (
            heads // self.ranks * self.config.head_dim
            for heads in (self.config.n_heads, self.config.n_kv_heads)
        )
        r = self.rank
        return Bounds((r * queries, (r + 1) * queries), (r * keys, (r + 1) * keys), self.neurons)

    @property
    def shape(self) -> ModelConfig:
        """Return the configuration of the shard. The shards of ranks above 0 have one row of the embedding,
        which they do not use."""
        whole = self.config
        mine = replace(
            whole,
            n_heads=whole.n_heads // self.ranks,
            n_kv_heads=whole.n_kv_heads // self.ranks,
            intermediate_size=self.neurons[1] - self.neurons[0],
        )
        if self.rank == 0:
            return mine
        return replace(mine, vocab_size=1, tie_word_embeddings=True, biases=whole.biases.difference(COLUMNS))

    def shard(self, model: Model) -> Model:
        return replace(model, shape=self.shape, load_weights=lambda: ShardWeights(model.load_weights(), self))

    def lora(self, base: BaseLoRA | None) -> BaseLoRA | None:
        """Return this rank's part of a base LoRA. Only rank 0 has the changes of the output head and of the
        embedding."""
        if base is None:
            return None
        pairs = {
            place: self._pair(place[0], pair)
            for place, pair in base.pairs.items()
            if place[0] in (*ROWS, *COLUMNS) or self.rank == 0
        }
        return BaseLoRA(pairs, base.scale)

    def _pair(self, module: str, pair: Pair) -> Pair:
        lora_a, lora_b = pair
        if module not in (*ROWS, *COLUMNS):
            return pair
        start, stop = self.bounds.of(module)
        if module in COLUMNS:
            return np.ascontiguousarray(lora_a[start:stop]), lora_b
        return lora_a, np.ascontiguousarray(lora_b[:, start:stop])


def _check(model: Model, ranks: int) -> None:
    config = model.config
    if config.n_kv_heads % ranks or config.n_heads % ranks:
        raise _cannot(model, ranks, f"it has {config.n_heads} heads and {config.n_kv_heads} key-value heads")
    if config.alibi_bias_max:
        raise _cannot(model, ranks, "ALiBi gives each head another bias")


def _cannot(model: Model, ranks: int, why: str) -> UnsupportedModel:
    heads = model.config.n_kv_heads
    fitting = [str(n) for n in range(2, heads + 1) if heads % n == 0 and model.config.n_heads % n == 0]
    other = (
        f"Try {' or '.join(fitting)} machines" if fitting and str(ranks) not in fitting else "Run it alone"
    )
    return UnsupportedModel(
        f"{model.name} cannot be divided evenly over {ranks} machines: {why}. {other}, or choose another "
        "model."
    )


def _block(weights: Weights, config: ModelConfig, kind: str) -> tuple[int, str]:
    """Return the number of columns at whose multiples all matrices of a kind can be cut, and the name of the
    matrix with the largest blocks."""
    found = {name: _columns(weights, name, width) for name, (_, width) in _of_kind(config, kind)}
    return lcm(*found.values()), max(found, key=lambda name: found[name])


def _of_kind(config: ModelConfig, kind: str) -> list[tuple[str, tuple[int, int]]]:
    return [(name, shape) for name, shape in matrices(config) if name.endswith(kind)]


def _columns(weights: Weights, module: str, width: int) -> int:
    """Return the number of columns of a matrix's blocks: of GGUF blocks and small floats by their type, of
    MLX's affine layout by its groups and its words of 32 codes."""
    if tensor := stored_tensor(weights, module):
        stored = tensor.type.name == "fp8" and stored_matrix(weights, module)
        return (
            lcm(tensor.type.block, stored.block[1]) if isinstance(stored, FloatMatrix) else tensor.type.block
        )
    if f"{module}.scales" not in weights:
        return 1
    return lcm(width // weights[f"{module}.scales"].shape[1], 32)


class ShardWeights(NamedWeights):
    """The weights of one shard."""

    def __init__(self, weights: Weights, part: Part):
        self._weights, self._part, self._bounds = weights, part, part.bounds
        self.names = {name: None for name in weights if self._has(name)}

    def _has(self, name: str) -> bool:
        module, _, kind = name.rpartition(".")
        if self._part.rank == 0:
            return True
        return module != HEAD and not (kind == "bias" and module.rpartition(".")[2] in COLUMNS)

    def __getitem__(self, name: str) -> np.ndarray:
        module = name.rpartition(".")[0]
        whole, (rows, columns) = self._weights[name], self._cut(module)
        if columns is None:
            return whole[rows]
        if whole.ndim == 1:  # the bias of o or down, which rank 0 adds
            return whole
        width, (start, stop) = self._width(module), columns
        ratio = whole.shape[1]
        return np.ascontiguousarray(whole[:, start * ratio // width : stop * ratio // width])

    def _cut(self, module: str) -> tuple[slice, tuple[int, int] | None]:
        """Return (the rows of a module in this shard, the range of its columns; None: all)."""
        kind = module.rpartition(".")[2]
        if kind in ROWS:
            return slice(*self._bounds.of(kind)), None
        if kind in COLUMNS:
            return slice(None), self._bounds.of(kind)
        return slice(1 if module == EMBEDDING and self._part.rank else None), None

    def _width(self, module: str) -> int:
        """Return the number of columns of o or down in the whole model."""
        config = self._part.config
        return config.n_heads * config.head_dim if module.endswith("o_proj") else config.intermediate_size

    def blocks_of(self, module: str) -> StoredMatrix | FloatMatrix | None:
        stored, (rows, columns) = stored_matrix(self._weights, module), self._cut(module)
        if stored is None:
            return None
        if isinstance(stored, StoredMatrix):
            return replace(stored, raw=np.ascontiguousarray(stored.raw[rows, _bytes(stored, columns)]))
        return _cut_floats(stored, rows, columns)

    def stored_tensor(self, module: str) -> GGUFTensor | None:
        found, (rows, columns) = stored_tensor(self._weights, module), self._cut(module)
        if found is None:
            return None
        height, width = found.shape[0], found.shape[1]
        cut = columns or (0, width)
        return replace(found, shape=(len(range(height)[rows]), cut[1] - cut[0]))


def _bytes(stored: StoredMatrix, columns: tuple[int, int] | None) -> slice:
    if columns is None:
        return slice(None)
    return slice(*(at // stored.type.block * stored.type.nbytes for at in columns))


def _cut_floats(stored: FloatMatrix, rows: slice, columns: tuple[int, int] | None) -> FloatMatrix:
    """Return a part of a matrix of 8-bit or 4-bit floats. The matrix has blocks, and each block has one
    scale. So a part ends where a block ends."""
    (height, width), (tall, wide) = stored.shape, stored.block
    start, stop, _ = rows.indices(height)
    left, right = columns or (0, width)
    codes = stored.codes[:, left * stored.codes.shape[1] // width : right * stored.codes.shape[1] // width]
    cut = replace(stored, codes=np.ascontiguousarray(codes[start:stop]))
    if stored.block == stored.shape:
        return replace(cut, block=cut.shape)
    if start % tall or left % wide:
        raise UnsupportedModel(
            f"{stored.name} has blocks of {tall} rows and {wide} columns; a machine's part begins at row "
            f"{start} and column {left}. Choose a file with MLX's 4-bit weights."
        )
    scales = stored.scales[start // tall : -(-stop // tall), left // wide : -(-right // wide)]
    return replace(cut, scales=np.ascontiguousarray(scales))
