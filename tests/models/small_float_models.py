"""Small random models whose matrices are small floats: MLX's mxfp4, nvfp4 and mxfp8, and fp8 with scales."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.backends.mlx.graph import _array
from ruvmlx.models.files.small_floats import MODES
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx

from .make_models import make_safetensors_model

MODE_NAMES = tuple(MODES)
FP8 = {"fp8": None, "fp8-blocks": [16, 24]}  # what shares a scale: the matrix, or so many rows and columns
SHAPE = {"intermediate_size": 160}


def make_small_floats(folder: Path, how: str, keep: tuple[str, ...] = (), **shape: Any) -> Path:
    """how: a mode of MLX's, or a key of FP8, which leaves the embedding and the head as they are. keep: parts
    of names of matrices that stay plain."""
    make_safetensors_model(folder, dtype="bfloat16", **SHAPE | shape)
    tensors, plain = {}, ("norm", "bias", *keep, *(("embed_tokens", "lm_head") if how in FP8 else ()))
    weights = load_model(str(folder)).load_weights()
    for name, value in weights.items():
        array = _array(value, None)
        if any(part in name for part in plain):
            tensors[name] = array
        else:
            tensors |= _fp8(name, array, FP8[how]) if how in FP8 else _mode(name, array, how)
    _write(folder, tensors, how)
    return folder


def _mode(name: str, array: mx.array, mode: str) -> dict[str, mx.array]:
    group, bits = MODES[mode]
    codes, scales = mx.quantize(array, group_size=group, bits=bits, mode=mode)
    return {name: codes, f"{name.removesuffix('weight')}scales": scales}


def _fp8(name: str, array: mx.array, block: list[int] | None) -> dict[str, mx.array]:
    """Scales are those that bring the largest weight of a block to 448."""
    w = np.array(array.astype(mx.float32))
    rows, cols = block or w.shape
    padded = np.pad(w, ((0, -w.shape[0] % rows), (0, -w.shape[1] % cols)))
    tiles = np.abs(padded.reshape(padded.shape[0] // rows, rows, -1, cols))
    scales = mx.array(tiles.max((1, 3)) / 448).astype(mx.bfloat16)
    wide = np.repeat(np.repeat(np.array(scales.astype(mx.float32)), rows, 0), cols, 1)
    codes = mx.to_fp8(mx.array(w / wide[: w.shape[0], : w.shape[1]]))
    stem = name.removesuffix("weight")
    found = {name: codes, f"{name}_scale_inv": scales if block else scales.reshape(())}
    return found | {f"{stem}activation_scale": mx.array(0.5)}


def _write(folder: Path, tensors: dict[str, mx.array], how: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    if how in FP8:
        told = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": FP8[how]}
        config["quantization_config"] = told
    else:
        group, bits = MODES[how]
        config["quantization"] = {"group_size": group, "bits": bits, "mode": how}
    (folder / "config.json").write_text(json.dumps(config))
    for old in folder.glob("*.safetensors"):
        old.unlink()
    path = folder / "model.safetensors"
    mx.save_safetensors(str(path), tensors, {"format": "mlx"})
    if how in FP8:
        _call_fp8(path)


def _call_fp8(path: Path) -> None:
    """MLX has no type for codes of fp8; files have one, which MLX reads."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for entry in header.values():
        if entry.get("dtype") == "U8":
            entry["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def mlx_weights(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor in float32, by MLX's own functions."""
    with mx.stream(mx.cpu):
        held = dict(mx.load(str(folder / "model.safetensors")))
        config = json.loads((folder / "config.json").read_text())
        out = {}
        for name, value in held.items():
            stem = name.removesuffix(".weight")
            if f"{stem}.scales" in held and name != f"{stem}.scales":
                value = mx.dequantize(
                    value, held[f"{stem}.scales"], **config["quantization"], dtype=mx.float32
                )
            elif f"{name}_scale_inv" in held:
                value = mx.from_fp8(value, dtype=mx.float32) * _spread(
                    held[f"{name}_scale_inv"], value.shape, config
                )
            elif name.endswith((".scales", "_scale_inv", "activation_scale")):
                continue
            out[name] = np.array(value.astype(mx.float32))
        return out


def _spread(scales: mx.array, shape: tuple[int, ...], config: dict) -> mx.array:
    block, wide = config["quantization_config"]["weight_block_size"], scales.astype(mx.float32)
    if block is None:
        return wide
    return mx.repeat(mx.repeat(wide, block[0], 0), block[1], 1)[: shape[0], : shape[1]]
