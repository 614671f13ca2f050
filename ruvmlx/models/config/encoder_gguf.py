"""This module converts the metadata keys of a GGUF file to the configuration of an encoder (encoder.py)."""

from ...errors import UnsupportedModel
from ..files.gguf import GGUFFile
from .encoder import GGUF_ENCODERS, NOMIC, POOLINGS, TYPES, WORDS, EncoderConfig, check_encoder
from .gguf_config import Keys

# {value of the key pooling_type: pooling}. llama.cpp uses the mean if a file of these families has no key.
_POOLINGS = dict(enumerate(POOLINGS, 1))


def gguf_encoder(file: GGUFFile) -> EncoderConfig:
    """Return the configuration of the encoder in a GGUF file. llama.cpp's converter cuts the rows before
    position 0 off, so the table of positions begins with position 0."""
    architecture = str(file.metadata["general.architecture"])
    model_type = GGUF_ENCODERS[architecture]
    keys, nomic = Keys(file, architecture), model_type == NOMIC
    if keys.get("attention.causal") is True:
        raise UnsupportedModel(f"{keys.where}: an encoder with causal attention is not run.")
    config = EncoderConfig(
        model_type=model_type,
        hidden_size=keys.integer("embedding_length"),
        n_layers=keys.integer("block_count"),
        vocab_size=_rows(file, WORDS),
        max_context=keys.integer("context_length"),
        tie_word_embeddings=False,
        n_heads=keys.uniform("attention.head_count"),
        intermediate_size=keys.uniform("feed_forward_length"),
        norm_eps=keys.number("attention.layer_norm_epsilon"),
        n_types=_rows(file, TYPES),
        pooling=_pooling(keys),
        rope_theta=keys.number("rope.freq_base", 10000.0) if nomic else None,
        gated_mlp=nomic,
        biases=not nomic,
    )
    check_encoder(config, keys.where)
    return config


def _rows(file: GGUFFile, name: str) -> int:
    """Return the number of rows of a table; 0 if the file does not have the table. GGUF leaves out the
    dimension of a table of one row."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return 0
    return tensor.shape[0] if len(tensor.shape) > 1 else 1


def _pooling(keys: Keys) -> str:
    kind = keys.integer("pooling_type", 1)
    if kind not in _POOLINGS:
        raise UnsupportedModel(
            f"{keys.where}: {keys.prefix}pooling_type is {kind}; 1 (mean), 2 (cls) and 3 (last) are run."
        )
    return _POOLINGS[kind]
