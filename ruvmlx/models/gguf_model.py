"""A GGUF file of architecture "llama" -> ModelConfig and Weights.

llama.cpp's converter writes the q and k rows of every head interleaved (row 2i + j is what Hugging Face
calls row j * head_dim / 2 + i); they are put back here, so rope is half-split everywhere after loading.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptFile, UnsupportedModel
from .gguf import GGUFFile, GGUFTensor
from .gguf_blocks import check_blocks, unpack
from .gguf_split import read_whole
from .layout import check_config, check_shapes, matrices, vectors
from .mapped import release
from .model import ModelConfig, Weights
from .rope import llama3_from_divisors
from .stored import StoredMatrix

_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_FREQS = "rope_freqs.weight"


def gguf_name(name: str) -> str:
    """ "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, module = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_MODULES[module]}.{kind}"
    return f"{_MODULES[module]}.{kind}"


def open_gguf(path: Path) -> tuple[GGUFFile, ModelConfig]:
    """A file, or all parts of a split one, with header, configuration and tensor shapes checked."""
    file = read_whole(path)
    config = read_config(file)
    check_tensors(file, config)
    return file, config


def read_config(file: GGUFFile) -> ModelConfig:
    """The file's keys and tensor list as a checked ModelConfig."""
    arch = file.metadata.get("general.architecture")
    if arch != "llama":
        raise UnsupportedModel(
            f"{file.path.name} holds a model of architecture {str(arch)[:40]!r}; "
            "only 'llama' (Llama and Mistral) is run."
        )
    keys = _Keys(file)
    config = _base_config(file, keys)
    check_config(config, file.path.name)
    _check_rope_width(file, keys, config)
    return replace(config, rope_scaling=_llama3_scaling(file, config))


class _Keys:
    """Typed look-ups among the metadata keys."""

    def __init__(self, file: GGUFFile):
        self.file = file

    def _bad(self, key: str, got: Any, expected: str) -> CorruptFile:
        return CorruptFile(f"{self.file.path.name}: key {key} is {str(got)[:40]!r}; {expected} was expected.")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._bad(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            raise self._bad(key, value, "a number")
        return float(str(np.float32(value)))  # the intended 1e-05, not its float32 value 9.999999747e-06

    def uniform(self, key: str, default: int | None = None) -> int:
        """An integer, or an array with the same value for every layer."""
        value = self.file.metadata.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise UnsupportedModel(f"{self.file.path.name}: {key} differs from layer to layer.")
            return int(value[0])
        return self.integer(key, default)


def _base_config(file: GGUFFile, keys: _Keys) -> ModelConfig:
    n_heads = keys.uniform("llama.attention.head_count")
    hidden = keys.integer("llama.embedding_length")
    if n_heads < 1:
        raise CorruptFile(
            f"{file.path.name}: llama.attention.head_count is {n_heads}; at least 1 was expected."
        )
    window = keys.integer("llama.attention.sliding_window", 0) or None
    return ModelConfig(
        model_type="mistral" if window else "llama",
        hidden_size=hidden,
        n_layers=keys.integer("llama.block_count"),
        n_heads=n_heads,
        n_kv_heads=keys.uniform("llama.attention.head_count_kv", n_heads),
        head_dim=keys.integer("llama.attention.key_length", hidden // n_heads),
        intermediate_size=keys.uniform("llama.feed_forward_length"),
        vocab_size=_vocab_size(file),
        rms_norm_eps=keys.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("llama.rope.freq_base", 10000.0),
        max_context=keys.integer("llama.context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_linear_factor=_linear_factor(file, keys),
        sliding_window=window,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: the vocabulary, padding included."""
    if "token_embd.weight" not in file.tensors:
        raise CorruptFile(f"{file.path.name}: tensor 'token_embd.weight' is missing. Fetch the model again.")
    return file.tensors["token_embd.weight"].shape[0]


def _linear_factor(file: GGUFFile, keys: _Keys) -> float:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if "llama.rope.scale_linear" in file.metadata:
        return keys.number("llama.rope.scale_linear")
    if kind == "linear":
        return keys.number("llama.rope.scaling.factor")
    if kind not in ("none", "llama3"):
        raise UnsupportedModel(
            f"{file.path.name}: rope scaling {str(kind)[:40]!r}; none, linear and Llama-3 are run."
        )
    return 1.0


def _check_rope_width(file: GGUFFile, keys: _Keys, config: ModelConfig) -> None:
    """Rope has to turn whole heads, and values have to be as wide as keys."""
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if keys.integer(key, config.head_dim) != config.head_dim:
            raise UnsupportedModel(
                f"{file.path.name}: {key} is {file.metadata[key]}; only head_dim ({config.head_dim}) is run."
            )


def _llama3_scaling(file: GGUFFile, config: ModelConfig):
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    check_shapes({ROPE_FREQS: tensor.shape}, {ROPE_FREQS: (config.head_dim // 2,)}, file.path.name)
    divisors = unpack(file.raw(tensor), tensor)["weight"].astype(np.float64)
    if (divisors == 1).all():
        return None
    scaling = llama3_from_divisors(divisors, config.rope_theta)
    if scaling is None:
        raise UnsupportedModel(f"{file.path.name}: {ROPE_FREQS} is not a Llama-3 scaling; no other is run.")
    return scaling


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """All tensors of the decoder are present with their shapes, and there are no others."""
    expected: dict[str, tuple] = {gguf_name(f"{m}.weight"): shape for m, shape in matrices(config)}
    expected |= {gguf_name(name): shape for name, shape in vectors(config)}
    check_shapes({name: t.shape for name, t in file.tensors.items()}, expected, file.path.name)
    for name in file.tensors:
        if name not in expected and name != ROPE_FREQS and not name.endswith((".attn_rot_embd", ".rot_embd")):
            raise UnsupportedModel(
                f"{file.path.name}: tensor {name[:60]!r} belongs to no Llama or Mistral decoder."
            )


def weights_loader(file: GGUFFile, config: ModelConfig) -> Callable[[], Weights]:
    """What `Model.load_weights` calls; the heavy part."""
    return lambda: LazyWeights(file, config)


class LazyWeights(Mapping[str, np.ndarray]):
    """The weights of a file, converted when they are read.

    Only the last matrix is kept: reading them in order without keeping any needs memory for one.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self._file, self._config = file, config
        self._vectors = {name for name, _ in vectors(config)}
        self._names = [name for m, _ in matrices(config) for name in _parts(file, m)] + list(
            dict(vectors(config))
        )
        self._known = frozenset(self._names)
        self._last: tuple[str, dict[str, np.ndarray]] = ("", {})
        self.pause: Callable[[], None] = lambda: None  # called while a large matrix is converted; may raise

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._known:
            raise KeyError(name)
        if name in self._vectors:
            return _vector(self._file, self._config, name)
        module, _, kind = name.rpartition(".")
        if self._last[0] != module:
            self._last = (module, _matrix(self._file, self._config, module, self.pause))
        return self._last[1][kind]

    def stored(self, module: str) -> StoredMatrix | None:
        """The matrix's blocks, q and k rows put back in order; None for plain numbers."""
        tensor = self._tensor(module)
        if tensor.type.block == 1:
            return None
        raw = self._file.raw(tensor).reshape(tensor.shape[0], -1)
        check_blocks(raw, tensor.type, tensor.name)
        heads = _rope_heads(self._config, module)
        if not heads:
            return StoredMatrix(tensor.name, tensor.type, raw)
        ordered = half_split_rows(raw, heads)
        release(raw)
        return StoredMatrix(tensor.name, tensor.type, ordered)

    def stored_tensor(self, module: str) -> GGUFTensor:
        return self._tensor(module)

    def _tensor(self, module: str) -> GGUFTensor:
        if f"{module}.weight" not in self._known:
            raise KeyError(module)
        return self._file.tensors[gguf_name(f"{module}.weight")]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _parts(file: GGUFFile, module: str) -> list[str]:
    """Names of the arrays that a matrix is made of."""
    packed = file.tensors[gguf_name(f"{module}.weight")].type.block > 1
    return [f"{module}.{kind}" for kind in (("weight", "scales", "biases") if packed else ("weight",))]


def _matrix(
    file: GGUFFile, config: ModelConfig, module: str, pause: Callable[[], None]
) -> dict[str, np.ndarray]:
    """{"weight"} or {"weight", "scales", "biases"}, q and k rows put back in order."""
    tensor = file.tensors[gguf_name(f"{module}.weight")]
    raw = file.raw(tensor)
    parts = unpack(raw, tensor, pause)
    heads = _rope_heads(config, module)
    if heads or len(parts) > 1:  # copied: the mapped original is not needed again
        parts = {kind: half_split_rows(a, heads) if heads else a for kind, a in parts.items()}
        release(raw)
    return parts


def _vector(file: GGUFFile, config: ModelConfig, name: str) -> np.ndarray:
    """Norms and biases. Rarely quantised, and then spread out: they are small."""
    tensor = file.tensors[gguf_name(name)]
    parts = unpack(file.raw(tensor), tensor)
    if "scales" in parts:
        raise UnsupportedModel(
            f"{file.path.name}: {tensor.name} is stored as {tensor.type.name}; F32 was expected."
        )
    heads = _rope_heads(config, name.removesuffix(".bias")) if name.endswith(".bias") else 0
    return half_split_rows(parts["weight"], heads) if heads else parts["weight"]


def _rope_heads(config: ModelConfig, module: str) -> int:
    """How many heads the module's rows belong to, when rope turns them; else 0."""
    if module.endswith("q_proj"):
        return config.n_heads
    return config.n_kv_heads if module.endswith("k_proj") else 0


def half_split_rows(array: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows [out, ...] of each head: interleaved (0, h, 1, h + 1, ...; h = head_dim / 2) -> half-split."""
    rest = array.shape[1:]
    pairs = array.reshape(n_heads, -1, 2, *rest)  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1, *rest)
