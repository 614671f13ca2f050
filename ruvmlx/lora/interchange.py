"""This module reads and writes LoRA adapters in the folder formats of other tools: mlx-lm and Hugging Face
PEFT.

    mlx-lm  adapters.safetensors       model.layers.3.self_attn.q_proj .lora_a [in, r], .lora_b [r, out]
    PEFT    adapter_model.safetensors  base_model.model.<same> .lora_A.weight [r, in], .lora_B.weight [out, r]

A folder in either format has an adapter_config.json. The rows of q_proj and k_proj are in Hugging Face's
order, as everywhere in this project after a model is loaded (the loader reorders GGUF's interleaved q and k
rows).

If the language model is a part of a model for images, the names of its modules have a prefix:
`language_model.` in mlx-lm, and `model.language_model.` instead of `model.` in PEFT.

PEFT can change lm_head (the output head) of any model. mlx-lm can change lm_head only if it is not tied to
the embedding. With a tied embedding, mlx-lm's model has no lm_head, and mlx-lm refuses a file that changes
lm_head. So this module refuses to write a file for mlx-lm that changes a tied lm_head (except with 4 bits,
which only ruvmlx reads).
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import AdapterMismatch, CorruptFile, StoreError, UnsupportedModel, UsageError
from ..models.config.hf_config import text_name
from ..models.config.layout import matrices
from ..models.config.model import ModelConfig, ModelShape
from ..models.files.json_files import read_object
from ..models.files.safetensors_file import read_safetensors
from ..models.files.safetensors_writer import write_json, write_safetensors
from ..platform.files import folder_beside, swap, sync_folder
from .base_lora import BaseLoRA, Pair, Place
from .merge import HEAD
from .micro_lora import MicroLoRA
from .quantised import BITS, GROUP, Packed, pack_pair, unpack_pair

CONFIG = "adapter_config.json"
FILES = {"mlx-lm": "adapters.safetensors", "peft": "adapter_model.safetensors"}
PACKED = "adapters-4bit.safetensors"
_STAGE = ".new"
_OWN = {CONFIG, PACKED, *FILES.values()}
_LEFTOVERS = {_STAGE, *(f".{name}.new" for name in _OWN)}  # temporary files that a killed process can leave
_PEFT_PREFIX = "base_model.model."
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def full_name(place: Place) -> str:
    """Return the full name of the matrix at a place (module, layer): ("up_proj", 3) ->
    "model.layers.3.mlp.up_proj"; ("lm_head", 0) -> "lm_head"."""
    return "lm_head" if place == HEAD else f"model.layers.{place[1]}.{_short_name(place[0])}"


def _short_name(module: str) -> str:
    """Return mlx-lm's name of a module in its layer, for example "self_attn.q_proj"."""
    if module == "lm_head":
        return module
    return f"{'self_attn' if module in _ATTENTION else 'mlp'}.{module}"


def places(config: ModelShape) -> dict[str, tuple[Place, tuple[int, int]]]:
    """Return {full name: (place, (inputs, outputs))} of every linear layer that an adapter of this model can
    change."""
    found: dict[str, tuple[Place, tuple[int, int]]] = {}
    for name, (n_out, n_in) in matrices(config) if isinstance(config, ModelConfig) else ():
        if name.startswith("model.layers."):
            parts = name.split(".")
            found[name] = ((parts[-1], int(parts[2])), (n_in, n_out))
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
    layer, and the output head by its full path."""
    modules = {module for module, _ in change.pairs}
    keys = sorted(prefix + m if m == HEAD[0] else _short_name(m) for m in modules)
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
        tensors[f"{_PEFT_PREFIX}{layer}.lora_A.weight"] = np.ascontiguousarray(a.T)
        tensors[f"{_PEFT_PREFIX}{layer}.lora_B.weight"] = np.ascontiguousarray(b.T)
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


# reading --------------------------------------------------------------------------------------------


def load(folder: Path, config: ModelShape) -> BaseLoRA:
    """Read an adapter folder that mlx-lm, PEFT or `export` wrote. Raises AdapterMismatch if the adapter does
    not fit the model, CorruptFile if it is damaged, and UnsupportedModel or UsageError if the folder is no
    readable adapter."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; an adapter is a folder with {CONFIG} in it.")
    settings = read_object(folder / CONFIG, missing_ok=False)
    readers = {FILES["peft"]: _read_peft, PACKED: _read_packed, FILES["mlx-lm"]: _read_mlx_lm}
    there = [name for name in readers if (folder / name).is_file()]
    if not there:
        raise UsageError(f"{folder} has neither {FILES['mlx-lm']} nor {FILES['peft']}.")
    meant = _meant_by(settings)
    return readers[meant if meant in there else there[0]](folder, settings, config)


def _meant_by(settings: Mapping[str, Any]) -> str:
    """Return the name of the file of weights that belongs to the settings. A killed export can leave another
    file of weights in the folder."""
    if "peft_type" in settings:
        return FILES["peft"]
    return PACKED if "quantization" in settings else FILES["mlx-lm"]


def _read_mlx_lm(folder: Path, settings: Mapping[str, Any], config: ModelShape) -> BaseLoRA:
    scale = _mlx_lm_scale(folder, settings)
    halves = _halves(folder / FILES["mlx-lm"], ".lora_a", ".lora_b")
    return _check_layers(halves, scale, config, folder)


def _mlx_lm_scale(folder: Path, settings: Mapping[str, Any]) -> float:
    kind = settings.get("fine_tune_type", "lora")
    if kind != "lora":
        raise UnsupportedModel(f"{folder.name}: fine_tune_type {str(kind)[:20]!r}; only 'lora' is read.")
    parameters = settings.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    return _number(folder, "lora_parameters.scale", scale)


def _number(folder: Path, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < abs(value) < 1e6:
        raise CorruptFile(f"{folder.name}/{CONFIG}: {key} is {str(value)[:40]!r}; a number was expected.")
    return float(value)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    return {name: t.array() for name, t in read_safetensors(path).items()}


def _halves(path: Path, a: str, b: str, prefix: str = "") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return {matrix name: its two LoRA factors in float32} from a file. The factors' names in the file begin
    with `prefix` and end in `a` and `b`."""
    arrays, found = _arrays(path), {}
    for name, array in arrays.items():
        if name.startswith(prefix) and name.endswith(a) and name.removesuffix(a) + b in arrays:
            other = arrays[name.removesuffix(a) + b]
            found[name.removesuffix(a).removeprefix(prefix)] = (_f32(array), _f32(other))
    if 2 * len(found) != len(arrays) or not found:
        known = {prefix + n + end for n in found for end in (a, b)}
        odd = next((n for n in arrays if n not in known), "nothing")
        raise UnsupportedModel(f"{path.name}: {odd[:80]!r} is no part of a LoRA pair; only pairs are read.")
    return found


def _f32(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint32 or array.ndim != 2:
        raise CorruptFile(f"a LoRA factor is {array.dtype} {array.shape}; a matrix of floats was expected.")
    return np.ascontiguousarray(array, np.float32)


def _check_layers(named: Mapping[str, Pair], scale: float, config: ModelShape, folder: Path) -> BaseLoRA:
    """Return the named pairs as a BaseLoRA. Raises AdapterMismatch if the model does not have a named matrix,
    or has it with another size."""
    known, pairs = places(config), {}
    for long_name, (a, b) in named.items():
        if (name := text_name(long_name)) not in known:
            raise AdapterMismatch(f"{folder.name} changes {name[:80]!r}, which this model does not have.")
        place, (n_in, n_out) = known[name]
        if (a.shape[0], b.shape[1]) != (n_in, n_out) or a.shape[1] != b.shape[0] or not a.shape[1]:
            raise AdapterMismatch(
                f"{folder.name}: {name} has factors {a.shape} and {b.shape}; this model needs "
                f"({n_in}, r) and (r, {n_out}). The adapter belongs to another model."
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise CorruptFile(f"{folder.name}: {name} holds NaN or Inf.")
        pairs[place] = (a, b)
    return BaseLoRA(pairs, scale)


def _read_packed(folder: Path, settings: Mapping[str, Any], config: ModelShape) -> BaseLoRA:
    scale = _mlx_lm_scale(folder, settings)
    if settings.get("quantization") != {"bits": BITS, "group_size": GROUP}:
        raise UnsupportedModel(f"{folder.name}: only {BITS} bits in groups of {GROUP} are read.")
    arrays, known = _arrays(folder / PACKED), places(config)
    named: dict[str, Pair] = {}
    for name in {n.rsplit(".", 2)[0] for n in arrays}:
        if name not in known:
            raise AdapterMismatch(f"{folder.name} changes {name[:80]!r}, which this model does not have.")
        n_in, n_out = known[name][1]
        a, b = _packed_matrix(arrays, f"{name}.lora_a", n_in), _packed_matrix(arrays, f"{name}.lora_b", n_out)
        named[name] = unpack_pair(a, b)
    return _check_layers(named, scale, config, folder)


def _packed_matrix(arrays: Mapping[str, np.ndarray], name: str, n: int) -> Packed:
    try:
        weight, scales, biases = (arrays[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
    except KeyError as error:
        raise CorruptFile(f"{PACKED}: {str(error)[:80]} is missing. Export the adapter again.") from None
    kinds = weight.dtype, scales.dtype, biases.dtype
    if kinds != (np.uint32, np.float32, np.float32) or scales.ndim != 2:
        raise CorruptFile(
            f"{PACKED}: the parts of {name[:80]} are of types {kinds}. Export the adapter again."
        )
    return Packed(weight, scales, biases, n)


_PEFT_REFUSED = ("use_dora", "fan_in_fan_out", "modules_to_save", "layer_replication", "lora_bias")
_PLAIN_NAME = re.compile(r"[\w.]+", re.ASCII)


def _read_peft(folder: Path, settings: Mapping[str, Any], config: ModelShape) -> BaseLoRA:
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{folder.name}: peft_type {str(kind)[:20]!r}; only 'LORA' is read.")
    odd = [key for key in _PEFT_REFUSED if settings.get(key)]
    if odd or settings.get("bias", "none") != "none":
        raise UnsupportedModel(
            f"{folder.name}/{CONFIG}: {odd[0] if odd else 'bias'} is set; plain LoRA is read."
        )
    halves = _halves(folder / FILES["peft"], ".lora_A.weight", ".lora_B.weight", _PEFT_PREFIX)
    named = {name: (np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)) for name, (a, b) in halves.items()}
    return _check_layers(
        {n: _scale_pair(folder, settings, n, pair) for n, pair in named.items()}, 1.0, config, folder
    )


def _scale_pair(folder: Path, settings: Mapping[str, Any], name: str, pair: Pair) -> Pair:
    """Return a LoRA pair multiplied by its own alpha / r, or by alpha / sqrt(r) with rsLoRA. In PEFT, alpha
    and r can differ between layers."""
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(_PLAIN_NAME.fullmatch, patterns)):
        raise UnsupportedModel(f"{folder.name}/{CONFIG}: alpha_pattern holds more than plain names.")
    own = [v for k, v in patterns.items() if name == k or name.endswith(f".{k}")]
    alpha = _number(folder, "lora_alpha", own[0] if own else settings.get("lora_alpha"))
    rank = max(pair[0].shape[1], 1)
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    return pair[0], pair[1] * np.float32(scale)
