"""Which backend a name opens."""

import pytest

from ruvmlx.backends import select
from ruvmlx.errors import UsageError
from ruvmlx.models.load import load_model
from tests.models.make_models import make_safetensors_model


@pytest.mark.parametrize(("metal", "cuda", "device"), [(1, 1, "metal"), (0, 1, "cuda"), (0, 0, "cpu")])
def test_auto(monkeypatch, metal, cuda, device):
    """Metal, else CUDA, else the CPU, with a reason."""
    from ruvmlx.backends.mx import mx

    monkeypatch.setattr(mx.metal, "is_available", lambda: bool(metal))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: bool(cuda))
    choice = select.describe("auto")
    assert (choice.name, choice.device) == ("mlx", device)
    assert choice.why
    assert choice.kernels.startswith(device)


@pytest.mark.parametrize("name", ["native", "hybrid"])
def test_not_built(name):
    with pytest.raises(UsageError, match="not built into this version"):
        select.describe(name)


def test_unknown():
    with pytest.raises(UsageError, match="'tpu'"):
        select.describe("tpu")


def test_open(tmp_path):
    """The opened backend is the described one."""
    model = load_model(str(make_safetensors_model(tmp_path / "m")))
    for name in ("auto", "mlx", "reference"):
        choice, backend = select.describe(name), select.open_backend(name, model, threads=1)
        assert (backend.name, backend.kernels) == (choice.name, choice.kernels)
    with pytest.raises(UsageError, match="threads"):
        select.open_backend("auto", model, threads=0)
