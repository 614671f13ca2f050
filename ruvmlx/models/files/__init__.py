"""This package reads and writes file formats: GGUF, safetensors and JSON, and the quantised blocks in these
files.

The package checks the sizes in a file before it allocates memory for them. The package reads only the
formats, and does not interpret the names of layers, tokens or models. Start with `gguf.py` and
`safetensors_file.py`.
"""
