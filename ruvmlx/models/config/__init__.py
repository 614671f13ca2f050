"""What a model is before its weights are read: its family, sizes, rope and the tensors it must have.

Both `config.json` and the header of a GGUF file become one `ModelConfig`. Nothing here may read weights,
text or names of models. Start with `model.py` (`ModelConfig` and `Model`), then `families.py`.
"""
