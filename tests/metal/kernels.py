"""All kernels, with those of their template values that the simulator runs."""

from ruvmlx.backends.mlx.kernels import decode, export
from ruvmlx.backends.mlx.kernels.source import FLOATS, Kernel, Template
from ruvmlx.backends.mlx.kernels.source import HEAD_DIMS as DIMS

GROUPS = 1, 3, 4, 8
TYPES = FLOATS
SOME: dict[Kernel, list[tuple[int, int]]]
SOME = {kernel: [(d, g) for d in DIMS for g in (*GROUPS, 6, 2)] for kernel in decode.WITH_SLOPES}
SLOPED = [(64, 3), (64, 6), (80, 4), (128, 1), (128, 8), (256, 2)]
SOME |= {
    decode.WITH_SLOPES[decode.ATTEND]: SLOPED,
    decode.WITH_SLOPES[decode.MATRIX]: [(64, 3), (64, 8), (128, 1), (128, 4), (128, 6)],
}


def simulated(kernel: Kernel) -> list[tuple[Template, ...]]:
    """All values, or those in SOME: every value costs a compilation."""
    return [chosen for chosen in kernel.values if kernel not in SOME or chosen in SOME[kernel]]


CUDA_ONLY = (decode.MATRIX, decode.WITH_SLOPES[decode.MATRIX])  # each worker has the same order
KERNELS = {kernel: simulated(kernel) for kernel in (*export.KERNELS, *CUDA_ONLY)}
__all__ = ["CUDA_ONLY", "DIMS", "GROUPS", "KERNELS", "SLOPED"]
