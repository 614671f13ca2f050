"""Which backend runs a model, and why.

`describe` imports no MLX unless it has to look for a GPU; `open_backend` loads the weights.
"""

from dataclasses import dataclass

from ..errors import UsageError
from ..models.base import Model
from .base import Backend

NAMES = ("auto", "mlx", "native", "hybrid", "reference")
NOT_BUILT = ("native", "hybrid")


@dataclass(frozen=True)
class Choice:
    """What `open_backend` would open. `why` is one sentence for people."""

    name: str  # "mlx" | "reference"
    device: str  # "metal" | "cuda" | "cpu"
    kernels: str  # "metal", "cuda", "cpu+openblas 0.3.34", "numpy"
    why: str


def describe(name: str = "auto") -> Choice:
    """The choice for a name: "auto" is Metal, else CUDA, else MLX on the CPU."""
    if name not in NAMES:
        raise UsageError(f"no backend is called {name!r}; choose one of {', '.join(NAMES)}")
    if name in NOT_BUILT:
        raise UsageError(f"backend {name!r} is not built into this version; use auto, mlx or reference")
    if name == "reference":
        return Choice("reference", "cpu", "numpy", "asked for: the slow NumPy oracle")
    return _describe_mlx(asked=name == "mlx")


def _describe_mlx(asked: bool) -> Choice:
    from .mlx import default_device
    from .mx import BLAS

    device = default_device()
    kernels = f"cpu+{BLAS.name}" if device == "cpu" else device
    why = {
        "metal": "MLX finds Metal",
        "cuda": "MLX finds CUDA",
        "cpu": f"MLX finds no GPU; its CPU matrix products run on {BLAS.name}"
        + (f" ({BLAS.detail})" if BLAS.detail else ""),
    }[device]
    return Choice("mlx", device, kernels, f"asked for: {why}" if asked else why)


def open_backend(name: str, model: Model, threads: int | None = None) -> Backend:
    """Load the model's weights into the backend of that name (see `describe`). Use it in this thread only.

    threads: CPU threads for matrix products; by default the physical cores that this process may use.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be at least 1, got {threads}")
    choice = describe(name)
    if choice.name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend(model)
    from .mlx import MLXBackend

    return MLXBackend(model, device=choice.device, threads=threads)
