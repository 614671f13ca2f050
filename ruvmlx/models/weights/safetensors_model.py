"""This module loads a folder of safetensors files (Hugging Face or mlx-community) as a Model."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CorruptFile, UnsupportedModel
from ..config.embedding_model import folder_embeds
from ..config.encoder import is_encoder
from ..config.families import family_of
from ..config.fingerprint import content_hash, fingerprint
from ..config.hf_config import Affine, config_from_json, quantization, text_config, text_name
from ..config.layout import check_shapes, check_vocab, matrices, parameter_count, vectors
from ..config.model import Model, ModelConfig, Weights
from ..config.other_models import OtherFolder, open_other, runs_elsewhere
from ..config.sampling_defaults import sampling_defaults
from ..files.json_files import read_object
from ..files.safetensors_file import ALL_BYTES, FLOAT_BYTES, ITEM_BYTES, Tensor, read_safetensors
from ..files.small_floats import FloatFormat, fp8_format, has_small_floats, is_fp8, mlx_format
from .encoder_files import EncoderFiles, open_encoder_folder
from .folder_weights import DTYPES, FolderWeights, StoragePlan
from .mpt_tensors import common_names
from .own_layouts import refuse_own_layout

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SAMPLED = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.0.self_attn.q_proj.weight",
)


@dataclass(frozen=True)
class Folder:
    """A folder whose configuration and file headers were checked. data: the part of config.json that
    describes the language model. is_wrapped: True if this language model is a part of a model for text and
    images. embeds: True if the model is trained to embed texts."""

    data: dict[str, Any]
    shape: ModelConfig
    tensors: Mapping[str, Tensor]
    plan: StoragePlan
    is_wrapped: bool
    embeds: bool

    @property
    def bytes(self) -> int:
        return sum(self.tensors[name].nbytes for name in self.plan.kinds)

    @property
    def types(self) -> dict[str, int]:
        """Return {tensor type: number of weights} for a model with matrices of small floats and no matrix in
        MLX's affine layout; {} for all other models."""
        kinds, sizes = self.plan.kinds, Counter[str]()
        if not self.plan.floats or "packed" in kinds.values():
            return {}
        for module, (rows, cols) in matrices(self.shape):
            found = self.plan.floats.get(module)
            sizes[found.type.name if found else self.tensors[f"{module}.weight"].dtype] += rows * cols
        return dict(sizes)

    @property
    def layout(self) -> dict[str, tuple]:
        """Return {name of a tensor: (type, shape)}."""
        return {t.name: (t.dtype, t.shape) for t in self.tensors.values()}

    @property
    def parameters(self) -> int:
        return parameter_count(self.shape)

    def load_weights(self) -> Weights:
        return FolderWeights(self.tensors, self.plan)

    def content(self) -> str:
        """Return a hash of a piece of every tensor."""
        return content_hash(self.tensors, lambda name: self.tensors[name].raw())

    def samples(self) -> Iterator[np.ndarray]:
        """Yield the raw bytes of the tensors in SAMPLED for the fingerprint. The bytes differ between two
        trainings of the same architecture."""
        return (self.tensors[n].raw() for n in SAMPLED if n in self.tensors)


def open_folder(path: Path, name: str) -> Folder | OtherFolder | EncoderFiles:
    """Read the configuration and the file headers of a folder. For a model that ruvmlx's own decoder runs,
    check that the configuration and the headers agree. Do not read the tokenizer."""
    whole = read_object(path / "config.json", missing_ok=False)
    if is_encoder(whole):
        return open_encoder_folder(path, whole, _read_all(path, ALL_BYTES), name)
    if runs_elsewhere(whole):
        return open_other(whole, _read_all(path, ALL_BYTES), name)
    data = text_config(whole, name)
    wrapped = data is not whole
    found = _read_all(path, FLOAT_BYTES if has_small_floats(data) else ITEM_BYTES)
    tensors = _drop_unused(_text_tensors(found) if wrapped else found, data)
    embeds = folder_embeds(path, name, data.get("model_type"))
    if embeds:
        tensors, data = _with_head(tensors, data)
    config = config_from_json(data, "lm_head.weight" in tensors, name)
    if config.model_type == "mpt":
        tensors = common_names(tensors, config)
    return Folder(data, config, tensors, _plan(tensors, config, data, name), wrapped, embeds)


def load_folder(path: Path, name: str) -> Model:
    """Load a folder as a Model. The files that ruvmlx uses are checked, except the values of the weights."""
    from ..text.tokenizer_process import ProcessTokenizer

    folder = open_folder(path, name)
    generation = read_object(path / "generation_config.json")
    tokenizer = ProcessTokenizer(path, [folder.data.get("eos_token_id"), generation.get("eos_token_id")])
    check_vocab(tokenizer.vocab_size, folder.shape.vocab_size, name)
    return Model(
        name=name,
        path=path,
        format="safetensors",
        shape=folder.shape,
        tokenizer=tokenizer,
        load_weights=folder.load_weights,
        fingerprint=fingerprint(folder.shape, folder.layout, folder.samples()),
        content=folder.content,
        parameters=folder.parameters,
        bytes=folder.bytes,
        default_sampling=sampling_defaults(generation, folder.shape.model_type, [name, path.name]),
        types=folder.types,
        wrapped=folder.is_wrapped,
        embeds=folder.embeds,
    )


def _read_all(path: Path, known: Mapping[str, int] = ITEM_BYTES) -> dict[str, Tensor]:
    """Return {name: tensor} for all tensors of all weight files. known: as in read_safetensors."""
    found: dict[str, Tensor] = {}
    for file in _files(path):
        for name, tensor in read_safetensors(file, known).items():
            if name in found:
                raise CorruptFile(f"tensor {name[:60]!r} is in both {found[name].file} and {file.name}.")
            found[name] = tensor
    return found


def _files(path: Path) -> list[Path]:
    """Return the weight files that model.safetensors.index.json names. Without this index, return
    model*.safetensors, else weights*.safetensors."""
    index = read_object(path / "model.safetensors.index.json")
    if index:
        return [_shard(path, name) for name in _shard_names(index)]
    files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("weights*.safetensors"))
    if files:
        return files
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise UnsupportedModel(
            f"{path.name}: {pickles[0]} is a pickle, which can run code; only safetensors are read. "
            "Get the model in safetensors form."
        )
    refuse_own_layout(path, path.name)
    raise CorruptFile(f"{path.name}: no model*.safetensors in this folder. Fetch the model again.")


def _shard_names(index: dict[str, Any]) -> list[str]:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()) or not where:
        raise CorruptFile("model.safetensors.index.json names no files (weight_map). Fetch the model again.")
    return sorted(set(where.values()))


def _shard(path: Path, name: str) -> Path:
    """Return the path of a weight file that the index names. Raises CorruptFile if the file is missing or not
    in the index's folder."""
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise CorruptFile(
            f"model.safetensors.index.json names {name[:60]!r}, which is not a safetensors file beside it."
        )
    if not (path / name).is_file():
        raise CorruptFile(f"{path.name}: {name} is missing. Fetch the model again.")
    return path / name


def _text_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the language model under mlx-lm's names, without the tensors of the part that
    reads images."""
    vision = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )
    return {text_name(name): t for name, t in tensors.items() if not name.startswith(vision)}


def _with_head(tensors: dict[str, Tensor], data: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an embedding model under the names of a model with an output head, and its
    config.json. If the files have no lm_head.weight, the output head is tied to the embedding."""
    if "embed_tokens.weight" in tensors:
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return tensors, data if "lm_head.weight" in tensors else data | {"tie_word_embeddings": True}


def _drop_unused(tensors: dict[str, Tensor], data: Mapping[str, Any]) -> dict[str, Tensor]:
    """Remove the tensors that ruvmlx does not use: precomputed RoPE tables, an output head that is tied to
    the embedding, and the scales of fp8 activations (ruvmlx computes activations in 16 or 32 bits)."""
    tied = data.get("tie_word_embeddings") is True
    unused = ("rotary_emb.inv_freq", *([".activation_scale"] if is_fp8(data) else []))
    return {
        name: t
        for name, t in tensors.items()
        if not name.endswith(unused) and not (tied and name.startswith("lm_head."))
    }


def _plan(
    tensors: Mapping[str, Tensor], config: ModelConfig, data: dict[str, Any], where: str
) -> StoragePlan:
    """Return the storage plan after a check of the shapes and dtypes of all tensors. Raises UnsupportedModel
    for a tensor that the decoder does not have."""
    default, own = quantization(data, where)
    expected: dict[str, tuple] = {name: shape for name, shape in vectors(config)}
    plan = StoragePlan(dict.fromkeys(expected, "plain"))
    for module, shape in matrices(config):
        affine = own.get(module, default) if f"{module}.scales" in tensors else None
        scale = tensors.get(f"{module}.weight_scale_inv") if is_fp8(data) else None
        if scale is not None:
            found, shapes = fp8_format(module, shape, scale.shape, data, where)
            _add_floats(plan, module, found, "fp8", "scale")
        elif affine is None:
            shapes = {f"{module}.weight": shape}
            plan.kinds[f"{module}.weight"] = "plain"
        elif affine.mode != "affine":
            found, shapes = mlx_format(module, shape, affine.mode, where)
            _add_floats(plan, module, found, "words", "bytes")
        else:
            shapes = _packed_shapes(module, shape, affine, where)
            plan.kinds.update(zip(shapes, ("packed", "scale", "scale"), strict=True))
        expected |= shapes
    check_shapes({name: t.shape for name, t in tensors.items()}, expected, where)
    _check_kinds(tensors, plan.kinds, where, family_of(config.model_type, where).name)
    return plan


def _add_floats(plan: StoragePlan, module: str, found: FloatFormat, codes: str, scales: str) -> None:
    plan.floats[module] = found
    plan.kinds.update({f"{module}.weight": codes, found.scales: scales})


def _packed_shapes(module: str, shape: tuple[int, int], affine: Affine, where: str) -> dict[str, tuple]:
    rows, cols = shape
    if cols % affine.group_size or cols * affine.bits % 32:
        raise CorruptFile(
            f"{where}: rows of {module} have {cols} weights, not whole groups of {affine.group_size}."
        )
    groups = (rows, cols // affine.group_size)
    packed = (rows, cols * affine.bits // 32)
    return {f"{module}.weight": packed, f"{module}.scales": groups, f"{module}.biases": groups}


def _check_kinds(tensors: Mapping[str, Tensor], kinds: Mapping[str, str], where: str, family: str) -> None:
    for name, kind in kinds.items():
        if tensors[name].dtype not in DTYPES[kind]:
            hint = "plain" if kind in ("plain", "scale") else "quantised"
            raise CorruptFile(
                f"{where}: tensor {name!r} is {tensors[name].dtype}; config.json says it is {hint}."
            )
    extra = next((name for name in tensors if name not in kinds), None)
    if extra:
        raise UnsupportedModel(f"{where}: tensor {extra[:60]!r} is no part of a {family} decoder.")
