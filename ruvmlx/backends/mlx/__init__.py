"""This package is the MLX backend, for Metal, CUDA and the CPU: it has the models' graphs, the KV caches, the
launch code of the GPU kernels, and the decode loop.

The package imports MLX and mlx-lm, in addition to the packages that ruvmlx/backends imports. Start with
`backend.py`, which builds on `runner.py`. `tiered.py` connects the graph to the pages of `ruvmlx/kv`.
"""
