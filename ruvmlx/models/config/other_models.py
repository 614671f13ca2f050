"""This module opens safetensors folders of models that ruvmlx's own decoder cannot run, but mlx-lm can.

The module checks the headers of the weight files and counts the parameters. Later,
backends/mlx/any_backend.py loads the model with mlx-lm.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CorruptFile, UnsupportedModel
from ..files.safetensors_file import Tensor
from ..files.small_floats import is_fp8
from .encoder import is_encoder
from .families import has_decoder
from .fingerprint import content_hash
from .model import ModelShape, OtherShape, Weights

_TYPE = re.compile(r"[\w-]{1,64}", re.ASCII)
_NAMES = {  # {field of ModelShape: its names in the config.json files of different architectures}
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_context": ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length"),
}
# the values of quant_method that mlx-lm supports
_METHODS = ("mxfp4", "mxfp8", "fp8", "compressed-tensors", "modelopt")
_SAMPLED = 4  # the number of tensors whose bytes are a part of the fingerprint
# max_context (tokens) if config.json names none, as for state space models
_USUAL_CONTEXT = 4096


@dataclass(frozen=True)
class OtherFolder:
    """A folder whose configuration and file headers were checked. data: the content of config.json. bytes:
    the number of bytes of the tensors in the files."""

    data: Mapping[str, Any]
    shape: ModelShape
    tensors: Mapping[str, Tensor]
    parameters: int
    bytes: int
    embeds: bool = False  # always False, because the class `Folder` opens embedding models

    @property
    def types(self) -> dict[str, int]:
        return {}

    @property
    def layout(self) -> dict[str, tuple]:
        """Return {name of a tensor: (type, shape)}."""
        return {t.name: (t.dtype, t.shape) for t in self.tensors.values()}

    @property
    def is_wrapped(self) -> bool:
        """Return True if the folder is a model for text and images, whose language model is described in
        `text_config`."""
        return isinstance(self.data.get("text_config"), dict)

    def load_weights(self) -> Weights:
        """Raise UnsupportedModel, because mlx-lm reads the files itself."""
        raise UnsupportedModel(f"a model of type {self.shape.model_type} is read by mlx-lm alone.")

    def content(self) -> str:
        """Return a hash of a piece of every tensor."""
        return content_hash(self.tensors, lambda name: self.tensors[name].raw())

    def samples(self) -> Iterator[np.ndarray]:
        """Yield the raw bytes of the _SAMPLED largest tensors for the fingerprint. The bytes differ between
        two trainings of the same architecture."""
        largest = sorted(self.tensors.values(), key=lambda tensor: (-tensor.nbytes, tensor.name))
        return (tensor.raw() for tensor in largest[:_SAMPLED])


def mlx_lm_runs(model_type: Any) -> bool:
    """Return True if the installed mlx-lm has code for this model_type. The function imports mlx-lm only if
    mlx-lm's folder of models has no file `<model_type>.py`."""
    spec = find_spec("mlx_lm")
    if not isinstance(model_type, str) or not _TYPE.fullmatch(model_type) or spec is None:
        return False
    folders = [Path(place) / "models" for place in spec.submodule_search_locations or ()]
    if any((folder / f"{model_type}.py").is_file() for folder in folders):
        return True
    from ...platform import mlxlm

    return model_type in mlxlm.utils().MODEL_REMAPPING


def runs(data: Mapping[str, Any]) -> bool:
    """Return True if ruvmlx or mlx-lm can run the model with the config.json `data`."""
    return has_decoder(data) or is_encoder(data) or runs_elsewhere(data)


def runs_elsewhere(data: Mapping[str, Any]) -> bool:
    """Return True if mlx-lm can run the model with the config.json `data` and ruvmlx cannot, because of the
    model's architecture or the format of its weights."""
    return (not has_decoder(data) or bool(weights_format(data))) and mlx_lm_runs(data.get("model_type"))


def weights_format(data: Mapping[str, Any]) -> str:
    """Return the name of the weights' format (quant_method) if mlx-lm supports the format and ruvmlx does
    not; else ""."""
    text = data.get("text_config")
    tables = [data.get("quantization"), data.get("quantization_config")]
    tables += [text.get("quantization_config")] if isinstance(text, dict) else []
    named = [str(table.get("quant_method")) for table in tables if isinstance(table, dict)]
    ours = any(is_fp8({"quantization_config": table}) for table in tables)
    return next((name for name in named if name in _METHODS and not (ours and name == "fp8")), "")


def open_other(data: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> OtherFolder:
    """Return the description of a model folder that only mlx-lm can run. data: the content of config.json.
    tensors: the tensors in the files' headers. where: the model's name in errors. Raises UnsupportedModel if
    the model needs Python code from its own folder."""
    if "model_file" in data:
        raise UnsupportedModel(
            f"{where}: config.json names Python code of the model's own (model_file), which is never run; "
            "choose a model that mlx-lm runs without it."
        )
    shape = shape_from_json(data, where)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return OtherFolder(data, shape, tensors, _parameters(tensors, data), size)


def shape_from_json(data: Mapping[str, Any], where: str) -> ModelShape:
    """Return the model's sizes from config.json, or from its object `text_config` (models for text and
    images)."""
    text = data.get("text_config")
    text = text if isinstance(text, dict) else {}
    found = {field: _first(names, data, text) for field, names in _NAMES.items()}
    found["max_context"] = found["max_context"] or _USUAL_CONTEXT
    missing = next((field for field, value in found.items() if value is None), None)
    if missing:
        raise CorruptFile(
            f"{where}: config.json has none of {', '.join(_NAMES[missing])} as a positive number."
        )
    tied = data.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    sizes = {field: int(value or 0) for field, value in found.items()}
    kind, weights = str(data["model_type"]), weights_format(data)
    return OtherShape(model_type=kind, tie_word_embeddings=tied is True, weights=weights, **sizes)


def _first(names: tuple[str, ...], *tables: Mapping[str, Any]) -> int | None:
    values = [table.get(name) for table in tables for name in names]
    return next((v for v in values if type(v) is int and 0 < v < 1 << 31), None)


def _parameters(tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> int:
    """Return the number of weights in all tensors. A matrix quantised in MLX's formats has as many weights as
    it has scales, times the number of weights that share a scale."""
    table = data.get("quantization") or data.get("quantization_config") or {}
    usual = table.get("group_size") if isinstance(table, dict) else None
    total = 0
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name.removesuffix('.weight')}.scales")
        if name.endswith((".scales", ".biases")) and f"{name.rpartition('.')[0]}.weight" in tensors:
            continue
        if name.endswith(".weight") and scales is not None and tensor.dtype == "U32":
            total += prod(scales.shape) * _group(tensor, scales, usual)
        else:
            total += prod(tensor.shape)
    return total


def _group(packed: Tensor, scales: Tensor, usual: Any) -> int:
    """Return the number of weights of a quantised matrix that share a scale. If the scales are bytes, the
    weights are small floats: nvfp4 has groups of 16 weights (two words of codes for each scale), and the
    other formats have groups of 32."""
    if scales.dtype == "U8":
        return 16 if prod(packed.shape) == 2 * prod(scales.shape) else 32
    return usual if type(usual) is int else 64
