"""This package reads and writes file formats: GGUF, safetensors and JSON, and the quantised blocks in these
files.

It checks every size in a file before it uses the size. It has no knowledge of layers, tokens and model names.
Start with `gguf.py` and `safetensors_file.py`.
"""
