"""File formats: GGUF, safetensors and JSON files, and the blocks of numbers inside them.

Every size that a file states is checked here before it is used. Nothing here may know what a layer, a
token or a model name is. Start with `gguf.py` and `safetensors_file.py`.
"""
