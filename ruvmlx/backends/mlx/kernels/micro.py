"""The MicroLoRA update with momentum:  velocity' = mu * velocity + eta * g,  w' = w + velocity'.

Formula and all-or-none rule: neon/include/rvm.h, rvm_kernels.micro_update. Arrays of MLX cannot change
in place, so new ones are returned; when any new weight is not finite NotFinite is raised and nothing is.
"""

from collections.abc import Sequence

import numpy as np

from ruvmlx.kernels.micro import NotFinite
from ruvmlx.platform.mx import mx

from .lora import params
from .source import Kernel, on_gpu

UPDATE = Kernel(
    "micro_update",
    (("w", "float"), ("velocity", "float"), ("g", "float"), ("params", "int")),
    (("w_new", "float"), ("velocity_new", "float"), ("bad", "int")),
    (),
    threads=256,
)
Step = tuple[mx.array, mx.array, mx.array]  # weights, velocity, gradient


def micro_step(steps: Sequence[Step], eta: float, mu: float) -> list[tuple[mx.array, mx.array]]:
    """[(weights, velocity)] after one step; all of them, or NotFinite."""
    update = micro_update_gpu if on_gpu() else micro_update_ops
    done = [update(*step, eta, mu) for step in steps]
    if any(np.array(bad).any() for *_, bad in done):
        raise NotFinite("micro_update: a new weight is not finite")
    return [(w, velocity) for w, velocity, _ in done]


def micro_update_gpu(
    w: mx.array, velocity: mx.array, g: mx.array, eta: float, mu: float, run=Kernel.__call__
) -> tuple[mx.array, mx.array, mx.array]:
    """New weights, new velocity, and per threadgroup how many weights are not finite."""
    groups = -(-w.size // 1024)
    shapes = [w.shape, w.shape, (groups,)]
    w_new, v_new, bad = run(UPDATE, [w, velocity, g, params(w.size, eta, mu)], shapes, (groups, 1, 1), ())
    return w_new, v_new, bad


def micro_update_ops(
    w: mx.array, velocity: mx.array, g: mx.array, eta: float, mu: float
) -> tuple[mx.array, mx.array, mx.array]:
    """The twin."""
    v_new = mu * velocity + eta * g
    w_new = w + v_new
    return w_new, v_new, mx.sum(~mx.isfinite(w_new)).astype(mx.int32)
