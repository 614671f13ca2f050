"""Which backend runs a model, and why.

`describe` imports no MLX unless it has to look for a GPU; `open_backend` loads the weights.
"""

from dataclasses import dataclass, replace

from ..errors import UsageError
from ..kernels.library import LibraryError
from ..kv.policy import EVERYTHING, F16, PAGE, TIERED, TierPolicy
from ..models.base import Model
from . import cpu
from .base import Backend

NAMES = ("auto", "mlx", "native", "hybrid", "reference")
NOT_BUILT = ("hybrid",)


@dataclass(frozen=True)
class Choice:
    """What `open_backend` would open. `why` is one sentence for people."""

    name: str  # "mlx" | "native" | "reference"
    device: str  # "metal" | "cuda" | "cpu"
    kernels: str  # "metal", "cuda", "native avx512vnni, 2 threads", "cpu+openblas 0.3.34", "numpy"
    why: str


def describe(name: str = "auto", threads: int | None = None) -> Choice:
    """The choice for a name: "auto" is Metal, else CUDA, else the native decoder, else MLX on the CPU."""
    if name not in NAMES:
        raise UsageError(f"no backend is called {name!r}; choose one of {', '.join(NAMES)}")
    if name in NOT_BUILT:
        raise UsageError(
            f"backend {name!r} is not built into this version; use auto, mlx, native or reference"
        )
    if name == "reference":
        return Choice("reference", "cpu", "numpy", "asked for: the slow NumPy oracle")
    if name == "native":
        return _describe_native("asked for", threads)
    return _describe_mlx("asked for: ") if name == "mlx" else _describe_auto(threads)


def _describe_auto(threads: int | None) -> Choice:
    from .mlx import default_device

    if default_device() != "cpu":
        return _describe_mlx()
    try:
        return _describe_native("MLX finds no GPU", threads)
    except LibraryError as error:
        found = _describe_mlx()
        return replace(found, why=f"{found.why}; the native decoder is missing: {error}")


def _describe_native(why: str, threads: int | None) -> Choice:
    from ..kernels.decoder import matmul_implementations
    from .native import describe_kernels

    n, impl = threads or cpu.physical_cores(), matmul_implementations()[0]
    return Choice("native", "cpu", describe_kernels(n), f"{why}; the C decoder runs on {impl}")


def _describe_mlx(asked: str = "") -> Choice:
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
    return Choice("mlx", device, kernels, asked + why)


def asked_policy(kv: str | None, tiers: str | None = None) -> TierPolicy | None:
    """The KV cache's policy that the user named; None when that is left to what was measured.

    kv: "tiered", "f16", "auto" or None, which is auto. tiers: "HOT,WARM", what tiered then means.
    """
    if kv == F16.name:
        return F16
    if tiers is not None:
        return parse_tiers(tiers)
    return TIERED if kv == TIERED.name else None


def parse_tiers(text: str) -> TierPolicy:
    """ "64,1024" or "256,all": the policy's lengths in tokens. UsageError for others."""
    try:
        hot, warm = text.split(",")
        return TierPolicy(TIERED.name, int(hot), EVERYTHING if warm == "all" else int(warm))
    except ValueError:
        raise UsageError(
            f"kv_tiers = {text!r}: expected HOT,WARM in tokens, multiples of {PAGE}, hot <= warm, "
            "as in 64,1024 or 256,all."
        ) from None


def cache_policy(kv: str | None, backend: Backend, tiers: str | None = None) -> TierPolicy | None:
    """The policy that was asked for; else tiered where the backend has tiers."""
    default = None if backend.name == "reference" else TIERED
    return asked_policy(kv, tiers) or default


def open_backend(name: str, model: Model, threads: int | None = None, kv_budget: int = 0) -> Backend:
    """Load the model's weights into the backend of that name (see `describe`). Use it in this thread only.

    threads: CPU threads; by default the physical cores that this process may use. kv_budget: bytes that the
    tiered KV caches should stay within, 0 for no bound.
    """
    backend = _open(name, model, threads)
    if kv_budget and hasattr(backend, "pool"):
        backend.pool.budget = kv_budget
    return backend


def _open(name: str, model: Model, threads: int | None) -> Backend:
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be at least 1, got {threads}")
    choice = describe(name, threads)
    if choice.name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend(model)
    if choice.name == "native":
        from .native import NativeBackend

        return NativeBackend(model, threads)
    from .mlx import MLXBackend

    return MLXBackend(model, device=choice.device, threads=threads)
