"""A Llama decoder in JAX that writes replies as the chat's sampling does, and the gradients of these replies.

A sequence has PROMPT places for the prompt, which is filled up on the right, and REPLY places for the reply.
Shapes: B sequences, S places, V tokens, D numbers of a hidden state, L layers, A movable tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ruvmlx.models.files.gguf import read_gguf
from ruvmlx.models.weights.gguf_model import check_gguf, weights_loader

PROMPT, REPLY = 48, 96
# The chat's sampling for the starter, at the temperature of replies that no user sees (sampled_replies.py).
TEMPERATURE, TOP_P, PENALTY = 0.7, 0.9, 1.1
MODULES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
}  # fmt: skip
Array = Any


@dataclass(frozen=True)
class Inputs:
    """What inputs.py wrote, as arrays on the GPU. movable: [A]; first: [D]; lora_a: [L, in, 2]; eos: the ids
    that end a reply."""

    movable: Array
    first: Array
    lora_a: Array
    eos: Array

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Inputs":
        first, lora_a = (jnp.asarray(data[name], jnp.float32) for name in ("first", "lora_a"))
        return cls(jnp.asarray(data["movable"]), first, lora_a, jnp.asarray(data["eos"]))


@dataclass(frozen=True)
class Replies:
    """Replies to B prompts. tokens: [B, REPLY]; written: [B, REPLY], 1 for each token of the reply, its end
    token included; ended: [B], 1 if the reply ended by itself; head: [B, A], the gradient of the reply's
    log-probability along the first row of lora_b; slope: [B, REPLY, D], the gradient by the states from which
    the tokens were drawn."""

    tokens: Array
    written: Array
    ended: Array
    head: Array
    slope: Array


class Llama:
    """The starter's decoder. Each reply's gradients are those of the distribution from which its tokens were
    drawn."""

    def __init__(self, gguf: Path, inputs: Inputs):
        file, self._config = check_gguf(read_gguf(gguf))
        weights, self._inputs = weights_loader(file, self._config)(), inputs

        def read(name: str) -> np.ndarray:
            if name.endswith("norm.weight") or "layernorm" in name:
                return np.asarray(weights[name], np.float32)
            return weights.blocks_of(name.removesuffix(".weight")).dequantise()

        layers = range(self._config.n_layers)
        self._layers = {
            short: jnp.asarray(np.stack([read(f"model.layers.{i}.{name}.weight") for i in layers]))
            for short, name in MODULES.items()
        }
        self._embedding = jnp.asarray(read("model.embed_tokens.weight"))
        self._norm = jnp.asarray(read("model.norm.weight"))

    # -- the decoder ---------------------------------------------------------------------------------

    def _rms(self, x: Array, weight: Array) -> Array:
        return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + self._config.rms_norm_eps) * weight

    def _rotate(self, x: Array, position: Array) -> Array:
        half = self._config.head_dim // 2
        frequency = self._config.rope_theta ** (-np.arange(half) / half)
        angle = position[..., None] * jnp.asarray(frequency, jnp.float32)
        cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
        first, second = x[..., :half], x[..., half:]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def _attend(self, q: Array, k: Array, v: Array, mask: Array) -> Array:
        """q: [B, S, heads, d]; k, v: [B, K, KV heads, d]; mask: [B, S, K], True where a place is read."""
        c = self._config
        q = q.reshape(*q.shape[:2], c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim)
        scores = jnp.einsum("bsngd,bknd->bngsk", q, k) * c.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), -1)
        return jnp.einsum("bngsk,bknd->bsngd", weights, v).reshape(*q.shape[:2], -1)

    def _layer(self, x, w, position, mask, cache=None, at=None, added=None):
        """Return (x after one layer, the cache, the inputs of down_proj). added: [B, S, D] is added to the
        output of down_proj."""
        c, (batch, length) = self._config, x.shape[:2]
        h = self._rms(x, w["attention_norm"])
        q = self._rotate((h @ w["q"].T).reshape(batch, length, c.n_heads, -1), position)
        k = self._rotate((h @ w["k"].T).reshape(batch, length, c.n_kv_heads, -1), position)
        v = (h @ w["v"].T).reshape(batch, length, c.n_kv_heads, -1)
        if cache is not None:
            cache = k, v = tuple(
                lax.dynamic_update_slice(old, new, (0, at, 0, 0))
                for old, new in zip(cache, (k, v), strict=True)
            )
        x = x + self._attend(q, k, v, mask) @ w["o"].T
        h = self._rms(x, w["mlp_norm"])
        inner = jax.nn.silu(h @ w["gate"].T) * (h @ w["up"].T)
        out = inner @ w["down"].T
        return x + (out if added is None else out + added), cache, inner

    # -- replies -------------------------------------------------------------------------------------

    @partial(jax.jit, static_argnums=(0, 3))
    def read(self, tokens: Array, length: Array, replies: int) -> tuple[Array, Array, Array]:
        """Read Q prompts [Q, PROMPT]. Return the last states [Q * replies, D] and the caches."""
        count, places = tokens.shape[0], jnp.arange(PROMPT)
        position = jnp.broadcast_to(places, (count, PROMPT)).astype(jnp.float32)
        mask = (places[:, None] >= places)[None] & (places < length[:, None])[:, None]
        mask = jnp.concatenate([mask, jnp.zeros((count, PROMPT, REPLY), bool)], 2)
        shape = (count, PROMPT + REPLY, self._config.n_kv_heads, self._config.head_dim)

        def one(x, w):
            x, cache, _ = self._layer(x, w, position, mask, (jnp.zeros(shape), jnp.zeros(shape)), 0)
            return x, cache

        x, (k, v) = lax.scan(one, self._embedding[tokens], self._layers)
        last = jnp.take_along_axis(x, (length - 1)[:, None, None], 1)[:, 0]
        return tuple(  # type: ignore[return-value]
            jnp.repeat(array, replies, axis)
            for array, axis in ((self._rms(last, self._norm), 0), (k, 1), (v, 1))
        )

    @partial(jax.jit, static_argnums=0)
    def write(self, state: Array, k: Array, v: Array, length: Array, key: Array):
        """Write a reply behind each prompt that `read` has read. Return the fields of Replies."""
        given, batch, places = self._inputs, state.shape[0], jnp.arange(PROMPT + REPLY)
        rows = jnp.arange(batch)

        def one(carry, t):
            state, k, v, seen, going, key, head = carry
            p = drawn_distribution(state @ self._embedding.T, seen)
            key, now = jax.random.split(key)
            token = jax.random.categorical(now, jnp.log(p), -1)
            change = (-p).at[rows, token].add(1)
            head += ((state @ given.first) * going)[:, None] * change[:, given.movable]
            slope = (change @ self._embedding) * (going / TEMPERATURE)[:, None]
            was, going = going, going * (1 - (token[:, None] == given.eos).any(-1))
            seen = seen.at[rows, token].set(True)
            position = (length + t).astype(jnp.float32)[:, None]
            written = (places >= PROMPT) & (places <= PROMPT + t)
            mask = ((places < length[:, None]) | written)[:, None]

            def layer(x, weights):
                w, old_k, old_v = weights
                x, cache, _ = self._layer(x, w, position, mask, (old_k, old_v), PROMPT + t)
                return x, cache

            x, (k, v) = lax.scan(layer, self._embedding[token][:, None], (self._layers, k, v))
            return (self._rms(x[:, 0], self._norm), k, v, seen, going, key, head), (token, was, slope)

        seen = jnp.zeros((batch, self._config.vocab_size), bool)
        start = (state, k, v, seen, jnp.ones(batch), key, jnp.zeros((batch, len(given.movable))))
        end, (token, was, slope) = lax.scan(one, start, jnp.arange(REPLY))
        return token.T, was.T, 1 - end[4], end[6], slope.transpose(1, 0, 2)

    # -- gradients -----------------------------------------------------------------------------------

    def reply_gradients(self, prompt: Array, length: Array, tokens: Array, slope: Array) -> Array:
        """Return the gradients [B, P] of the log-probabilities of replies by all lora_b of the basis."""
        batch, places = len(prompt), jnp.arange(PROMPT + REPLY - 1)
        length = jnp.asarray(length)[:, None]
        sequence = jnp.concatenate([jnp.asarray(prompt), tokens[:, : REPLY - 1]], 1)
        position = jnp.where(places < PROMPT, places, length + places - PROMPT).astype(jnp.float32)
        known = (places < length) | (places >= PROMPT)
        by_state = jnp.zeros((batch, len(places), slope.shape[-1]))
        by_state = by_state.at[jnp.arange(batch), length[:, 0] - 1].add(slope[:, 0])
        by_state = by_state.at[:, PROMPT:].add(slope[:, 1:])
        return self._gradients(sequence, position, known, by_state)

    def prose_gradients(self, texts: Sequence[Sequence[int]]) -> Array:
        """Return the gradients [B, P] of the log-probabilities of B texts, at temperature 1."""
        size = max(map(len, texts))
        sequence = np.array([list(text) + [0] * (size - len(text)) for text in texts], np.int32)
        known = np.arange(size) < np.array([len(text) for text in texts])[:, None]
        position = np.broadcast_to(np.arange(size), sequence.shape).astype(np.float32)
        return self._gradients(sequence, position, known, None)

    @partial(jax.jit, static_argnums=0)
    def _gradients(self, sequence: Array, position: Array, known: Array, by_state: Array | None) -> Array:
        """by_state: [B, S, D], the gradient by the final states; None: that of the next tokens."""
        batch, size = sequence.shape
        places = jnp.arange(size)
        mask = (places[:, None] >= places)[None] & known[:, None]

        def run(added):
            @jax.checkpoint
            def one(x, weights):
                w, lora_a, more = weights
                x, _, inner = self._layer(x, w, position, mask, added=more)
                return x, inner @ lora_a

            x, read = lax.scan(one, self._embedding[sequence], (self._layers, self._inputs.lora_a, added))
            return self._rms(x, self._norm), read

        zeros = jnp.zeros((self._config.n_layers, batch, size, self._config.hidden_size))
        state, pull, read = jax.vjp(run, zeros, has_aux=True)
        if by_state is None:
            change = -jax.nn.softmax(state @ self._embedding.T, -1)
            change = change.at[jnp.arange(batch)[:, None], places[None, :-1], sequence[:, 1:]].add(1)
            both = known & jnp.roll(known, -1, 1) & (places < size - 1)
            by_state = (change @ self._embedding) * both[..., None]
        (by_output,) = pull(by_state)
        return jnp.einsum("lbsr,lbsd->blrd", read * known[..., None], by_output).reshape(batch, -1)


def drawn_distribution(logits: Array, seen: Array) -> Array:
    """Return the probabilities [B, V] with which the chat's sampling draws a token. logits: [B, V]; seen: [B,
    V], True for the tokens of the reply so far."""
    logits = jnp.where(seen, jnp.where(logits > 0, logits / PENALTY, logits * PENALTY), logits)
    logprobs = jax.nn.log_softmax(logits, -1)
    p = jnp.exp(logprobs)
    ordered = -jnp.sort(-p, -1)
    kept = jnp.maximum(1, (jnp.cumsum(ordered, -1) - ordered < TOP_P).sum(-1))
    least = jnp.take_along_axis(ordered, (kept - 1)[:, None], 1)
    return jax.nn.softmax(jnp.where(p >= least, logprobs / TEMPERATURE, -jnp.inf), -1)
