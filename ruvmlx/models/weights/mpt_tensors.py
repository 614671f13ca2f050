"""This module gives the tensors of an MPT model the names that Llama and all other families have.

The module also splits the tensor Wqkv into three tensors. Wqkv has first the rows of q, then the rows of k,
then the rows of v.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from ...errors import CorruptFile
from ..config.model import ModelConfig
from ..files.gguf import GGUFTensor
from ..files.safetensors_file import Tensor

_PARTS = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.Wqkv": "self_attn.qkv_proj",
    "attn.out_proj": "self_attn.o_proj",
    "ffn.up_proj": "mlp.up_proj",
    "ffn.down_proj": "mlp.down_proj",
}
_OUTSIDE = {"transformer.wte": "model.embed_tokens", "transformer.norm_f": "model.norm"}
_BLOCKS = "transformer.blocks."
_Any = TypeVar("_Any", Tensor, GGUFTensor)


def common_names(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a folder under the names in layout.py."""
    named = {(new := _common(name)): replace(tensor, name=new) for name, tensor in tensors.items()}
    return _split(named, "qkv_proj", ("q_proj", "k_proj", "v_proj"), config)


def split_qkv(tensors: Mapping[str, GGUFTensor], config: ModelConfig) -> dict[str, GGUFTensor]:
    """Return the tensors of a GGUF file with attn_q, attn_k and attn_v in the place of attn_qkv."""
    return _split(tensors, "attn_qkv", ("attn_q", "attn_k", "attn_v"), config)


def _common(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    layer, _, part = module.removeprefix(_BLOCKS).partition(".")
    known = module.startswith(_BLOCKS) and part in _PARTS
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}" if known else name


def _split(
    tensors: Mapping[str, _Any], fused: str, parts: tuple[str, str, str], config: ModelConfig
) -> dict[str, _Any]:
    """Return the tensors, with each tensor of a module named `fused` (q, k and v in one) replaced by three
    tensors with the names `parts`."""
    kv = config.n_kv_heads * config.head_dim
    rows = dict(zip(parts, (config.n_heads * config.head_dim, kv, kv), strict=True))
    found: dict[str, _Any] = {}
    for name, tensor in tensors.items():
        if f".{fused}." in name:
            found |= {part.name: part for part in _rows(tensor, fused, rows)}
        else:
            found[name] = tensor
    return found


def _rows(tensor: _Any, fused: str, rows: Mapping[str, int]) -> Iterator[_Any]:
    """Yield the parts of `tensor`, a range of rows for each module in `rows`, in order. rows: {module: its
    number of rows in `tensor`}."""
    if not tensor.shape or tensor.shape[0] != sum(rows.values()):
        raise CorruptFile(
            f"tensor {tensor.name[:60]!r} has shape {list(tensor.shape)}; "
            f"its configuration asks for {sum(rows.values())} rows."
        )
    at, row = tensor.offset, tensor.nbytes // tensor.shape[0]
    for module, n in rows.items():
        name = tensor.name.replace(f".{fused}.", f".{module}.")
        yield replace(tensor, name=name, shape=(n, *tensor.shape[1:]), offset=at)
        at += n * row
