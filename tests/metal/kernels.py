"""All kernels, with those of their template values that the simulator runs."""

from ruvmlx.backends.mlx.kernels import decode, export
from ruvmlx.backends.mlx.kernels.source import FLOATS, Kernel, Template
from ruvmlx.backends.mlx.kernels.source import HEAD_DIMS as DIMS

GROUPS = 1, 3, 4, 8
TYPES = FLOATS
SOME = {kernel: [(d, g) for d in DIMS for g in (*GROUPS, 6, 2)] for kernel in (decode.ATTEND, decode.MATRIX)}


def simulated(kernel: Kernel) -> list[tuple[Template, ...]]:
    """All values, or those in SOME: every value costs a compilation."""
    return [chosen for chosen in kernel.values if kernel not in SOME or chosen in SOME[kernel]]


CUDA_ONLY = {decode.MATRIX}
KERNELS = {kernel: simulated(kernel) for kernel in (*export.KERNELS, *CUDA_ONLY)}
__all__ = ["CUDA_ONLY", "DIMS", "GROUPS", "KERNELS"]
