"""This module names the versions that all ranks must share."""

from importlib.metadata import version

from ... import __version__


def installed() -> str:
    return f"ruvmlx {__version__} with MLX {version('mlx')}"
