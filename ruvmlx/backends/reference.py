"""The reference backend, for tests, runs Llama-like models in NumPy and mostly in float32. The reference
backend is slow and does not need MLX. Tests compare the results of the other backends with the reference
backend's results.

For the hidden states h, one decoder layer computes: h += o_proj(attention(norm(h))); then, with x = norm(h),
h += down(silu(gate(x)) * up(x)), or h += down(gelu(up(x))) for an MLP without a gate.

The fields of the model's configuration decide which additions of a model family are computed
(models/config/families.py). The backend computes norms, activation functions, softmax and RoPE's angles in
float64. (Touvron et al. 2023; Jiang et al. 2023)
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ..errors import UsageError
from ..kv.cache import Dump, KVStats
from ..kv.policy import F16, TierPolicy
from ..lora.base_lora import EMBEDDING, BaseLoRA
from ..models.config.alibi import alibi_slopes
from ..models.config.model import Model, ModelConfig, Weights
from ..models.config.rope import query_scales
from ..models.config.rope import rope as rope_of
from ..models.files.affine import dequantise
from ..models.weights.stored import rounded_matrix
from .base import PAUSED, Adapters, HeadAdapter, KVCache, Step, check_tokens, each, finite

CHUNK = 128  # the maximum number of prompt tokens in one prefill step


class ReferenceCache:
    """A cache of all keys and values of one sequence. The cache keeps the keys and values of all tokens,
    because this backend applies a sliding window only as a mask."""

    def __init__(self, config: ModelConfig):
        empty = (config.n_kv_heads, 0, config.head_dim)
        self.keys = [np.zeros(empty, np.float32) for _ in range(config.n_layers)]  # [n_kv_heads, T, head_dim]
        self.values = [np.zeros(empty, np.float32) for _ in range(config.n_layers)]
        self.offset = 0

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.keys + self.values)

    def append(self, layer: int, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append the keys and values of new tokens in one layer after those of the first `offset` tokens.
        Return all keys and values of this layer. The caller adds the new tokens to `offset` after all layers
        have appended."""
        for held, new in ((self.keys, keys), (self.values, values)):
            held[layer] = np.concatenate([held[layer][:, : self.offset], new], axis=1)
        return self.keys[layer], self.values[layer]

    def trim(self, n: int) -> bool:
        if not 0 <= n <= self.offset:
            return False
        self.offset -= n
        self.keys = [k[:, : self.offset] for k in self.keys]
        self.values = [v[:, : self.offset] for v in self.values]
        return True

    def stats(self) -> KVStats:
        return KVStats.all_f16(F16.name, self.offset, self.nbytes, self.nbytes // 2)

    def dump(self) -> Dump:
        held = (np.ascontiguousarray(a[:, : self.offset]) for a in self.keys + self.values)
        parts = (a.view(np.uint8).reshape(-1) for a in held)
        return Dump({"offset": self.offset}, sum(self._size(a, self.offset) for a in self.keys) * 2, parts)

    def restore(self, facts: Mapping[str, Any], read: Callable[[int], bytes]) -> None:
        self.offset = facts["offset"]
        for arrays in (self.keys, self.values):
            for i, a in enumerate(arrays):
                held = np.frombuffer(read(self._size(a, self.offset)), np.float32)
                arrays[i] = held.reshape(a.shape[0], self.offset, a.shape[2])

    @staticmethod
    def _size(a: np.ndarray, tokens: int) -> int:
        return a.shape[0] * tokens * a.shape[2] * a.itemsize

    def fork(self) -> "ReferenceCache":
        """Return a second cache that shares the arrays, because no method changes an array in place."""
        other = copy.copy(self)
        other.keys, other.values = list(self.keys), list(self.values)
        return other


class ReferenceBackend:
    name = "reference"
    kernels = "numpy"
    caveat = ""
    pool = None

    def __init__(self, model: Model, chunk: int = CHUNK):
        self.config = model.config
        self.chunk = chunk
        self._weights = unpack_weights(model.load_weights(), model.config)
        self.nbytes = sum(a.nbytes for a in self._weights.values())
        self._rope = rope_of(model.config)
        bias_max = model.config.alibi_bias_max
        self._slopes = alibi_slopes(model.config.n_heads, bias_max) if bias_max else None
        self.lora: BaseLoRA | None = None

    def set_lora(self, base: BaseLoRA | None) -> None:
        if base is not None:
            base.check(self.config)
        self.lora = base

    def new_cache(self, policy: TierPolicy | None = None) -> ReferenceCache:
        if policy not in (None, F16):
            raise UsageError("the reference backend has no tiered cache; use --kv f16, or another backend")
        return ReferenceCache(self.config)

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        adapter: HeadAdapter | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Step:
        check_tokens(tokens, self.config.vocab_size)
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            hidden = self._forward(part, cast(ReferenceCache, cache))
            if progress:
                progress(start + len(part))
        return Step(self._logits(hidden[-1], adapter), hidden[-1])

    def decode(self, token: int, cache: KVCache, adapter: HeadAdapter | None = None) -> Step:
        return self.prefill([token], cache, adapter)

    def decode_batch(
        self, tokens: Sequence[int], caches: Sequence[KVCache], adapter: Adapters = None
    ) -> list[Step]:
        """Append one token to each cache, one sequence after the other, because this backend is simple rather
        than fast."""
        return [self.decode(*args) for args in zip(tokens, caches, each(adapter, tokens), strict=True)]

    def verify(self, tokens: Sequence[int], cache: KVCache, adapter: HeadAdapter | None = None) -> np.ndarray:
        check_tokens(tokens, self.config.vocab_size)
        return self._logits(self._forward(tokens, cast(ReferenceCache, cache)), adapter)

    def hidden_states(
        self,
        tokens: Sequence[int],
        pause: Callable[[], None] | None = None,
        cache: KVCache | None = None,
    ) -> np.ndarray:
        check_tokens(tokens, self.config.vocab_size)
        held, size = cast(ReferenceCache, cache or self.new_cache()), PAUSED if pause else len(tokens)
        states = []
        for start in range(0, len(tokens), size):
            states.append(self._forward(tokens[start : start + size], held))
            if pause:
                pause()
        return np.concatenate(states)

    def head(self, hidden: np.ndarray) -> np.ndarray:
        tied = self.config.tie_word_embeddings
        logits = hidden @ self._weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T
        return self._add_lora(logits, hidden, "lm_head", 0)

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        return self.hidden_states(tokens).mean(axis=0)

    def _logits(self, hidden: np.ndarray, adapter: HeadAdapter | None) -> np.ndarray:
        logits = self.head(hidden)
        if adapter is not None:
            adapter.add_to_logits(logits, hidden)
        return finite(logits)

    def _forward(self, tokens: Sequence[int], cache: ReferenceCache) -> np.ndarray:
        """Run tokens [T]; return hidden [T, D] after the final norm. After the call the cache holds T more
        tokens."""
        h = self._embed_tokens(np.asarray(tokens, np.int64))
        for i in range(self.config.n_layers):
            p = f"model.layers.{i}"
            h = h + self._attention(i, self._norm(f"{p}.input_layernorm", h), cache)
            h = h + self._mlp(p, self._norm(f"{p}.post_attention_layernorm", h))
        cache.offset += len(tokens)
        return self._norm("model.norm", h)

    def _embed_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Return the embedding's rows [T, D] of the tokens [T]. If the base LoRA changes the embedding, the
        row of a token t has scale * lora_a[t] @ lora_b added."""
        rows = self._weights["model.embed_tokens.weight"][tokens]
        if self.lora is None or EMBEDDING not in self.lora.pairs:
            return rows
        a, b = self.lora.pairs[EMBEDDING]
        return rows + np.float32(self.lora.scale) * a[tokens] @ b

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        weight, eps = self._weights[f"{name}.weight"], self.config.rms_norm_eps
        if self.config.layer_norm:
            return layer_norm(x, weight, self._weights.get(f"{name}.bias"), eps)
        return rms_norm(x, weight, eps)

    def _attention(self, layer: int, x: np.ndarray, cache: ReferenceCache) -> np.ndarray:
        """Return the attention layer's output [T, D] for x [T, D]. Query head h uses key/value head
        h // (n_heads / n_kv_heads)."""
        c, p = self.config, f"model.layers.{layer}.self_attn"
        q = self._norm_heads(f"{p}.q_norm", _heads(self._linear(f"{p}.q_proj", x), c.n_heads))
        k = self._norm_heads(f"{p}.k_norm", _heads(self._linear(f"{p}.k_proj", x), c.n_kv_heads))
        positions = cache.offset + np.arange(len(x))
        if layer not in c.layers_without_rope:
            angles, factor = np.outer(positions, self._rope.frequencies), np.float32(self._rope.factor)
            q, k = rope(q * factor, angles), rope(k * factor, angles)
        if c.query_scale is not None:
            q = q * query_scales(c.query_scale, positions)[:, None]
        k, v = cache.append(layer, k, _heads(self._linear(f"{p}.v_proj", x), c.n_kv_heads))
        seen = visible(cache.offset, len(x), c.sliding_window)
        out = np.empty_like(q)
        for head in range(c.n_heads):
            group = head * c.n_kv_heads // c.n_heads
            scores = q[head] @ k[group].T / np.sqrt(c.head_dim)
            if self._slopes is not None:
                scores = scores + self._slopes[head] * (np.arange(len(k[group])) - positions[:, None])
            out[head] = softmax(np.where(seen, scores, -np.inf)) @ v[group]
        return self._linear(f"{p}.o_proj", out.swapaxes(0, 1).reshape(len(x), -1))

    def _norm_heads(self, name: str, heads: np.ndarray) -> np.ndarray:
        """Apply the RMS norm `name` to each head of `heads` [H, T, d]. If the model has no norm with this
        name, return the heads unchanged."""
        weight = self._weights.get(f"{name}.weight")
        return heads if weight is None else rms_norm(heads, weight, self.config.rms_norm_eps)

    def _mlp(self, layer: str, x: np.ndarray) -> np.ndarray:
        if not self.config.gated_mlp:
            return self._linear(f"{layer}.mlp.down_proj", gelu(self._linear(f"{layer}.mlp.up_proj", x)))
        gate = self._linear(f"{layer}.mlp.gate_proj", x).astype(np.float64)
        silu = gate / (1.0 + np.exp(-np.clip(gate, -80, 80)))
        return self._linear(
            f"{layer}.mlp.down_proj", (silu * self._linear(f"{layer}.mlp.up_proj", x)).astype(np.float32)
        )

    def _linear(self, path: str, x: np.ndarray) -> np.ndarray:
        """Return x [T, in] @ W [out, in]^T, plus the bias if the module has one, plus the base LoRA's change.
        W: the weight of the module `path`."""
        y = x @ self._weights[f"{path}.weight"].T
        bias = self._weights.get(f"{path}.bias")
        y = y if bias is None else y + bias
        return self._add_lora(y, x, path.rsplit(".", 1)[1], int(path.split(".")[2]))

    def _add_lora(self, y: np.ndarray, x: np.ndarray, module: str, layer: int) -> np.ndarray:
        """Return y + scale * (x @ lora_a) @ lora_b if the base LoRA changes `module`, else y."""
        if self.lora is None or (module, layer) not in self.lora.pairs:
            return y
        a, b = self.lora.pairs[module, layer]
        return y + np.float32(self.lora.scale) * (x @ a) @ b


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return x / sqrt(mean(x^2) + eps) * weight, with the mean over the last axis."""
    x64 = x.astype(np.float64)
    return (x64 / np.sqrt(np.mean(x64**2, axis=-1, keepdims=True) + eps) * weight).astype(np.float32)


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> np.ndarray:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight (+ bias) over the last axis. (Ba et al. 2016)"""
    x64 = x.astype(np.float64)
    centred = x64 - x64.mean(axis=-1, keepdims=True)
    y = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps) * weight
    return (y if bias is None else y + bias).astype(np.float32)


def gelu(x: np.ndarray) -> np.ndarray:
    """Return x times the probability that a standard normal number is below x. (Hendrycks & Gimpel 2016)"""
    below = [0.5 * math.erfc(-number / math.sqrt(2)) for number in x.reshape(-1).tolist()]
    return (x * np.array(below).reshape(x.shape)).astype(np.float32)


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    return (e / e.sum(axis=-1, keepdims=True)).astype(np.float32)


def visible(offset: int, n: int, window: int | None) -> np.ndarray:
    """Return [n, offset + n] bool: True where a new token (row) sees a token (column). A token sees itself
    and the tokens before it, at most `window` tokens in all (None: no limit)."""
    t, s = np.arange(offset, offset + n)[:, None], np.arange(offset + n)[None]
    return (s <= t) & (t - s < (window or offset + n))


def rope(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotate the pairs (x_i, x_{i + n}) by angles[t, i]; x [H, T, d], angles [T, n]. The numbers of a head
    from index 2 n on are not rotated. (Su et al. 2021)"""
    cos, sin = np.cos(angles), np.sin(angles)
    n = angles.shape[1]
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1).astype(np.float32)


def unpack_weights(weights: Weights, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return all weights, norms and biases by name as float32; quantised matrices are dequantised to [out,
    in]."""
    out = {}
    for name, value in weights.items():
        path, _, kind = name.rpartition(".")
        if f"{path}.scales" not in weights or kind == "bias":
            out[name] = np.asarray(value, np.float32)
        elif kind == "weight" and (stored := rounded_matrix(weights, path)) is not None:
            out[name] = stored.dequantise()
        elif kind == "weight":
            scales, biases = weights[f"{path}.scales"], weights[f"{path}.biases"]
            out[name] = dequantise(value, scales, biases, _width(path, config))
    return out


def _width(path: str, config: ModelConfig) -> int:
    """Return the number of inputs of the linear layer (or of the columns of the embedding) `path`."""
    if path.endswith("o_proj"):
        return config.n_heads * config.head_dim
    return config.intermediate_size if path.endswith("down_proj") else config.hidden_size


def _heads(x: np.ndarray, n: int) -> np.ndarray:
    """Split heads: return x [T, n * head_dim] as [n, T, head_dim]."""
    return x.reshape(len(x), n, -1).swapaxes(0, 1)
