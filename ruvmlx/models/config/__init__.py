"""This package describes a model before its weights are read: its family, its sizes, its RoPE and its
tensors.

The package converts a `config.json` or the header of a GGUF file to a `ModelConfig`. The package reads no
weights and no tokenizer, and does not find models by name. Start with `model.py` (`ModelConfig` and `Model`),
then read `families.py`.
"""
