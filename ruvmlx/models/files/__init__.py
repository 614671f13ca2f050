"""This package reads and writes file formats: GGUF, safetensors and JSON, and the quantised blocks in these
files.

The package checks every size in a file before it uses the size. The package knows only file formats, and
nothing of layers, tokens or model names. Start with `gguf.py` and `safetensors_file.py`.
"""
