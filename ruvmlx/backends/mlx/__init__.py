"""The MLX backend, for Metal, CUDA and the CPU: graphs, caches, GPU kernels, the decode stream.

It may import MLX and mlx-lm besides what every backend may import. Start with `backend.py`, which builds on
`runner.py`; `tiered.py` connects the graph to the pages of `ruvmlx/kv`.
"""
