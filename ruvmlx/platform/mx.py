"""Imports MLX after a fast BLAS is loaded. All other modules import MLX from here.

    from ruvmlx.platform.mx import mx, nn

`BLAS`: the library of the CPU's matrix products. RUVMLX_GPU=off: as if this machine had no GPU.
"""

import os

from .blas import preload

BLAS = preload()

import mlx.core as mx  # noqa: E402  after the BLAS: libmlx binds its symbols once
from mlx import nn  # noqa: E402

GPU_ALLOWED = os.environ.get("RUVMLX_GPU") != "off"
if not GPU_ALLOWED:
    mx.set_default_device(mx.cpu)

__all__ = ["BLAS", "GPU_ALLOWED", "mx", "nn"]
