import pytest

from ruvmlx.models.load import load_model

from ..models.make_models import make_safetensors_model


@pytest.fixture
def folder(tmp_path):
    """A small random model."""
    return make_safetensors_model(tmp_path / "model", dtype="float32")


@pytest.fixture
def config(folder):
    """Its sizes."""
    return load_model(str(folder)).config
