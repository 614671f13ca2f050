"""This module writes LoRA adapters in the folder formats of other tools: mlx-lm and Hugging Face PEFT.
interchange_reader.py reads them.

    mlx-lm  adapters.safetensors       model.layers.3.self_attn.q_proj .lora_a [in, r], .lora_b [r, out]
    PEFT    adapter_model.safetensors  base_model.model.<same> .lora_A.weight [r, in], .lora_B.weight [out, r]
            of the embedding           <same> .lora_embedding_A [r, V], .lora_embedding_B [D, r]

A folder in either format has an adapter_config.json. The rows of q_proj and k_proj are in Hugging Face's
order, as everywhere in this project after a model is loaded (the loader reorders GGUF's interleaved q and k
rows).

If the language model is a part of a model for images, the names of its modules have a prefix:
`language_model.` in mlx-lm, and `model.language_model.` instead of `model.` in PEFT.

PEFT can change lm_head (the output head) of any model. mlx-lm can change lm_head only if it is not tied to
the embedding. With a tied embedding, mlx-lm's model has no lm_head, and mlx-lm refuses a file that changes
lm_head. So this module refuses to write a file for mlx-lm that changes a tied lm_head (except with 4 bits,
which only ruvmlx reads). mlx-lm's change of a tied embedding changes the output head, too. So the module
also refuses to write a change of a tied embedding for mlx-lm.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import StoreError, UsageError
from ..models.config.layout import matrices
from ..models.config.model import ModelConfig, ModelShape
from ..models.files.safetensors_writer import write_json, write_safetensors
from ..platform.files import folder_beside, swap, sync_folder
from .base_lora import EMBEDDING, BaseLoRA, Pair, Place, place_shape
from .merge import HEAD
from .micro_lora import MicroLoRA
from .quantised import BITS, GROUP, pack_pair

CONFIG = "adapter_config.json"
FILES = {"mlx-lm": "adapters.safetensors", "peft": "adapter_model.safetensors"}
PACKED = "adapters-4bit.safetensors"
_STAGE = ".new"
_OWN = {CONFIG, PACKED, *FILES.values()}
_LEFTOVERS = {_STAGE, *(f".{name}.new" for name in _OWN)}  # temporary files that a killed process can leave
PEFT_PREFIX = "base_model.model."
# the ends of the names of lora_a^T and lora_b^T in PEFT's files: of a linear layer, of the embedding
PEFT_ENDS = (".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def full_name(place: Place) -> str:
    """Return the full name of the matrix at a place (module, layer): ("up_proj", 3) ->
    "model.layers.3.mlp.up_proj"; ("lm_head", 0) -> "lm_head"."""
    short = _short_name(place[0])
    return short if place in (HEAD, EMBEDDING) else f"model.layers.{place[1]}.{short}"


def _short_name(module: str) -> str:
    """Return mlx-lm's name of a module in its layer, for example "self_attn.q_proj". The output head and the
    embedding are in no layer, so their names are whole."""
    if module in (HEAD[0], EMBEDDING[0]):
        return module if module == HEAD[0] else f"model.{module}"
    return f"{'self_attn' if module in _ATTENTION else 'mlp'}.{module}"


def places(config: ModelShape) -> dict[str, tuple[Place, tuple[int, int]]]:
    """Return {full name: (place, (inputs, outputs))} of every linear layer, and of the embedding, that an
    adapter of this model can change."""
    found: dict[str, tuple[Place, tuple[int, int]]] = {}
    for name, (n_out, n_in) in matrices(config) if isinstance(config, ModelConfig) else ():
        if name.startswith("model.layers."):
            parts = name.split(".")
            found[name] = ((parts[-1], int(parts[2])), (n_in, n_out))
    if shape := place_shape(config, *EMBEDDING):
        found[full_name(EMBEDDING)] = (EMBEDDING, shape)
    return found | {"lm_head": (HEAD, (config.hidden_size, config.vocab_size))}


# Join a base LoRA and a MicroLoRA to one change, and divide a change into these two ---------------


def combine_adapter(base: BaseLoRA | None, micro: MicroLoRA) -> BaseLoRA:
    """Return one change that has the effect of a base LoRA and a MicroLoRA together. If both change the
    output head, the result has one pair of factors for the head. The rank of this pair is the sum of the two
    ranks. The conversion of the MicroLoRA's lora_b to the base LoRA's scale rounds. All else is exact."""
    if not micro.lora_b.any():
        return base or BaseLoRA({})
    if base is None or not base.pairs:
        return BaseLoRA({HEAD: (micro.lora_a, micro.lora_b)}, micro.scale)
    pair = micro.lora_a, micro.lora_b * np.float32(micro.scale / base.scale)
    if HEAD in base.pairs:
        a, b = base.pairs[HEAD]
        pair = np.ascontiguousarray(np.hstack([a, pair[0]])), np.ascontiguousarray(np.vstack([b, pair[1]]))
    return replace(base, pairs={**base.pairs, HEAD: pair})


def divide_adapter(change: BaseLoRA, fresh: MicroLoRA) -> tuple[BaseLoRA | None, MicroLoRA]:
    """Divide a change into a base LoRA and a MicroLoRA. A change of the output head alone, of at most the
    MicroLoRA's rank, becomes a MicroLoRA. Any other change becomes a base LoRA, and the MicroLoRA is then
    `fresh`.

    If the change has a smaller rank than the MicroLoRA, the missing columns of lora_a come from `fresh`, and
    their rows of lora_b are zero.
    """
    if set(change.pairs) != {HEAD} or change.rank > fresh.rank:
        return (change if change.pairs else None), fresh
    a, b = change.pairs[HEAD]
    lora_a, lora_b = fresh.lora_a.copy(), np.zeros_like(fresh.lora_b)
    lora_a[:, : a.shape[1]], lora_b[: b.shape[0]] = a, b * np.float32(change.scale / fresh.scale)
    return None, replace(fresh, lora_a=lora_a, lora_b=lora_b)


# writing --------------------------------------------------------------------------------------------


def export(
    change: BaseLoRA,
    config: ModelShape,
    folder: Path,
    kind: str,
    bits: int = 32,
    name: str = "",
    wrapped: bool = False,
) -> None:
    """Write an adapter folder.

    kind: the format, "mlx-lm" or "peft"
    bits: the bits per weight, 32 or 4; only ruvmlx's command `adapters import` can read 4 bits
    name: the model's name, which is written into PEFT's settings
    wrapped: True if the language model is a part of a model for images
    """
    if not change.pairs:
        raise UsageError("the adapter changes nothing yet; rate some replies first.")
    if bits == BITS and kind == "peft":
        raise UsageError("PEFT has no 4-bit adapters; leave --bits out, or choose --format mlx-lm.")
    if kind == "mlx-lm" and bits != BITS and config.tie_word_embeddings and HEAD in change.pairs:
        raise UsageError(
            "mlx-lm cannot change the head of a model with tied embeddings. Choose --format peft, "
            "--without-head, or write a whole model with `ruvmlx adapters fuse`."
        )
    if kind == "mlx-lm" and bits != BITS and config.tie_word_embeddings and EMBEDDING in change.pairs:
        raise UsageError(
            "mlx-lm cannot change the embedding of a model with tied embeddings without its head. Choose "
            "--format peft, or write a whole model with `ruvmlx adapters fuse`."
        )
    with _replacing(folder) as fresh:
        if kind == "peft":
            _write_peft(change, fresh, name, wrapped)
        elif bits == BITS:
            _write_packed(change, config, fresh)
        else:
            _write_mlx_lm(change, config, fresh, wrapped)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a new folder. At the end of the with-block, the new folder replaces `folder`: in one step, or
    file by file on a system that cannot exchange two folders. Before the end, an adapter in `folder` stays
    unchanged."""
    folder = folder.resolve()
    try:
        for old in folder.iterdir() if folder.exists() else ():
            if old.name not in _LEFTOVERS | _OWN:
                raise UsageError(f"{folder} holds other files ({old.name}); name a new folder.")
        with folder_beside(folder if os.access(folder.parent, os.W_OK) else folder / "adapter") as fresh:
            yield fresh
            sync_folder(fresh)
            if not folder.exists():
                fresh.rename(folder)
            elif not swap(fresh, folder):
                _move_into(folder, fresh)
            sync_folder(folder.parent)
    except OSError as error:
        raise StoreError(f"cannot write {folder}: {error.strerror}.") from error


def _move_into(folder: Path, fresh: Path) -> None:
    """Move the files of `fresh` into `folder` one by one, for a system that cannot exchange two folders. The
    settings tell which file has the weights. So move the new weights first, then the settings, and remove the
    old files last."""
    written = sorted((file.name for file in fresh.iterdir()), key=lambda name: name == CONFIG)
    for name in written:
        os.replace(fresh / name, folder / name)
    sync_folder(folder)
    for name in (_LEFTOVERS | _OWN) - {_STAGE, *written}:
        (folder / name).unlink(missing_ok=True)


def _named_pairs(change: BaseLoRA) -> Iterator[tuple[str, Pair]]:
    """Yield (full name, pair) of each changed matrix, sorted by layer. Pairs are padded with zeros to the
    largest rank, because the settings of a folder name one rank for all matrices."""
    for place in sorted(change.pairs, key=lambda p: (p[1], p[0])):
        a, b = change.pairs[place]
        more = change.rank - a.shape[1]
        yield full_name(place), (np.pad(a, ((0, 0), (0, more))), np.pad(b, ((0, more), (0, 0))))


def _write_mlx_lm(change: BaseLoRA, config: ModelShape, folder: Path, wrapped: bool) -> None:
    tensors: dict[str, np.ndarray] = {}
    prefix = "language_model." if wrapped else ""
    for name, (a, b) in _named_pairs(change):
        tensors |= {f"{prefix}{name}.lora_a": a, f"{prefix}{name}.lora_b": b}
    write_safetensors(folder / FILES["mlx-lm"], tensors, {"format": "mlx"})
    write_json(folder / CONFIG, _mlx_lm_config(change, config, prefix))


def _mlx_lm_config(change: BaseLoRA, config: ModelShape, prefix: str = "") -> dict[str, Any]:
    """Return the content of mlx-lm's adapter_config.json. In `keys`, a module is named by its path in a
    layer, and the output head and the embedding by their full paths."""
    keys = sorted(
        {(prefix if place in (HEAD, EMBEDDING) else "") + _short_name(place[0]) for place in change.pairs}
    )
    parameters = {"rank": change.rank, "scale": change.scale, "dropout": 0.0, "keys": keys}
    return {"fine_tune_type": "lora", "num_layers": config.n_layers, "lora_parameters": parameters}


def _write_packed(change: BaseLoRA, config: ModelShape, folder: Path) -> None:
    tensors: dict[str, np.ndarray] = {}
    for name, pair in _named_pairs(change):
        for kind, packed in zip(("lora_a", "lora_b"), pack_pair(pair), strict=True):
            parts = {"weight": packed.weight, "scales": packed.scales, "biases": packed.biases}
            tensors |= {f"{name}.{kind}.{part}": w for part, w in parts.items()}
    write_safetensors(folder / PACKED, tensors, {"format": "mlx"})
    quantization = {"bits": BITS, "group_size": GROUP}
    write_json(folder / CONFIG, _mlx_lm_config(change, config) | {"quantization": quantization})


def _write_peft(change: BaseLoRA, folder: Path, name: str, wrapped: bool) -> None:
    named = {_in_transformers(layer) if wrapped else layer: pair for layer, pair in _named_pairs(change)}
    tensors: dict[str, np.ndarray] = {}
    for layer, (a, b) in named.items():
        ends = PEFT_ENDS[layer.endswith(EMBEDDING[0])]
        for end, factor in zip(ends, (a, b), strict=True):
            tensors[f"{PEFT_PREFIX}{layer}{end}"] = np.ascontiguousarray(factor.T)
    modules = {module for module, _ in change.pairs}
    write_safetensors(folder / FILES["peft"], tensors, {"format": "pt"})
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name or None,
        "r": change.rank,
        "lora_alpha": change.scale * change.rank,
        "lora_dropout": 0.0,
        # In a model for images, use full names, because the part that reads images has a q_proj, too.
        "target_modules": sorted(named if wrapped else modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / CONFIG, facts)


def _in_transformers(name: str) -> str:
    """Return the name that a module of the language model has inside transformers' model for images."""
    return re.sub(r"^model\.", "model.language_model.", name)
