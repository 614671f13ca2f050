"""This module fuses an adapter into a model. The module writes a model folder with the changed weights, which
other tools can load.

    W' = W + scale * (lora_a lora_b)^T      computed in float32, stored as float16, bfloat16 or float32
    E' = E + scale * lora_a lora_b          of the embedding E [V, D]

Quantised matrices that the adapter does not change stay quantised, unless `dequantise` is True. (Quantised
matrices are in MLX's affine layout, which rounds GGUF's Q2_K, Q3_K and Q6_K, and nvfp4, mxfp8 and fp8, to 8
bits.) Changed matrices are not quantised again, because the rounding would remove most of the change. If the
adapter changes the output head or the embedding, the head is no longer tied to the embedding: a change of one
of the two leaves the other's weights as they are.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import StoreError, UsageError
from ..models.config.layout import matrices, vectors
from ..models.config.model import Model, Weights
from ..models.files.affine import dequantise
from ..models.files.safetensors_writer import write_json, write_stream
from ..models.weights.hf_write import config_of, write_companions
from ..models.weights.stored import rounded_matrix
from ..platform.files import folder_beside, sync_folder
from .base_lora import BaseLoRA, Pair
from .interchange import full_name

_ROWS = 4096  # the number of rows that are computed at a time, so that a large head does not need much memory
_EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class _Source:
    """A model's weights, the adapter's changes, and the form in which the new weights are written.

    pairs: {full name of a matrix: (lora_a, lora_b)}
    dtype: the dtype in which matrices that are not quantised are written
    dequantise: True to write all quantised matrices in `dtype`
    """

    model: Model
    weights: Weights
    pairs: Mapping[str, Pair]
    scale: float
    dtype: np.dtype
    dequantise: bool

    def parts(self, module: str) -> list[str]:
        """Return the names of the arrays that store a matrix in the new folder."""
        if self.keeps(module):
            return [f"{module}.{kind}" for kind in ("weight", "scales", "biases")]
        return [f"{module}.weight"]

    def keeps(self, module: str) -> bool:
        """Return True if the matrix is quantised and stays quantised in the new folder."""
        packed = f"{self.origin(module)}.scales" in self.weights
        return packed and not self.dequantise and module not in self.pairs

    def origin(self, module: str) -> str:
        """Return the module whose weights the matrix has in the model: a tied output head has the
        embedding's."""
        return module if f"{module}.weight" in self.weights else _EMBEDDING


def fuse(
    model: Model, change: BaseLoRA, folder: Path, dtype: str | None = None, dequantise: bool = False
) -> None:
    """Write a new model folder with the adapter's change fused into the weights.

    dtype: the dtype of the matrices that are not quantised; None for the model's own dtype
    dequantise: True to write all quantised matrices in `dtype`, for tools that cannot read MLX's layout
    """
    if folder.exists():
        raise UsageError(f"{folder} exists; name a new folder.")
    weights = model.load_weights()
    pairs = {full_name(place): pair for place, pair in change.pairs.items()}
    kind = _dtype(dtype or _own_dtype(weights))
    source = _Source(model, weights, pairs, change.scale, kind, dequantise)
    try:  # write to a temporary folder and rename it, so that `folder` is complete or does not exist
        with folder_beside(folder) as fresh:
            _write(source, fresh)
            sync_folder(fresh)
            fresh.rename(folder)
            sync_folder(folder.parent)
    except OSError as error:
        raise StoreError(f"cannot write {folder}: {error.strerror}.") from error


def _write(source: _Source, folder: Path) -> None:
    modules = dict(matrices(source.model.config))
    tied = source.model.shape.tie_word_embeddings and source.pairs.keys().isdisjoint({"lm_head", _EMBEDDING})
    if not tied:
        modules.setdefault("lm_head", modules[_EMBEDDING])
    names = [part for module in modules for part in source.parts(module)]
    names += [name for name, _ in vectors(source.model.config)]
    write_stream(folder / "model.safetensors", names, _arrays(source, modules), {"format": "mlx"})
    stored = {"torch_dtype": source.dtype.name} | _quantization(source, modules)
    write_json(folder / "config.json", config_of(source.model) | {"tie_word_embeddings": tied} | stored)
    write_companions(source.model, folder)


def _arrays(source: _Source, modules: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, np.ndarray]]:
    for module, (_, n_in) in modules.items():
        if source.keeps(module):
            for name in source.parts(module):
                stored = source.weights[source.origin(module) + name.removeprefix(module)]
                yield name, _narrow_scales(stored, source.dtype)
        else:
            yield f"{module}.weight", _fused_matrix(source, module, n_in)
    for name, _ in vectors(source.model.config):
        yield name, _cast(np.asarray(source.weights[name], np.float32), source.dtype, name)


def _narrow_scales(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return an array of a quantised matrix (codes, scales or biases) in the dtype in which the new folder
    stores the array. If `dtype` is bfloat16, float32 scales and biases that bfloat16 can hold exactly are
    written as bfloat16, because other tools compute in the dtype of the scales."""
    if array.dtype != np.float32 or dtype.name != "bfloat16":
        return array
    short = array.astype(dtype)
    return short if (short.astype(np.float32) == array).all() else array


def _fused_matrix(source: _Source, module: str, n_in: int) -> np.ndarray:
    """Return a matrix [out, in] in `source.dtype`, with the adapter's change if there is one. _ROWS rows are
    computed at a time."""
    n_out, float32 = _reader(source.weights, source.origin(module), n_in)
    out = np.empty((n_out, n_in), source.dtype)
    for at in range(0, len(out), _ROWS):
        rows = slice(at, at + _ROWS)
        w = float32(rows)
        if module in source.pairs:
            a, b = source.pairs[module]
            change = a[rows] @ b if module == _EMBEDDING else b[:, rows].T @ a.T
            w = w + np.float32(source.scale) * change
        out[rows] = _cast(w, source.dtype, module)
    return out


def _reader(weights: Weights, module: str, n_in: int) -> tuple[int, Callable[[slice], np.ndarray]]:
    """Return the number of rows of a stored matrix, and a function that returns a slice of its rows as
    float32."""
    if stored := rounded_matrix(weights, module):
        return stored.shape[0], stored.dequantise
    parts = [weights[f"{module}.weight"]]
    if f"{module}.scales" in weights:
        parts += [weights[f"{module}.scales"], weights[f"{module}.biases"]]
    return len(parts[0]), lambda rows: _float32([p[rows] for p in parts], n_in)


def _float32(parts: list[np.ndarray], n_in: int) -> np.ndarray:
    if len(parts) == 1:
        return np.asarray(parts[0], np.float32)
    return dequantise(parts[0], parts[1], parts[2], n_in)


def _cast(w: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        out = w.astype(dtype)
    if not np.isfinite(out.astype(np.float32)).all():
        raise UsageError(f"{name} does not fit into {dtype.name}; choose --dtype bfloat16 or float32.")
    return out


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _own_dtype(weights: Weights) -> str:
    """Return the model's own dtype: the dtype of the embedding, or of its scales if the embedding is
    quantised (bfloat16 if it can hold float32 scales exactly)."""
    found = weights[f"{_EMBEDDING}.weight"]
    if f"{_EMBEDDING}.scales" not in weights:
        return found.dtype.name
    scales = weights[f"{_EMBEDDING}.scales"]
    return "float16" if scales.dtype == np.float16 else _narrow_scales(scales, _dtype("bfloat16")).dtype.name


def _quantization(source: _Source, modules: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the entry "quantization" of config.json; {} if no matrix is quantised. The entry has the most
    common format as the default, and an entry for each matrix with another format."""
    formats: dict[str, Any] = {}
    for module, (_, n_in) in modules.items():
        formats[module] = _format(source, module, n_in) if source.keeps(module) else False
    packed = [f for f in formats.values() if f]
    if not packed:
        return {}
    default = max(packed, key=packed.count)
    own = {module: f for module, f in formats.items() if f != default}
    return {"quantization": default | own}


def _format(source: _Source, module: str, n_in: int) -> dict[str, int]:
    origin = source.origin(module)
    words, groups = (source.weights[f"{origin}.{kind}"].shape[1] for kind in ("weight", "scales"))
    return {"group_size": n_in // groups, "bits": 32 * words // n_in}
