"""This module chooses the backend (MLX, the native decoder or the reference) for a model, and gives the
reason for the choice.

`describe` returns the choice without opening a backend, and imports MLX only if it must search for a GPU.
`open_backend` opens the backend and loads the weights.
"""

import gc
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from ..errors import GPUFailed, UsageError
from ..kernels.library import LibraryError
from ..kv.policy import EIGHT_BITS, F16, TIERED, TierPolicy, limit_to
from ..models.config.model import Model, ModelConfig, ModelShape, missing_features
from ..platform import cpu
from ..progress import QUIET, Watch
from ..tiers import parse_lengths
from .base import Backend
from .sharded.place import all_are_here, ranks
from .weight_bytes import bytes_of_weights, first_layers

if TYPE_CHECKING:
    from .mlx.any_backend import AnyBackend
    from .mlx.backend import MLXBackend

NAMES = ("auto", "mlx", "native", "hybrid", "reference")


@dataclass(frozen=True)
class Choice:
    """The backend that `open_backend` opens, unless a GPU fails.

    why: one sentence for people with the reason for the choice of this backend
    """

    name: str  # "mlx" | "native" | "hybrid" | "reference" | "encoder"
    device: str  # "metal" | "cuda" | "cpu"
    kernels: str  # "metal", "cuda", "native avx512vnni, 2 threads", "cpu+openblas 0.3.34", "numpy"
    why: str
    ranks: int = 1  # the number of processes over which the model is divided


def describe(name: str = "auto", threads: int | None = None) -> Choice:
    """Return the choice for a backend's name, without a look at the model. "auto" chooses the first of these
    that is available: MLX on Metal, MLX on CUDA, the native decoder, MLX on the CPU."""
    if name not in NAMES:
        raise UsageError(f"no backend is called {name!r}; choose one of {', '.join(NAMES)}")
    if (n := ranks()) > 1:
        return _describe_ranks(name, n)
    if name == "reference":
        return Choice("reference", "cpu", "numpy", "asked for: the slow NumPy oracle")
    if name == "native":
        return _describe_native("asked for", threads)
    if name == "hybrid":
        return _describe_hybrid(threads)
    return _describe_mlx("asked for: ") if name == "mlx" else _describe_auto(threads)


def _describe_ranks(name: str, n: int) -> Choice:
    if name not in ("auto", "mlx"):
        raise UsageError(f"--backend {name}: `ruvmlx launch` divides a model with MLX. Leave --backend out.")
    one = _describe_mlx()
    why = f"`ruvmlx launch` divides the model over {n} machines; {one.why}"
    return replace(one, kernels=f"{one.kernels}, over {n} machines", why=why, ranks=n)


def _describe_hybrid(threads: int | None) -> Choice:
    one, two = _describe_mlx(), _describe_native("", threads)
    why = "asked for: MLX and the C decoder share the work, as measured at the opening"
    return Choice("hybrid", one.device, f"{one.kernels} + {two.kernels}", why)


def _describe_auto(threads: int | None) -> Choice:
    from .mlx.runner import default_device

    if default_device() != "cpu":
        return _describe_mlx()
    try:
        return _describe_native("MLX finds no GPU", threads)
    except LibraryError as error:
        found = _describe_mlx()
        return replace(found, why=f"{found.why}; the native decoder is missing: {error}")


def _describe_native(why: str, threads: int | None) -> Choice:
    from ..kernels.matmul import implementations
    from .native.backend import describe_kernels

    n, impl = threads or cpu.physical_cores(), implementations()[0]
    return Choice("native", "cpu", describe_kernels(n), f"{why}; the C decoder runs on {impl}")


def _describe_mlx(asked: str = "") -> Choice:
    from ..platform.mx import BLAS
    from .mlx.runner import default_device

    device = default_device()
    kernels = f"cpu+{BLAS.name}" if device == "cpu" else device
    why = {
        "metal": "MLX finds Metal",
        "cuda": "MLX finds CUDA",
        "cpu": f"MLX finds no GPU; its CPU matrix products run on {BLAS.name}"
        + (f" ({BLAS.detail})" if BLAS.detail else ""),
    }[device]
    return Choice("mlx", device, kernels, asked + why)


def lack_of_pages(choice: Choice, model: Model) -> str:
    """Return a line that tells the user why the backend has no KV pages for the model. If the backend has KV
    pages for the model, or never has KV pages, return ""."""
    if (choice.name, choice.device) != ("mlx", "cpu") or not isinstance(model.shape, ModelConfig):
        return ""
    from .mlx.tiered_cpu import why_no_pages

    return why_no_pages(model.shape)


def asked_policy(kv: str | None, shape: ModelShape, tiers: str | None = None) -> TierPolicy | None:
    """Return the KV cache policy that the settings name; None if the choice is left to the program.

    kv: "tiered" (the model's default tiers), "f16", "auto" or None; None means "auto"
    tiers: the ages (tokens) at which a page leaves the hot and the warm tier, for example "256,1024"; unused
        for "f16". If the text uses no tier below the default's lowest tier, as "256,all" for a model that
        adds a bias to its keys, memory pressure does not use such a tier either.
    """
    if kv == F16.name:
        return F16
    default = default_policy(shape)
    if tiers is not None:
        asked = TierPolicy(TIERED.name, parse_lengths(tiers))
        limited = limit_to(asked, default.lowest)
        return limited if limited.lengths == asked.lengths else asked
    return default if kv == TIERED.name else None


def default_policy(shape: ModelShape) -> TierPolicy:
    """Return the tiers of a model's KV caches if neither the user nor a measurement chose others: TIERED, or
    EIGHT_BITS if the model adds a bias to its keys.

    A bias makes the same few channels of all keys large. With Qwen2.5 0.5B, the largest bias is 211. A group
    of 4-bit numbers then keeps the large channel and loses the others (kv/README.md).
    """
    has_bias = isinstance(shape, ModelConfig) and "k_proj" in shape.biases
    return EIGHT_BITS if has_bias else TIERED


def cache_policy(
    kv: str | None, backend: Backend, shape: ModelShape, tiers: str | None = None
) -> TierPolicy | None:
    """Return the KV cache policy that the settings name (see `asked_policy`). If the settings name no policy,
    return the result of `default_policy`, or None for the reference backend. Return None if a backend has no
    KV pages."""
    if backend.name in ("mlx", "hybrid", "encoder") and backend.pool is None:
        return None  # this backend has only caches without pages; mostly its `caveat` gives the reason
    default = None if backend.name == "reference" else default_policy(shape)
    return asked_policy(kv, shape, tiers) or default


def for_model(choice: Choice, name: str, shape: ModelShape) -> Choice:
    """Return `choice`, or the MLX backend if the model needs mlx-lm's code. Raises UsageError if the user
    named another backend for this model. Every encoder has the same backend, whichever the user named."""
    if isinstance(shape, ModelConfig):
        return choice
    if not shape.writes:
        return Choice("encoder", "cpu", "numpy", "encoders run in NumPy, on the CPU")
    if name in ("native", "hybrid", "reference"):
        raise UsageError(f"--backend {name}: {missing_features(shape)}. Leave --backend out, or choose mlx.")
    found = _describe_mlx()
    return replace(found, ranks=choice.ranks, why=f"mlx-lm's own code for {shape.model_type}; {found.why}")


def open_backend(
    name: str, model: Model, threads: int | None = None, kv_budget: int = 0, watch: Watch = QUIET
) -> Backend:
    """Open the backend that `name` chooses (see `describe`), load the model's weights into the backend, and
    return the backend. The caller must not call the backend from two threads at a time.

    On a GPU the backend uses ruvmlx's kernels if they pass the self-check. If the kernels fail the
    self-check, the backend uses a KV cache without pages. If the graph without ruvmlx's kernels fails too,
    "auto" opens the native decoder (or MLX on the CPU, if the C library is missing or only mlx-lm's code runs
    the model), and "mlx" raises GPUFailed. The backend's `caveat` says if a failure is the reason that the
    backend runs without the GPU or without ruvmlx's kernels.

    threads: the number of CPU threads; None: the number of physical cores that this process is allowed to use
    kv_budget: the target for the maximum bytes of all tiered KV caches; 0: no limit
    watch: an object that receives the progress of the self-check and of a loading with mlx-lm's code
    """
    backend = _open(name, model, threads, watch)
    pool = backend.pool
    if kv_budget and pool is not None:
        pool.budget = kv_budget
    return backend


def _open(name: str, model: Model, threads: int | None, watch: Watch) -> Backend:
    if threads is not None and threads < 1:
        raise UsageError(f"threads must be at least 1, got {threads}")
    choice = for_model(describe(name, threads), name, model.shape)
    if choice.name == "reference":
        from .reference import ReferenceBackend

        return ReferenceBackend(model)
    if choice.name == "encoder":
        from .encoder.backend import EncoderBackend

        return EncoderBackend(model, threads)
    if choice.ranks > 1:
        from .sharded.cluster import open_leader

        return open_leader(model, threads, partial(_open_alone, threads), watch)
    if choice.name == "native":
        from .native.backend import NativeBackend

        return NativeBackend(model, threads)
    if choice.name == "hybrid":
        return _open_hybrid(model, choice.device, threads, watch)
    if choice.device != "cpu":
        return _open_on_gpu(name, model, choice.device, threads, watch)
    return _mlx_on_cpu(model, threads, watch)


def _open_alone(threads: int | None, model: Model, layers: int) -> Backend | None:
    """Open the first layers of a model as one machine of `ruvmlx launch` runs it alone. Return None if the
    whole model does not fit this machine."""
    if all_are_here():
        threads = None  # the ranks share the cores
    choice = _describe_auto(threads)
    whole = bytes_of_weights(model.types, model.bytes, model.parameters, choice.name, choice.device)
    if whole > cpu.memory_limit(choice.device == "metal"):
        return None
    if choice.name == "native":
        from .native.backend import NativeBackend

        return NativeBackend(model, threads, layers=layers)
    from .mlx.backend import MLXBackend
    from .mlx.gpu_check import check

    check_gpu = check if choice.device != "cpu" else None
    return MLXBackend(model, choice.device, threads, check=check_gpu, layers=layers)


def _open_hybrid(model: Model, device: str, threads: int | None, watch: Watch) -> Backend:
    """Open a model on both sides, or a part of its layers on each side if two copies do not fit."""
    from ..models.weights.halves import halves
    from .hybrid.backend import join_sides
    from .hybrid.split import SplitBackend
    from .native.backend import NativeBackend

    on_gpu = device != "cpu"
    facts = model.types, model.bytes, model.parameters
    first = first_layers(*facts, device, model.config.n_layers)
    below, above = halves(model, first) if first else (model, model)
    mlx = _on_gpu(above, device, threads, watch) if on_gpu else _mlx_on_cpu(above, threads, watch)
    native = NativeBackend(below, threads)
    if first:
        return SplitBackend(native, cast("MLXBackend", mlx))
    return join_sides(mlx, native, are_apart=on_gpu)


def _mlx_on_cpu(model: Model, threads: int | None, watch: Watch) -> "MLXBackend | AnyBackend":
    from .mlx.any_backend import AnyBackend
    from .mlx.backend import MLXBackend

    if model.is_own:
        return MLXBackend(model, device="cpu", threads=threads)
    return AnyBackend(model, device="cpu", threads=threads, watch=watch)


def _open_on_gpu(name: str, model: Model, device: str, threads: int | None, watch: Watch) -> Backend:
    """Open the MLX backend on the GPU. If the GPU fails and `name` is "auto", open a backend on the CPU;
    otherwise raise GPUFailed."""
    try:
        return _on_gpu(model, device, threads, watch)
    except GPUFailed as error:
        if name != "auto":
            raise
        why = error.why
    return _without_gpu(why, model, threads, watch)


def _on_gpu(model: Model, device: str, threads: int | None, watch: Watch) -> "MLXBackend | AnyBackend":
    """Return the MLX backend on the GPU. Raise GPUFailed if MLX raises an error before the first token, or if
    mlx-lm's graph failed in the self-check."""
    from .mlx.any_backend import AnyBackend
    from .mlx.backend import MLXBackend
    from .mlx.check_results import GPU_ERRORS, STARTER, reason
    from .mlx.gpu_check import check

    try:
        if not model.is_own:
            # models that run with mlx-lm's code use none of ruvmlx's kernels, so the check of the graph with
            # the starter model's shapes is enough
            if why := check(STARTER, watch=watch).graph_fails:
                raise GPUFailed(why, "auto")
            return AnyBackend(model, device=device, threads=threads, watch=watch)
        backend = MLXBackend(model, device=device, threads=threads, check=partial(check, watch=watch))
        backend.warm_up()
        return backend
    except GPU_ERRORS as error:
        instead = "native" if model.is_own else "auto"
        raise GPUFailed(reason(str(error)) or type(error).__name__, instead) from None


def _without_gpu(why: str, model: Model, threads: int | None, watch: Watch) -> Backend:
    """Return the native backend; its `caveat` tells the user that the GPU fails. why: the GPU's error. If the
    C library is missing, or if the model needs mlx-lm's own code, return MLX on the CPU."""
    from ..platform.gpu import gpu
    from ..platform.mx import mx
    from .native.backend import NativeBackend

    gpu.given_up = True
    gc.collect()
    mx.clear_cache()  # free the memory on the GPU before the weights are loaded on the CPU
    try:
        backend: Backend = (
            NativeBackend(model, threads) if model.is_own else _mlx_on_cpu(model, threads, watch)
        )
    except LibraryError:
        backend = _mlx_on_cpu(model, threads, watch)
    caveat = (
        f"MLX cannot compute on this machine's GPU ({why}); replies come from the CPU. "
        "`ruvmlx doctor` checks again."
    )
    backend.caveat = caveat if model.is_own else f"{caveat} {backend.caveat}"
    return backend
