"""This module installs a BaseLoRA in the MLX graph. The module wraps the graph's linear layers in
ChangedLinear, and the embedding in ChangedEmbedding. In the CPU layers, one product (cpu_layers.Joined)
computes several linear layers; the module then sets the attribute `change` of Joined to one LowRankChange for
all linear layers of the product.

The LoRA's matrices lora_a and lora_b have the dtype of the graph. The scale of the LoRA is multiplied into
lora_b. If the LoRA has 4 bits per weight, MLX's arrays have them, too, and each call dequantises the matrices
that it needs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from ...lora.base_lora import EMBEDDING, MODULES, BaseLoRA, Pair
from ...lora.quantised import BITS, GROUP, Packed
from ...platform.mx import mx, nn
from .cpu_layers import CPUMLP, CPUAttention


class LowRankChange:
    """A function that computes the numbers that a LoRA adds to the output of a linear layer. A call returns
    scale * (x @ lora_a) @ lora_b [..., out] of x [..., in]."""

    def __init__(self, lora_a: np.ndarray, lora_b: np.ndarray, dtype: mx.Dtype):
        self.lora_a, self.lora_b = mx.array(lora_a).astype(dtype), mx.array(lora_b).astype(dtype)
        mx.eval(self.lora_a, self.lora_b)

    def __call__(self, x: mx.array) -> mx.array:
        return (x @ self.lora_a) @ self.lora_b

    def rows(self, tokens: mx.array) -> mx.array:
        """Return the change [..., out] of the embedding's rows of the tokens [...]."""
        return self.lora_a[tokens] @ self.lora_b


class PackedChange:
    """The change of a linear layer by factors with 4 bits per weight: lora_a [rank, in] and lora_b [rank,
    out]. A call returns (x @ lora_a^T) @ lora_b [..., out] of x [..., in]."""

    def __init__(self, lora_a: Packed, lora_b: Packed, dtype: mx.Dtype):
        self._factors = [[mx.array(w) for w in (p.weight, p.scales, p.biases)] for p in (lora_a, lora_b)]
        self._widths, self._dtype = (lora_a.n, lora_b.n), dtype
        mx.eval(self._factors)

    def __call__(self, x: mx.array) -> mx.array:
        a, b = map(self._dequantise, self._factors, self._widths)
        return (x @ a.T) @ b

    def rows(self, tokens: mx.array) -> mx.array:
        """Return the change [..., out] of the embedding's rows of the tokens [...]. Of lora_a [rank, V], only
        the groups that have the tokens are dequantised."""
        flat = tokens.reshape(-1)
        weight, scales, biases = self._factors[0]
        # codes: [rank, T, words of a group]   groups: [rank, T, GROUP]   a: [T, rank]
        codes = weight.reshape(len(weight), scales.shape[1], -1)[:, flat // GROUP]
        scale, bias = (w[:, flat // GROUP][..., None] for w in (scales, biases))
        groups = mx.dequantize(codes, scale, bias, group_size=GROUP, bits=BITS)
        a = mx.take_along_axis(groups, (flat % GROUP)[None, :, None], axis=2)[..., 0].T
        change = a.astype(self._dtype) @ self._dequantise(self._factors[1], self._widths[1])
        return change.reshape(*tokens.shape, -1)

    def _dequantise(self, parts: Sequence[mx.array], n: int) -> mx.array:
        """Return the matrix [rank, n] in the dtype of the graph, without the padding of its last group."""
        weight, scales, biases = parts
        w = mx.dequantize(weight, scales, biases, group_size=GROUP, bits=BITS)
        return w[:, :n].astype(self._dtype)


Change = LowRankChange | PackedChange


class ChangedLinear(nn.Module):
    """A linear layer whose output is the original output plus a low-rank change."""

    def __init__(self, linear: nn.Module, change: Change):
        super().__init__()
        self.linear, self._change = linear, change

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) + self._change(x)


class ChangedEmbedding(nn.Module):
    """An embedding whose rows are the original rows plus a low-rank change. `as_linear`, which is the output
    head of a model with tied embeddings, uses the original rows."""

    def __init__(self, embedding: nn.Module, change: Change):
        super().__init__()
        self.embedding, self._change = embedding, change

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embedding(tokens) + self._change.rows(tokens)

    def as_linear(self, hidden: mx.array) -> mx.array:
        return self.embedding.as_linear(hidden)


def install(graph: nn.Module, base: BaseLoRA | None, dtype: mx.Dtype) -> Change | None:
    """Install the base LoRA `base` in the graph's layers and embedding, in place of the installed base LoRA;
    None removes it. Return the LoRA's change of the output head, which the caller must add, or None."""
    scale = base.scale if base else 1.0
    pairs = {place: (a, _times(b, scale)) for place, (a, b) in base.parts.items()} if base else {}
    for i, layer in enumerate(graph.model.layers):
        for block in (getattr(layer.self_attn, "plain", layer.self_attn), layer.mlp):
            for owner, name, modules in _places(block):
                found = [pairs.get((module, i)) for module in modules]
                _set(owner, name, found, dtype)
    _set_embedding(graph.model, pairs.get(EMBEDDING), dtype)
    head = pairs.get(("lm_head", 0))
    return _change(head, dtype) if head else None


def _times(lora_b: Any, factor: float) -> Any:
    return lora_b.times(factor) if isinstance(lora_b, Packed) else lora_b * np.float32(factor)


def _change(pair: Any, dtype: mx.Dtype) -> Change:
    """Return the change by a pair of Packed matrices or float32 arrays."""
    lora_a, lora_b = pair
    kind: Any = PackedChange if isinstance(lora_a, Packed) else LowRankChange
    return kind(lora_a, lora_b, dtype)


def _places(block: nn.Module) -> Iterator[tuple[nn.Module, str, Sequence[str]]]:
    """Yield (owner, attribute, names) for each linear layer of an attention or MLP block. The attribute of
    the owner holds the layer; names: the projections that the layer computes, for example q_proj."""
    if isinstance(block, CPUAttention):
        yield block, "qkv", ("q_proj", "k_proj", "v_proj")
        yield block, "o_proj", ("o_proj",)
    elif isinstance(block, CPUMLP):
        yield block, "gate_up", ("gate_proj", "up_proj")
        yield block, "down_proj", ("down_proj",)
    else:
        for name in MODULES:
            if name in block:
                yield block, name, (name,)


def _set(owner: nn.Module, name: str, pairs: Sequence[Any], dtype: mx.Dtype) -> None:
    held = getattr(owner, name)
    if len(pairs) > 1:
        held.change = _join_pairs(pairs, held.widths, held.factors, dtype)
        return
    linear, pair = held.linear if isinstance(held, ChangedLinear) else held, pairs[0]
    setattr(owner, name, linear if pair is None else ChangedLinear(linear, _change(pair, dtype)))


def _set_embedding(model: nn.Module, pair: Any, dtype: mx.Dtype) -> None:
    held = model.embed_tokens
    plain = held.embedding if isinstance(held, ChangedEmbedding) else held
    model.embed_tokens = plain if pair is None else ChangedEmbedding(plain, _change(pair, dtype))


def _join_pairs(
    pairs: Sequence[Any], widths: Sequence[int], factors: Sequence[float], dtype: mx.Dtype
) -> Callable[[mx.array], mx.array] | None:
    """Join the LoRA pairs of several linear layers with the same input into one LowRankChange: the matrices
    lora_a side by side, the matrices lora_b as blocks on the diagonal of one matrix. Packed pairs stay
    apart. Return None if the LoRA changes none of these layers."""
    there = cast(list[Pair], [p for p in pairs if p is not None])
    if not there:
        return None
    if isinstance(there[0][0], Packed):
        return _place_side_by_side(pairs, widths, factors, dtype)
    lora_b = np.zeros((sum(b.shape[0] for _, b in there), sum(widths)), np.float32)
    row = column = 0
    for pair, width, factor in zip(pairs, widths, factors, strict=True):
        if pair is not None:
            rank = pair[1].shape[0]
            lora_b[row : row + rank, column : column + width] = pair[1] * np.float32(factor)
            row += rank
        column += width
    return LowRankChange(np.concatenate([a for a, _ in there], axis=1), lora_b, dtype)


def _place_side_by_side(
    pairs: Sequence[tuple[Packed, Packed] | None],
    widths: Sequence[int],
    factors: Sequence[float],
    dtype: mx.Dtype,
) -> Callable[[mx.array], mx.array]:
    """Return a function of x [..., in] that returns the changes of all layers side by side: [..., sum of
    widths]. The change of a layer without a pair is zero."""
    changes = [
        PackedChange(pair[0], pair[1].times(factor), dtype) if pair else None
        for pair, factor in zip(pairs, factors, strict=True)
    ]

    def change(x: mx.array) -> mx.array:
        parts = [
            mx.zeros((*x.shape[:-1], width), dtype) if one is None else one(x)
            for one, width in zip(changes, widths, strict=True)
        ]
        return mx.concatenate(parts, axis=-1)

    return change
