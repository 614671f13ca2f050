"""Which backend a name opens."""

import pytest

from ruvmlx.backends import select
from ruvmlx.backends.mlx import backend as mlx
from ruvmlx.errors import UsageError
from ruvmlx.models.load import load_model
from ruvmlx.platform import gpu
from tests.models.make_models import make_safetensors_model


@pytest.mark.parametrize(
    ("metal", "cuda", "name", "device"),
    [(1, 1, "mlx", "metal"), (0, 1, "mlx", "cuda"), (0, 0, "native", "cpu")],
)
def test_auto_picks_metal_then_cuda_then_native(monkeypatch, metal, cuda, name, device):
    """Metal, else CUDA, else the native decoder, with a reason."""
    from ruvmlx.platform.mx import mx

    monkeypatch.setattr(mx.metal, "is_available", lambda: bool(metal))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: bool(cuda))
    monkeypatch.setattr(gpu, "GPU_ALLOWED", True)
    choice = select.describe("auto")
    assert (choice.name, choice.device) == (name, device)
    assert choice.why
    assert choice.kernels.startswith(device if name == "mlx" else "native")


def test_a_gpu_that_is_switched_off_is_none(monkeypatch):
    """RUVMLX_GPU=off, read when MLX is first imported."""
    monkeypatch.setattr(mlx.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "GPU_ALLOWED", False)
    assert mlx.default_device() == "cpu" and select.describe("auto").name == "native"


def test_auto_without_the_library(monkeypatch):
    """No C library and no GPU: MLX on the CPU, and why."""
    from ruvmlx.kernels import matmul
    from ruvmlx.kernels.library import LibraryError
    from ruvmlx.platform.mx import mx

    def missing():
        raise LibraryError("librvm.so is not installed")

    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(matmul, "implementations", missing)
    choice = select.describe("auto")
    assert (choice.name, choice.device) == ("mlx", "cpu")
    assert "librvm.so is not installed" in choice.why
    with pytest.raises(LibraryError):
        select.describe("native")


def test_native_names_instruction_set_and_threads():
    """ "native avx512vnni, 2 threads" """
    from ruvmlx.kernels.matmul import implementations

    assert select.describe("native", 2).kernels == f"native {implementations()[0]}, 2 threads"
    assert select.describe("native", 1).kernels.endswith("1 thread")


def test_an_unknown_backend_is_refused():
    with pytest.raises(UsageError, match="'tpu'"):
        select.describe("tpu")


def test_the_opened_backend_is_the_described_one(tmp_path):
    """The opened backend is the described one. A GPU may fail the check of our kernels, which comes later."""
    model = load_model(str(make_safetensors_model(tmp_path / "m")))
    for name in ("auto", "mlx", "native", "reference"):
        choice, backend = select.describe(name, 1), select.open_backend(name, model, threads=1)
        kernels = backend.kernels.removesuffix(", plain KV cache")
        assert (backend.name, kernels) == (choice.name, choice.kernels)
    with pytest.raises(UsageError, match="threads"):
        select.open_backend("auto", model, threads=0)
