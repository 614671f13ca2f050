"""This module describes the two inputs of a C decoder: the sizes of a model and its packed weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a model. Most fields have the name and the meaning of a field of rvm_decoder_config.

    rope_frequencies: radians per position, [n]; RoPE turns the first 2 n numbers of each head
    layer_norm: True if the norms are LayerNorms; False: they are RMS norms
    alibi_slopes: float32 [n_heads]; None: the model has no ALiBi, so attention scores do not depend on the
        distance
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    sliding_window: int
    norm_eps: float
    rope_frequencies: NDArray[np.float64]
    rope_factor: float = 1.0
    query_beta: float = 0.0
    query_span: float = 0.0
    layer_norm: bool = False
    alibi_slopes: Array | None = None


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer.

    matrices: packed matrices by module; without gate_proj, the MLP is down(gelu(up(x)))
    biases: the biases that the model has, by module
    input_norm, post_norm: [D], the weights of the norms before attention and MLP
    input_norm_bias, post_norm_bias: [D], the biases of the norms before attention and MLP; None: the norms
        have no bias
    q_norm, k_norm: [head_dim], the weights of the norms of the queries and of the keys of each head
    no_rope: True if the layer has no rotary embedding
    """

    matrices: Mapping[str, np.ndarray]
    biases: Mapping[str, Array]
    input_norm: Array
    post_norm: Array
    input_norm_bias: Array | None = None
    post_norm_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None
    no_rope: bool = False


@dataclass(frozen=True)
class DecoderWeights:
    embedding: np.ndarray
    lm_head: np.ndarray  # the output head; it can be the same array as the embedding
    norm: Array
    layers: Sequence[LayerWeights]
    norm_bias: Array | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all weights. If the output head is the same array as the embedding, it is
        counted only once."""
        held = [self.embedding, self.lm_head, self.norm, *_there(self.norm_bias)]
        for layer in self.layers:
            held += [*layer.matrices.values(), *layer.biases.values(), layer.input_norm, layer.post_norm]
            held += _there(layer.input_norm_bias, layer.post_norm_bias, layer.q_norm, layer.k_norm)
        return sum(array.nbytes for array in {id(array): array for array in held}.values())


def _there(*arrays: Array | None) -> list[Array]:
    return [array for array in arrays if array is not None]
