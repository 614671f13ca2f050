"""This module finds the tensors of an encoder in a safetensors folder or a GGUF file and reads them as
float32. Both formats have the same names here: those of GGUF, such as "blk.0.attn_q.weight"."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UnsupportedModel
from ..config.encoder import (
    NOMIC,
    POSITIONS,
    TYPES,
    WORDS,
    EncoderConfig,
    encoder_tensors,
    folder_encoder,
)
from ..config.encoder_gguf import gguf_encoder
from ..config.fingerprint import content_hash
from ..config.layout import check_shapes
from ..config.model import Weights
from ..files.gguf import GGUFFile
from ..files.gguf_blocks import check_finite, plain_array
from ..files.mapped import release
from ..files.safetensors_file import Tensor
from .folder_weights import PLAIN
from .stored import NamedWeights, StoredMatrix

_ANCHOR = "embeddings.word_embeddings.weight"  # the tensor that every folder has, behind an optional prefix
_TABLES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
}
_BERT = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_NOMIC = {
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
}
_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
# a tensor is stored as an array of floats, or as GGUF blocks
Stored = np.ndarray | StoredMatrix


class EncoderWeights(NamedWeights):
    """The weights of an encoder by GGUF's names. A read of a weight gives float32 and checks for NaN and
    infinity."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Stored]):
        """read: a function that returns a tensor as it is stored"""
        self.names, self._read = dict.fromkeys(names), read
        self._table = cache(read)  # a table of which rows are read again and again

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self._read(name)
        if isinstance(stored, StoredMatrix):
            found = stored.dequantise()
            release(stored.raw)
            return found
        check_finite(stored, name)
        found = stored.astype(np.float32, copy=False)
        if found is not stored:
            release(stored)
        return found

    def rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return the rows `ids` of a matrix: [n, D] float32. The matrix itself stays as it is stored."""
        stored = self._table(name)
        if isinstance(stored, StoredMatrix):
            return stored.dequantise(ids)
        rows = stored[ids].astype(np.float32)
        check_finite(rows, name)
        return rows

    def stored_bytes(self, name: str) -> int:
        stored = self._table(name)
        return stored.raw.nbytes if isinstance(stored, StoredMatrix) else stored.nbytes


@dataclass(frozen=True)
class EncoderFiles:
    """An encoder whose configuration and file headers were checked. It has the attributes that the other
    kinds of model files have (safetensors_model.Folder).

    layout: {name of a tensor: (type, shape)}
    read, raw: functions of a name that return the tensor as it is stored, and its bytes
    """

    shape: EncoderConfig
    layout: Mapping[str, tuple[str, tuple[int, ...]]]
    bytes: int
    read: Callable[[str], Stored]
    raw: Callable[[str], np.ndarray]
    types: Mapping[str, int] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    is_wrapped: bool = False
    embeds: bool = True

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for _, shape in self.layout.values())

    def load_weights(self) -> Weights:
        return EncoderWeights(self.layout, self.read)

    def content(self) -> str:
        """Return a hash of a piece of every tensor."""
        return content_hash(self.layout, self.raw)

    def samples(self) -> Iterator[np.ndarray]:
        """Yield the raw bytes of some tensors for the fingerprint."""
        return map(self.raw, (WORDS, "token_embd_norm.weight", "blk.0.attn_output.weight"))


def open_encoder_folder(
    path: Path, data: dict[str, Any], tensors: Mapping[str, Tensor], where: str
) -> EncoderFiles:
    """Return the encoder in a safetensors folder. data: the content of config.json. Raises UnsupportedModel
    for a tensor that ruvmlx's encoder does not have."""
    config = folder_encoder(path, data, where)
    named = _own_names(tensors, config, where)
    _check(config, {name: tensor.shape for name, tensor in named.items()}, config.position_offset, where)
    for tensor in named.values():
        if tensor.dtype not in PLAIN:
            raise UnsupportedModel(f"{where}: tensor {tensor.name[:60]!r} is {tensor.dtype}; floats are run.")
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in named.items()}
    nbytes = sum(tensor.nbytes for tensor in named.values())
    read, raw = (lambda name: named[name].array()), (lambda name: named[name].raw())
    return EncoderFiles(config, layout, nbytes, read, raw, data=data)


def open_encoder_gguf(file: GGUFFile) -> EncoderFiles:
    """Return the encoder in a GGUF file."""
    config, where = gguf_encoder(file), file.path.name
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    if len(shapes.get(TYPES, ())) == 1:  # a table of one row
        shapes[TYPES] = (1, *shapes[TYPES])
    _check(config, shapes, 0, where)
    layout = {name: (tensor.type.name, shapes[name]) for name, tensor in file.tensors.items()}

    def raw(name: str) -> np.ndarray:
        return file.raw(file.tensors[name])

    def read(name: str) -> Stored:
        tensor, shape = file.tensors[name], shapes[name]
        if tensor.type.block == 1:
            return plain_array(raw(name), tensor).reshape(shape)
        return StoredMatrix(name, tensor.type, raw(name).reshape(shape[0], -1))

    return EncoderFiles(config, layout, file.tensor_bytes, read, raw, file.types)


def _own_names(tensors: Mapping[str, Tensor], config: EncoderConfig, where: str) -> dict[str, Tensor]:
    """Return the tensors under GGUF's names, without those that no vector needs: position ids, the pooler and
    the heads of other tasks."""
    anchor = next((name for name in tensors if name.endswith(_ANCHOR)), _ANCHOR)
    prefix, nomic = anchor.removesuffix(_ANCHOR), config.model_type == NOMIC
    layers, modules = ("encoder.layers.", _NOMIC) if nomic else ("encoder.layer.", _BERT)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix(prefix).rpartition(".")
        own = _TABLES.get(module) if name.startswith(prefix) else None
        if name.startswith(prefix) and module.startswith(layers):
            layer, _, module = module.removeprefix(layers).partition(".")
            own = f"blk.{layer}.{modules.get(module, module)}"
        if own is not None:
            found[f"{own}.{_KINDS.get(kind, kind)}"] = tensor
    return found


def _check(config: EncoderConfig, shapes: Mapping[str, tuple[int, ...]], before: int, where: str) -> None:
    """Raise CorruptFile if a tensor is missing or has another shape, and UnsupportedModel for a tensor that
    the encoder does not have. before: the rows of the table of positions before position 0."""
    expected = dict(encoder_tensors(config, "blk.0.attn_qkv.weight" in shapes))
    positions = shapes.get(POSITIONS, (0,))
    if POSITIONS in expected and positions[0] >= config.max_context + before:
        expected[POSITIONS] = (positions[0], config.hidden_size)
    check_shapes(shapes, expected, where)
    extra = next((name for name in shapes if name not in expected), None)
    if extra:
        raise UnsupportedModel(f"{where}: tensor {extra[:60]!r} is no part of a {config.model_type} encoder.")
