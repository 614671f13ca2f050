"""This module reads LoRA adapters in the folder formats of mlx-lm and Hugging Face PEFT. The module
interchange.py describes these formats, and writes them.

PEFT writes the model's own embedding or output head beside their LoRA factors (`base_layer.weight`). Training
a LoRA does not change them, so this module leaves them out.

With tied embeddings, mlx-lm's change of the embedding E is also a change of the output head, whose matrix is
E: the logits of x change by scale * (x lora_b^T) lora_a^T. So the head's factors are lora_b^T and lora_a^T.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import AdapterMismatch, CorruptFile, UnsupportedModel, UsageError
from ..models.config.hf_config import text_name
from ..models.config.model import ModelShape
from ..models.files.json_files import read_object
from ..models.files.safetensors_file import read_safetensors
from .base_lora import EMBEDDING, BaseLoRA, Pair
from .interchange import CONFIG, FILES, PACKED, PEFT_ENDS, PEFT_PREFIX, places
from .merge import HEAD
from .quantised import BITS, GROUP, Packed, unpack_pair


def load(folder: Path, config: ModelShape) -> BaseLoRA:
    """Read an adapter folder that mlx-lm, PEFT or `export` wrote. Raises AdapterMismatch if the adapter does
    not fit the model, CorruptFile if it is damaged, and UnsupportedModel or UsageError if the folder is no
    readable adapter."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; an adapter is a folder with {CONFIG} in it.")
    if not (folder / CONFIG).exists():
        raise UsageError(f"{folder} has no {CONFIG}; an adapter is a folder with this file in it.")
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
    halves = _halves(folder / FILES["mlx-lm"], [(".lora_a", ".lora_b")])
    found = _check_layers(halves, scale, config, folder)
    if config.tie_word_embeddings and EMBEDDING in found.pairs:
        a, b = found.pairs[EMBEDDING]
        head = np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)
        return BaseLoRA({**found.pairs, HEAD: head}, scale)
    return found


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


def _halves(path: Path, ends: Sequence[tuple[str, str]], prefix: str = "") -> dict[str, Pair]:
    """Return {matrix name: its two LoRA factors in float32} from a file. The factors' names in the file begin
    with `prefix` and end in one of the pairs `ends`."""
    arrays = {name: array for name, array in _arrays(path).items() if not _FROZEN.fullmatch(name)}
    found, known = dict[str, Pair](), set[str]()
    for name, (a, b) in product(arrays, ends):
        if name.startswith(prefix) and name.endswith(a) and name.removesuffix(a) + b in arrays:
            other = name.removesuffix(a) + b
            found[name.removesuffix(a).removeprefix(prefix)] = _f32(arrays[name]), _f32(arrays[other])
            known |= {name, other}
    if len(known) != len(arrays) or not found:
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


_PEFT_REFUSED = (
    "use_dora", "fan_in_fan_out", "modules_to_save", "layer_replication", "lora_bias",
    "alora_invocation_tokens",
)  # fmt: skip
# The beginnings (init_lora_weights) that do not change the model's own weights. PiSSA, OLoRA, CorDA and LoftQ
# subtract the first factors from these weights, and the folder does not have the changed weights.
_PEFT_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_PLAIN_NAME = re.compile(r"[\w.]+", re.ASCII)
# the model's own weights that PEFT writes beside the factors of the embedding and the output head
_FROZEN = re.compile(r"base_model\.model\.([a-z_]+\.)*(embed_tokens|lm_head)\.base_layer\.weight")


def _read_peft(folder: Path, settings: Mapping[str, Any], config: ModelShape) -> BaseLoRA:
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{folder.name}: peft_type {str(kind)[:20]!r}; only 'LORA' is read.")
    odd = [key for key in _PEFT_REFUSED if settings.get(key)]
    if odd or settings.get("bias", "none") != "none":
        raise UnsupportedModel(
            f"{folder.name}/{CONFIG}: {odd[0] if odd else 'bias'} is set; plain LoRA is read."
        )
    if (begun := settings.get("init_lora_weights")) not in _PEFT_BEGINNINGS:
        raise UnsupportedModel(
            f"{folder.name}/{CONFIG}: init_lora_weights is {str(begun)[:20]!r}, so the base weights changed, "
            "too; plain LoRA is read. Save it with PEFT's path_initial_model_for_weight_conversion."
        )
    halves = _halves(folder / FILES["peft"], PEFT_ENDS, PEFT_PREFIX)
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
