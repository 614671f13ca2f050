"""This package reads and checks the weights of one model, from a GGUF file or a folder of safetensors files.

The loaders return the configuration and a function `load_weights`; a weight is read from the file only when a
backend asks for it. The package does not search for models and does not compute with weights. Start with
`gguf_model.py` and `safetensors_model.py`.
"""
