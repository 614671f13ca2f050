"""This module lists the tensors of ruvmlx's decoder and their shapes, so that loaders can check a model's
files."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import prod

from ...errors import CorruptFile, UnsupportedModel
from .model import ModelConfig
from .rope_scaling import Llama3Rope, LongRope, YarnRope

LAYER_LIMIT = 1 << 10


def matrices(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (module name, (rows, columns)) of every matrix. In files, the matrices can be quantised."""
    d, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield "model.embed_tokens", (config.vocab_size, d)
    for i in range(config.n_layers):
        layer = f"model.layers.{i}."
        yield layer + "self_attn.q_proj", (q, d)
        yield layer + "self_attn.k_proj", (kv, d)
        yield layer + "self_attn.v_proj", (kv, d)
        yield layer + "self_attn.o_proj", (d, q)
        if config.gated_mlp:
            yield layer + "mlp.gate_proj", (ffn, d)
        yield layer + "mlp.up_proj", (ffn, d)
        yield layer + "mlp.down_proj", (d, ffn)
    if not config.tie_word_embeddings:
        yield "lm_head", (config.vocab_size, d)


def vectors(config: ModelConfig) -> Iterator[tuple[str, tuple[int]]]:
    """Yield (tensor name, (number of elements,)) of every norm and bias."""
    for i in range(config.n_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield from _norm(f"model.layers.{i}.{norm}", config)
        if config.head_norms:
            yield f"model.layers.{i}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"model.layers.{i}.self_attn.k_norm.weight", (config.head_dim,)
    yield from _norm("model.norm", config)
    for module, (out, _) in matrices(config):
        if module.rpartition(".")[2] in config.biases:
            yield f"{module}.bias", (out,)


def _norm(name: str, config: ModelConfig) -> Iterator[tuple[str, tuple[int]]]:
    for kind in ("weight", "bias") if config.norm_biases else ("weight",):
        yield f"{name}.{kind}", (config.hidden_size,)


def parameter_count(config: ModelConfig) -> int:
    return sum(prod(shape) for _, shape in [*matrices(config), *vectors(config)])


def check_config(config: ModelConfig, where: str) -> None:
    """Raise CorruptFile if a number of the configuration is impossible (for example a negative size), before
    the program allocates memory of these sizes. Raises UnsupportedModel if RoPE is scaled and rotates only a
    part of each head."""
    sizes = (
        "hidden_size",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    )
    for name in (*sizes, "max_context"):
        value = getattr(config, name)
        if not 0 < value < 1 << 31:
            raise CorruptFile(f"{where}: {name} is {value}; a positive number was expected.")
    check_layers(config.n_layers, where)
    if config.n_heads % config.n_kv_heads:
        raise CorruptFile(
            f"{where}: {config.n_heads} heads cannot share {config.n_kv_heads} key-value heads evenly."
        )
    if config.head_dim % 2:
        raise CorruptFile(f"{where}: head_dim is {config.head_dim}; rope needs an even number.")
    if config.turned_dims % 2 or not 0 <= config.turned_dims <= config.head_dim:
        raise CorruptFile(
            f"{where}: rope turns {config.turned_dims} of the {config.head_dim} numbers of a head; "
            "an even number of them was expected."
        )
    if not 0 <= config.alibi_bias_max < 1e3:
        raise CorruptFile(
            f"{where}: ALiBi's largest bias is {config.alibi_bias_max:g}; a small number was expected."
        )
    _check_floats(config, where)


def check_layers(n_layers: int, where: str) -> None:
    if not 0 < n_layers <= LAYER_LIMIT:
        raise CorruptFile(f"{where}: n_layers is {n_layers}; 1 to {LAYER_LIMIT} were expected.")


def layers_without_rope(n_layers: int, interval: int) -> frozenset[int]:
    """Return the indexes of the layers without RoPE: the last layer of each group of `interval` layers."""
    return frozenset(range(interval - 1, n_layers, interval))


def _check_floats(config: ModelConfig, where: str) -> None:
    if not 0 < config.rms_norm_eps < 1:
        raise CorruptFile(
            f"{where}: the norms' eps is {config.rms_norm_eps}; a small positive number was expected."
        )
    if not 1 <= config.rope_theta < 1e12:
        raise CorruptFile(f"{where}: rope_theta is {config.rope_theta}; a number of at least 1 was expected.")
    _check_scaling(config, where)
    if config.sliding_window is not None and config.sliding_window < 1:
        raise CorruptFile(f"{where}: sliding_window is {config.sliding_window}; it must be positive.")


def _check_scaling(config: ModelConfig, where: str) -> None:
    """Raise CorruptFile if a parameter of RoPE's scaling or of the query scale is not between 0 and 1e9, or
    if rope.py cannot compute with the parameters. Raise UnsupportedModel if RoPE is scaled and rotates only a
    part of each head."""
    scaling, scale = config.rope_scaling, config.query_scale
    if scaling is not None and config.rope_dims is not None:
        raise UnsupportedModel(
            f"{where}: rope turns a part of each head, and is scaled; one of the two is run."
        )
    parts = [asdict(part) for part in (scaling, scale) if part is not None]
    numbers = [number for part in parts for value in part.values() for number in _flat(value)]
    sound = all(0 < number < 1e9 for number in numbers)
    match scaling:
        case Llama3Rope():
            sound = sound and scaling.factor >= 1 and scaling.low_freq_factor < scaling.high_freq_factor
        case YarnRope():
            sound = sound and config.rope_theta > 1
        case LongRope():
            pairs = config.turned_dims // 2
            sound = sound and len(scaling.short_factor) == len(scaling.long_factor) == pairs
    if not sound:
        raise CorruptFile(f"{where}: the rope scaling {str(scaling or scale)[:200]} does not make sense.")


def _flat(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def check_shapes(got: Mapping[str, tuple], expected: Mapping[str, tuple], where: str) -> None:
    """Raise CorruptFile if a tensor of `expected` ({name: shape}) is missing in `got` or has another shape
    there."""
    for name, shape in expected.items():
        if name not in got:
            raise CorruptFile(f"{where}: tensor {name!r} {list(shape)} is missing. Fetch the model again.")
        if tuple(got[name]) != tuple(shape):
            raise CorruptFile(
                f"{where}: tensor {name!r} has shape {list(got[name])}; "
                f"its configuration asks for {list(shape)}."
            )


def check_vocab(tokens: int, rows: int, where: str) -> None:
    """Raise CorruptFile if the tokenizer has more tokens than the embedding has rows. The embedding can have
    more rows than tokens."""
    if tokens > rows:
        raise CorruptFile(f"{where}: the tokenizer has {tokens} tokens, the embedding only {rows} rows.")
