"""The one door to MLX: a fast BLAS first, MLX second.

    from ruvmlx.backends.mx import mx, nn

`BLAS` says what the CPU's matrix products run on.
"""

from .blas import preload

BLAS = preload()

import mlx.core as mx  # noqa: E402  after the BLAS: libmlx binds its symbols once
from mlx import nn  # noqa: E402

__all__ = ["BLAS", "mx", "nn"]
