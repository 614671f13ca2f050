"""ruvmlx: a local chat runtime on MLX that learns from its user's ratings."""

__version__ = "0.1.0"
