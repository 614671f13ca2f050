"""Both tiers of adapters on one layer:  y + s1 (x A1) B1 + s2 (x A2) B2, in two passes whatever the ranks.

x: [T, in]; A1: [in, R1], B1: [R1, out]; A2: [in, R2], B2: [R2, out]; y: [T, out]. float32.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ruvmlx.platform.mx import mx

from .pages import PARAMS
from .source import Kernel, on_gpu

# Of the base and of the micro adapter. The kernels take any two of 1 to 64; these are the ones in use.
RANKS = tuple(product((1, 2, 3, 4, 8, 16, 32, 64), (1, 2)))

PROJECT = Kernel(
    "lora_project",
    (("x", "float"), ("a1", "float"), ("a2", "float"), ("params", "int")),
    (("u", "float"),),
    ("R1", "R2"),
    threads=256,
    values=RANKS,
)
ADD = Kernel(
    "lora_add",
    (("y", "float"), ("u", "float"), ("b1", "float"), ("b2", "float"), ("params", "int")),
    (("out", "float"),),
    ("R1", "R2"),
    threads=256,
    values=RANKS,
)


@dataclass(frozen=True)
class Tier:
    """One adapter of a layer: scale * (x @ a) @ b."""

    a: mx.array  # [in, rank]
    b: mx.array  # [rank, out]
    scale: float


def lora_add(x: mx.array, y: mx.array, base: Tier, micro: Tier) -> mx.array:
    run = lora_add_gpu if on_gpu() else lora_add_ops
    return run(x.astype(mx.float32), y.astype(mx.float32), base, micro).astype(y.dtype)


def lora_add_gpu(x: mx.array, y: mx.array, base: Tier, micro: Tier, run=Kernel.__call__) -> mx.array:
    tokens, out_dim = y.shape
    ranks = base.a.shape[1], micro.a.shape[1]
    first = params(x.shape[1], base.scale, micro.scale)
    u_shape = (tokens, sum(ranks)) if tokens * sum(ranks) >= 8 else (8,)
    u = run(PROJECT, [x, base.a, micro.a, first], [u_shape], (tokens, 1, 1), ranks)[0]
    groups = (-(-out_dim // 256), tokens, 1)
    return run(ADD, [y, u, base.b, micro.b, params(out_dim)], [y.shape], groups, ranks)[0]


def lora_add_ops(x: mx.array, y: mx.array, base: Tier, micro: Tier) -> mx.array:
    """The twin."""
    return y + sum(tier.scale * ((x @ tier.a) @ tier.b) for tier in (base, micro))


def params(n: int, *floats: float) -> mx.array:
    """int32 [16]: n, then floats by their bits."""
    words: Sequence[int] = struct.unpack(f"{len(floats)}i", struct.pack(f"{len(floats)}f", *floats))
    return mx.array([n, *words, *[0] * (PARAMS - 1 - len(words))], mx.int32)
