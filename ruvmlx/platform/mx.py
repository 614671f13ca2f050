"""This module loads a fast BLAS and then imports MLX. The other modules import MLX from this module (only a
benchmark of mlx-lm imports MLX itself).

    from ruvmlx.platform.mx import mx, nn

`BLAS` describes the library for matrix products on the CPU (blas.py). With RUVMLX_GPU=off, ruvmlx does not
use the GPU.
"""

import os

from .blas import preload

BLAS = preload()

import mlx.core as mx  # noqa: E402  after the BLAS, because libmlx binds its symbols only once
from mlx import nn  # noqa: E402

GPU_ALLOWED = os.environ.get("RUVMLX_GPU") != "off"
if not GPU_ALLOWED:
    mx.set_default_device(mx.cpu)

__all__ = ["BLAS", "GPU_ALLOWED", "mx", "nn"]
