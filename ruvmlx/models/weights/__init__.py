"""Checked weights of one model, from a GGUF file or from a folder of safetensors files.

A loader returns a `Model` with weights that are read when they are used. Nothing here may look for models or
compute with weights. Start with `gguf_model.py` and `safetensors_model.py`.
"""
