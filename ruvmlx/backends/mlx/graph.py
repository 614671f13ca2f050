"""This module builds mlx-lm's Llama graph with a model's weights.

The differences between model families (models/config/families.py) follow from the configuration.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...errors import CorruptFile
from ...models.config.model import ModelConfig, Weights
from ...models.files.mapped import release
from ...models.files.small_floats import MODES, FloatMatrix
from ...models.weights.stored import rounded_matrix, stored_matrix, stored_tensor
from ...platform import mlxlm
from ...platform.mx import mx, nn
from .attention import Attention, DistanceBias, UngatedMLP

BLOCK = 1 << 22  # the number of elements of a tensor that are converted at a time
Pause = Callable[[], None]

_llama = mlxlm.load("models.llama")


def build(
    config: ModelConfig, weights: Weights, dtype: mx.Dtype, dequantise: bool, pause: Pause = lambda: None
) -> nn.Module:
    """Return the graph with all its weights evaluated.

    dtype: the dtype of all weights that are not packed (quantised)
    dequantise: True: convert the packed weights to plain numbers
    pause: a function that is called after every few million converted numbers; it can raise an exception to
        stop
    """
    with mlxlm.keyed_weights():
        graph = _llama.Model(_llama.ModelArgs.from_dict(model_args(config)))
        adapt(graph.model, config)
    shapes = {name: p.shape for name, p in parameters(graph).items()}
    arrays = _convert(weights, shapes, dtype, dequantise, pause)
    formats = {} if dequantise else quantised_formats(weights, shapes)
    if formats:
        nn.quantize(graph, class_predicate=lambda path, _: formats.get(path, False))
    _check(arrays, parameters(graph))
    graph.load_weights(list(arrays.items()))
    graph.eval()
    mx.eval(graph.parameters())
    return graph


def model_args(config: ModelConfig) -> dict:
    """Return the values of a ModelConfig as arguments of mlx-lm's ModelArgs. The function `adapt` makes the
    changes that ModelArgs cannot describe."""
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_word_embeddings,
        "sliding_window": config.sliding_window,
    }


def adapt(model: nn.Module, config: ModelConfig) -> None:
    """Give every layer ruvmlx's Attention, and the norms, the MLP's biases and the sliding window that the
    configuration describes."""
    if config.layer_norm:
        model.norm = _layer_norm(config)
    bias = DistanceBias(config) if config.alibi_bias_max else None
    for i, layer in enumerate(model.layers):
        layer.self_attn = Attention(config, i, bias)
        if not config.gated_mlp:
            layer.mlp = UngatedMLP(config)
        if config.layer_norm:
            layer.input_layernorm = _layer_norm(config)
            layer.post_attention_layernorm = _layer_norm(config)
        for name in ("gate_proj", "up_proj", "down_proj"):
            if name in config.biases and config.gated_mlp:
                out, width = layer.mlp[name].weight.shape
                layer.mlp[name] = nn.Linear(width, out)
    if config.sliding_window:
        slide(model)


def _layer_norm(config: ModelConfig) -> nn.Module:
    return nn.LayerNorm(config.hidden_size, config.rms_norm_eps, bias=config.norm_biases)


def slide(model: nn.Module) -> None:
    """Give every layer the sliding window.

    mlx-lm 0.32 applies a window only to the layers that `layer_types` names, and refuses a model without one
    full layer. A Mistral config has a window and no `layer_types`, so mlx-lm alone would attend to all
    tokens.
    """
    for layer in model.layers:
        layer.use_sliding = True
    model.swa_idx = 0


Format = dict[str, Any]  # "bits", "group_size", and "mode" if the format is not MLX's affine format


def quantised_formats(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Format]:
    """Return {module path: format} of the packed (quantised) tensors. A format comes from the file's header,
    or follows from the shapes of the tensors."""
    paths = [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]
    return {path: _format(path, weights, shapes) for path in paths}


def _format(path: str, weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> Format:
    """Return a matrix's format from the file's header or, if the header has none, from the matrix's shapes:
    in = shape[-1]; bits = 32 * (words per row) / in; group_size = in / (scales per row)."""
    # the file's header gives the format without a conversion of the tensor
    if tensor := stored_tensor(weights, path):
        if mode := tensor.type.mode:
            group, bits = MODES[mode]
            return {"bits": bits, "group_size": group, "mode": mode}
        return {"bits": tensor.type.affine_bits, "group_size": tensor.type.affine_group}
    width = shapes.get(f"{path}.weight", (0,))[-1]
    packed, groups = weights[f"{path}.weight"].shape[-1], weights[f"{path}.scales"].shape[-1]
    if not width or (32 * packed) % width or width % groups:
        raise CorruptFile(
            f"{path}: packed width {packed} and {groups} scales do not fit {width} inputs; "
            "the model's files do not match its configuration"
        )
    return {"bits": 32 * packed // width, "group_size": width // groups}


def _convert(
    weights: Weights, shapes: Mapping[str, tuple], dtype: mx.Dtype, dequantise: bool, pause: Pause
) -> dict[str, mx.array]:
    """Return the weights as evaluated MLX arrays, under the names of the graph's parameters."""
    formats = quantised_formats(weights, shapes)
    out: dict[str, mx.array] = {}
    for name in weights:
        path, _, kind = name.rpartition(".")
        if path not in formats or kind == "bias":
            out[name] = _whole(weights[name], dtype, pause)
        elif not dequantise and "mode" in formats[path]:
            out |= _as_mlx_has_it(path, weights) if kind == "weight" else {}
        elif not dequantise:
            out[name] = _whole(weights[name], None if kind == "weight" else dtype, pause)
        elif kind == "weight":
            out[name] = dequantise_matrix(path, weights, formats[path], dtype, pause)
    return out


def _as_mlx_has_it(path: str, weights: Weights) -> dict[str, mx.array]:
    """Return a matrix in the layout of one of MLX's float formats, which MLX calls modes (for example
    mxfp4)."""
    stored = stored_matrix(weights, path)
    assert isinstance(stored, FloatMatrix)
    arrays = {f"{path}.{part}": _array(value, None) for part, value in stored.as_mlx_has_it().items()}
    mx.eval(arrays)
    release(stored.codes)
    return arrays


def dequantise_matrix(
    path: str, weights: Weights, fmt: Format, dtype: mx.Dtype, pause: Pause = lambda: None
) -> mx.array:
    """Return the weights [out, in] of a packed matrix as plain numbers. In MLX's affine format, [out, in *
    bits / 32], a weight is scale * q + bias."""
    stored = stored_matrix(weights, path) if "mode" in fmt else rounded_matrix(weights, path)
    if stored is not None:
        return _by_blocks(lambda rows: _array(stored.dequantise(rows), dtype), stored.shape, dtype, pause)
    packed, scales, biases = (weights[f"{path}.{kind}"] for kind in ("weight", "scales", "biases"))

    def block(rows: slice) -> mx.array:
        parts = _array(packed[rows], None), _array(scales[rows], mx.float32), _array(biases[rows], mx.float32)
        return mx.dequantize(*parts, group_size=fmt["group_size"], bits=fmt["bits"]).astype(dtype)

    return _by_blocks(block, (len(packed), 32 * packed.shape[1] // fmt["bits"]), dtype, pause)


def _whole(value: np.ndarray, dtype: mx.Dtype | None, pause: Pause) -> mx.array:
    if dtype is None:
        return _array(value, None)
    return _by_blocks(lambda rows: _array(value[rows], dtype), value.shape, dtype, pause)


def _by_blocks(
    block: Callable[[slice], mx.array], shape: tuple[int, ...], dtype: mx.Dtype, pause: Pause
) -> mx.array:
    """Convert an array block by block (blocks of rows) and return the result, because a conversion of the
    whole array at once would need more memory. block: a function that returns the rows of a slice."""
    step = max(1, BLOCK * shape[0] // max(1, math.prod(shape)))
    if step >= shape[0]:
        whole = block(slice(None))
        mx.eval(whole)
        pause()
        return whole
    whole = mx.zeros(shape, dtype)
    mx.eval(whole)
    for start in range(0, shape[0], step):
        pause()
        whole[start : start + step] = block(slice(start, start + step))
        mx.eval(whole)  # MLX updates the array in place, because no other reference exists
    pause()
    return whole


def _array(value: np.ndarray, dtype: mx.Dtype | None) -> mx.array:
    """Return a NumPy array as an MLX array. MLX does not know the bfloat16 of ml_dtypes, so this function
    passes the bits to MLX as uint16."""
    if value.dtype.name == "bfloat16":
        array = mx.array(value.view(np.uint16)).view(mx.bfloat16)
    else:
        array = mx.array(value)
    return array if dtype is None else array.astype(dtype)


def parameters(graph: nn.Module) -> dict[str, mx.array]:
    return dict(nn.utils.tree_flatten(graph.parameters()))


def _check(arrays: Mapping[str, mx.array], wanted: Mapping[str, mx.array]) -> None:
    """Raise CorruptFile if the array of a parameter of the graph is missing or has another shape, or if an
    array belongs to no parameter."""
    missing, surplus = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
    if missing or surplus:
        what = f"{missing[0]} is missing" if missing else f"{surplus[0]} is not part of it"
        raise CorruptFile(
            f"the weights do not fit the model: {what} ({len(missing) + len(surplus)} such tensors)"
        )
    for name, array in arrays.items():
        if array.shape != wanted[name].shape:
            raise CorruptFile(f"{name} has shape {array.shape}; its configuration says {wanted[name].shape}")


def head(graph: nn.Module, hidden: mx.array) -> mx.array:
    """Return logits [..., V] of hidden states [..., D] from the frozen output head."""
    if hasattr(graph, "lm_head"):
        return graph.lm_head(hidden)
    return graph.model.embed_tokens.as_linear(hidden)
