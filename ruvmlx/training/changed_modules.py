"""This module runs the linear layers and the embedding of the training graph with their LoRA changes.

`factors` has the LoRA's arrays by name: "3.q_proj.a" is lora_a of q_proj in layer 3, and "3.q_proj.b" is its
lora_b, multiplied by the scale. The embedding's names begin with "0.embed_tokens". A probe is an array of
zeros that is added to an output, so the gradient with respect to the probe is the gradient with respect to
the output.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..backends.mlx.lora_layers import ChangedEmbedding, ChangedLinear
from ..platform.mx import mx, nn

EMBEDDING = "0.embed_tokens"  # the name of the embedding among factors and probes


def unwrap(module: nn.Module) -> nn.Module:
    """Return the plain module of mlx-lm that a backend's wrappers contain."""
    if isinstance(module, ChangedEmbedding):
        return module.embedding
    module = module.plain if "plain" in module else module
    return module.linear if isinstance(module, ChangedLinear) else module


def linear(factors: Mapping[str, mx.array], layer: int, x: mx.array, own: nn.Module, names: Sequence[str]):
    """Run the named modules of a layer, with their LoRA changes, on one input: x [T, in] -> [T, out] each."""
    found = [name for name in names if f"{layer}.{name}.a" in factors]
    out = {name: unwrap(own[name])(x) for name in names}
    if found:
        a = [factors[f"{layer}.{name}.a"] for name in found]
        u = x.astype(mx.float32) @ mx.concatenate(a, axis=1)
        stops = np.cumsum([w.shape[1] for w in a])[:-1].tolist()
        for name, part in zip(found, mx.split(u, stops, axis=1), strict=True):
            out[name] = out[name] + (part @ factors[f"{layer}.{name}.b"]).astype(x.dtype)
    return [out[name] for name in names]


def probed_linear(
    probes: Mapping[str, mx.array], inputs: dict[str, mx.array], factors: Mapping[str, mx.array], layer: int,
    x: mx.array, own: nn.Module, names: Sequence[str],
):  # fmt: skip
    """Run `linear`, and add a probe to each output that has a probe. Store the input x of each matrix with a
    probe in `inputs`."""
    out = linear(factors, layer, x, own, names)
    for i, name in enumerate(names):
        if (key := f"{layer}.{name}") in probes:
            inputs[key] = x
            out[i] = out[i] + probes[key]
    return out


def changed_rows(
    x: mx.array, factors: Mapping[str, mx.array], tokens: Sequence[int], probe: mx.array | None = None
) -> mx.array:
    """Return the embedding's rows x [T, D] of T tokens with the LoRA change lora_a[tokens] @ lora_b, and with
    a probe. MLX's gradient of lora_a adds up the gradients of all positions with the same token."""
    if f"{EMBEDDING}.a" in factors:
        change = factors[f"{EMBEDDING}.a"][mx.array(list(tokens))] @ factors[f"{EMBEDDING}.b"]
        x = x + change.astype(x.dtype)
    return x if probe is None else x + probe


def token_shares(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return the share of each token among the tokens, [V] float32: the mean input of the embedding, whose
    input is 1 for the token and 0 for all others."""
    counts = np.bincount(np.asarray(tokens), minlength=vocab_size)
    return (counts / len(tokens)).astype(np.float32)


def token_sums(tokens: Sequence[int], gradient: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row sums [V] and the column sums [D] of G^2, float32. G [V, D] is the gradient with respect
    to the embedding's matrix: row t is the sum of the output's gradients [T, D] at the positions of token
    t."""
    seen, at = np.unique(np.asarray(tokens), return_inverse=True)
    g = np.zeros((len(seen), gradient.shape[1]), np.float32)
    np.add.at(g, at, gradient.astype(np.float32))
    rows = np.zeros(vocab_size, np.float32)
    rows[seen] = np.square(g).sum(axis=1)
    return rows, np.square(g).sum(axis=0)
