"""This package reads and checks the weights of one model, from a GGUF file or a folder of safetensors files.

A loader returns a `Model`. The model reads a weight when a backend asks for the weight. The package does not
search for models and does not compute with weights. Start with `gguf_model.py` and `safetensors_model.py`.
"""
