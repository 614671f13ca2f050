"""The MLX backend: graphs, caches, Metal kernels, decode stream."""
