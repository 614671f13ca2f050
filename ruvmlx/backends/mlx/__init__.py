"""This package is the MLX backend, for Metal, CUDA and the CPU: graphs, caches, GPU kernels, decoding.

The package imports MLX and mlx-lm besides the packages that every backend imports. Start with `backend.py`,
which builds on `runner.py`. `tiered.py` connects the graph to the pages of `ruvmlx/kv`.
"""
